"""Prompts with what their rewards need: format "prompts", a .jsonl with one of them a line.

A line is an object with `prompt`, a text to continue, or `messages`, a conversation to answer. All
its other keys are for the reward function.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.data import SourceConfig, Tokenizer
from titanlite.data.sample_source import StoredSamples
from titanlite.data.token_source import CorpusChecks, TokenSource
from titanlite.errors import DataError
from titanlite.files import parse_json
from titanlite.labels import SAME_DOCUMENT
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.template import open_chat_template

PROMPTS = "prompts"
_FORMAT = '{"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}'


class PromptFile(TokenSource):
    """The lines of a file, of which `tokens` counts the bytes."""

    def __init__(self, path: str):
        self.path = path
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            if not size:
                raise DataError(f"{path}: has no prompts.", fix=f"Write lines like {_FORMAT}.")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        starts = [0]
        while (end := self._bytes.find(b"\n", starts[-1])) >= 0:
            starts.append(end + 1)
        self._bounds = np.array(starts if starts[-1] == size else [*starts, size])
        self.tokens, self.fingerprint = size, xxhash.xxh3_128_hexdigest(self._bytes)
        for number in range(len(self)):
            self.record_at(number)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def record_at(self, number: int) -> dict[str, Any]:
        """The object of line `number`, from 0; raises DataError."""
        line = self._bytes[self._bounds[number] : self._bounds[number + 1]]
        label = f"{self.path}, line {number + 1}"
        try:
            record = parse_json(line.decode())
        except ValueError as error:
            raise DataError(f"{label}: is not JSON ({error}).") from None
        has_text = isinstance(record, dict) and isinstance(record.get("prompt"), str)
        if not has_text and not (isinstance(record, dict) and record.get("messages")):
            raise DataError(f"{label}: has neither prompt nor messages.", fix=f"Write {_FORMAT}.")
        return record

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        raise TypeError("prompts are no tokens until a template has rendered them")


@dataclass(frozen=True)
class PromptSamples(StoredSamples):
    """A sample is a prompt; what the stream reads of it is empty, as its answers do not exist."""

    source: PromptFile

    @property
    def is_packed(self) -> bool:
        return True

    def samples(self, seq_len: int, whole: bool = True) -> int:
        return len(self.source)

    def first_token(self, sample: int, seq_len: int) -> int:
        return sample

    def read_samples(self, samples: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(samples), seq_len)
        return np.zeros(shape, np.int64), np.full(shape, SAME_DOCUMENT, np.int64)


def open_prompts(
    config: SourceConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer | None,
    checks: CorpusChecks | None,
) -> PromptSamples:
    """Open a source of format "prompts"; raises DataError."""
    label = f'source "{config.name}" ({config.path})'
    if tokenizer is None:
        raise DataError(f"{label}: needs a tokenizer.", fix="Set data.tokenizer.")
    try:
        source = PromptFile(config.path)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{config.path}: cannot be read ({reason}).") from None
    return PromptSamples(config, source, False, 2**31)


class PromptEncoder:
    """The ids of prompts, and the text of completions."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, bos: bool):
        """`template`: of prompts with messages; `bos`: begin the others with BOS."""
        self.tokenizer, self._bos, self._chat = tokenizer, bos, None
        self.ends = {tokenizer.eos_id}  # ids that end a completion
        if template is not None:
            self._chat = ChatEncoder(tokenizer, open_chat_template(template, tokenizer))
            self.ends |= self._chat.encode_prompt([{"role": "user", "content": "x"}])[1]

    def encode(self, record: dict[str, Any], origin: str) -> list[int]:
        """The ids of a line of a prompt file; raises DataError with `origin`."""
        if "messages" not in record:
            first = [self.tokenizer.bos_id] if self._bos else []
            return [*first, *self.tokenizer.encode(record["prompt"])]
        if self._chat is None:
            raise DataError(
                f"{origin}: has messages, but no template is given.",
                fix='Set grpo.template (or --template), such as "llama3".',
            )
        return self._chat.encode_prompt(record["messages"], origin)[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without its end id."""
        ended = bool(ids) and ids[-1] in self.ends
        return self.tokenizer.decode(list(ids[: -1 if ended else None]))
