"""Conversations and pairs -> entries of a packed corpus: UNTRAINED outside of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from titanlite.data.packed import BEGINS, ID_MASK, UNTRAINED
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json
from titanlite_corpus.chat.lines import LeftOutError, check_messages, read_conversation, read_pair
from titanlite_corpus.chat.render import TemplateProblem
from titanlite_corpus.chat.template import ASSISTANT, ChatTemplate, Message, Segment, Tools
from titanlite_corpus.chat.tokenizer_variants import (
    continuing,
    find_strips,
    with_control_tokens,
)

ENTRY_RANGE = 1 << 31  # entries are below it
# What the tokenizers library strips: Unicode's White_Space, without Python's \x1c to \x1f
_WHITE_SPACE = "".join(
    c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f"
)


class ChatEncoder:
    """Encodes conversations, and pairs of answers, with a template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, last_only: bool = False):
        """`last_only`: of the answers of a conversation, only the last one is trained on."""
        self._tokenizer = with_control_tokens(tokenizer, template.special_tokens)
        self._after_token = continuing(self._tokenizer, after_text=False)
        self._after_text = continuing(self._tokenizer, after_text=True)
        self._strips = find_strips(self._tokenizer)
        self._template, self._last_only = template, last_only

    def encode(self, text: str, origin: str) -> np.ndarray:
        """Entries (int32) of a conversation: a line as JSON, or the list of its messages.

        Raises DataError with `origin` if it is none, and LeftOutError as `read_conversation` does.
        """
        with self._name_errors(origin, "a conversation"):
            line = parse_json(text)
            line = line if isinstance(line, dict) else {"messages": line}
            return self._encode(*read_conversation(line, self._last_only), self._last_only)

    def encode_pair(self, text: str, origin: str) -> np.ndarray:
        """Entries (int32) of both conversations of a pair, with only their last answers as labels.

        The first id of the rejected one is marked BEGINS. Raises as `encode` does, for `read_pair`.
        """
        with self._name_errors(origin, "a pair of answers"):
            *sides, tools = read_pair(parse_json(text))
            chosen, rejected = (self._encode(side, tools, last_only=True) for side in sides)
            if np.array_equal(chosen, rejected):
                raise LeftOutError("equal_answers")
            rejected[0] |= BEGINS | UNTRAINED
            return np.concatenate([chosen, rejected])

    def encode_prompt(
        self, messages: Sequence[Message], origin: str = "the conversation"
    ) -> tuple[list[int], set[int]]:
        """(ids before the next answer of a conversation, the id that ends an answer, if any).

        These are the ids that training had there. Raises DataError as `encode` does.
        """
        with self._name_errors(origin, "a conversation"):
            checked = check_messages(messages, "messages")
            entries = self._encode([*checked, {"role": ASSISTANT, "content": "x"}], ())
        ids, trained = entries & ID_MASK, entries & UNTRAINED == 0
        last = int(np.flatnonzero(trained)[-1])
        begin = int(np.flatnonzero(~trained[:last]).max(initial=-1)) + 1
        special = set(self._tokenizer.special_tokens.values())
        ends = [id for id in ids[begin : last + 1].tolist() if id in special]
        return ids[:begin].tolist(), set(ends[-1:])

    @contextmanager
    def _name_errors(self, origin: str, kind: str) -> Iterator[None]:
        """Raise a DataError that names `origin` for what is not `kind`."""
        try:
            yield
        except TemplateProblem as error:
            raise DataError(
                f'{origin}: the chat template "{self._template.name}" cannot be used: {error}.',
                fix="Mark the answers in a copy of the template with {% generation %}, or use"
                ' "chatml" or "llama3" if the model has that format.',
            ) from None
        except ValueError as error:
            raise DataError(
                f'{origin}: is not {kind} for the template "{self._template.name}": {error}.',
                fix="Fix or remove it; docs/how-to/fine-tune.md shows the lines that are read.",
            ) from None
        except DataError as error:  # of the tokenizer
            raise DataError(f"{origin}: {error.message}", error.fix) from None

    @property
    def begins_with_bos(self) -> bool:
        """Whether the template puts the tokenizer's BOS before a conversation."""
        messages = [{"role": role, "content": "x"} for role in ("user", ASSISTANT)]
        first = int(self.encode(json.dumps(messages), "a test")[0] & ID_MASK)
        return self._tokenizer.has_bos and first == self._tokenizer.bos_id

    def _encode(
        self, messages: Sequence[Message], tools: Tools, last_only: bool = False
    ) -> np.ndarray:
        """Entries of a conversation; raises ValueError if the template cannot render it."""
        segments = list(self._template.render(messages, tools))
        if last_only:
            answers = sum(message["role"] == ASSISTANT for message in messages)
            segments = _train_last(segments, answers)
        entries = np.concatenate([np.empty(0, np.int32), *self._encode_segments(segments)])
        if not (entries[1:] & UNTRAINED == 0).any():
            raise TemplateProblem("it marks no answer of this conversation")
        return entries

    def _encode_segments(self, segments: list[Segment]) -> Iterator[np.ndarray]:
        """Adjacent texts are encoded as one, except at the beginning and the end of an answer."""
        stripped = _strip_around(segments, self._strips)
        present, tokenizer = [segment for segment in stripped if segment.text], self._tokenizer
        for (special, trained), group in groupby(present, lambda s: (s.special, s.trained)):
            mark = 0 if trained else int(UNTRAINED)
            texts = [segment.text for segment in group]
            if special:
                ids = [tokenizer.special_tokens[text] for text in texts]
            else:
                ids = tokenizer.encode("".join(texts))
            tokenizer = self._after_token if special else self._after_text
            yield np.array(ids, dtype=np.int32) | np.int32(mark)


def _train_last(segments: list[Segment], answers: int) -> list[Segment]:
    """The segments, of which only the last answer is trained.

    Raises TemplateProblem unless each of the `answers` is a run of trained segments.
    """
    trained = [False, *(segment.trained for segment in segments)]
    begins = [n for n in range(len(segments)) if trained[n + 1] and not trained[n]]
    if len(begins) != answers:
        raise TemplateProblem(
            f"it marks {len(begins)} parts as answers in a conversation with {answers}, so the last"
            " one is not known"
        )
    untrained = [segment._replace(trained=False) for segment in segments[: begins[-1]]]
    return [*untrained, *segments[begins[-1] :]]


def _strip_around(
    segments: list[Segment], strips: Mapping[str, tuple[bool, bool]]
) -> list[Segment]:
    """Remove the white space around special tokens that take it, as Phi-3's <|end|> does."""
    for step, after, strip in ((-1, 0, str.rstrip), (1, 1, str.lstrip)):
        takes, result = False, []
        for segment in segments[::step]:
            if segment.special:
                takes = strips.get(segment.text, (False, False))[after]
            elif takes:
                segment = segment._replace(text=strip(segment.text, _WHITE_SPACE))
                takes = not segment.text
            result.append(segment)
        segments = result[::step]
    return segments
