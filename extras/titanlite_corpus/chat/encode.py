"""Conversations -> entries of a packed corpus: ids, marked UNTRAINED outside of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from titanlite.data.packed import ID_MASK, UNTRAINED
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json
from titanlite_corpus.chat.render import TemplateProblem
from titanlite_corpus.chat.template import ASSISTANT, ChatTemplate, Message, Segment, Tools
from titanlite_corpus.chat.tokenizer_variants import (
    continuing,
    find_strips,
    with_control_tokens,
)
from titanlite_corpus.engine import report_progress

ENTRY_RANGE = 1 << 31  # entries are below it
# What the tokenizers library strips: Unicode's White_Space, without Python's \x1c to \x1f
_WHITE_SPACE = "".join(
    c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f"
)
_MESSAGES_FORMAT = '{"messages": [{"role": "user", "content": "…"}, …]}'


class ChatEncoder:
    """Encodes conversations with a template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._tokenizer = with_control_tokens(tokenizer, template.special_tokens)
        self._after_token = continuing(self._tokenizer, after_text=False)
        self._after_text = continuing(self._tokenizer, after_text=True)
        self._strips = find_strips(self._tokenizer)
        self._template = template

    def encode(self, text: str, origin: str) -> np.ndarray:
        """Entries (int32) of a conversation, given as JSON.

        `text` is the list of its messages, or an object of `messages` and `tools`. Empty if it has
        no answer. Raises DataError with `origin` if it is not a conversation.
        """
        try:
            conversation = parse_json(text)
            if not isinstance(conversation, dict):
                conversation = {"messages": conversation}
            messages = _check_messages(conversation.get("messages"))
            tools = _check_tools(conversation.get("tools", []))
            if not any(message["role"] == ASSISTANT for message in messages):
                return np.empty(0, np.int32)
            entries = list(self._encode_segments(self._template.render(messages, tools)))
        except TemplateProblem as error:
            raise DataError(
                f'{origin}: the chat template "{self._template.name}" cannot be used: {error}.',
                fix='Mark the answers in the template with {% generation %}, or use "chatml" or'
                ' "llama3" if the model has that format.',
            ) from None
        except ValueError as error:
            raise DataError(
                f'{origin}: is not a conversation for the template "{self._template.name}":'
                f" {error}.",
                fix=f"Fix or remove it; a line is {_MESSAGES_FORMAT}.",
            ) from None
        except DataError as error:  # of the tokenizer
            raise DataError(f"{origin}: {error.message}", error.fix) from None
        return np.concatenate([np.empty(0, np.int32), *entries])

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[list[int], set[int]]:
        """(ids before the next answer of a conversation, the id that ends an answer, if any).

        These are the ids that training had there. Raises DataError as `encode` does.
        """
        chat = [*messages, {"role": ASSISTANT, "content": "x"}]
        entries = self.encode(json.dumps(chat), "the conversation")
        ids, trained = entries & ID_MASK, entries & UNTRAINED == 0
        if trained.all() or not trained.any():
            raise DataError(f'the chat template "{self._template.name}" marks no answer.')
        last = int(np.flatnonzero(trained)[-1])
        begin = int(np.flatnonzero(~trained[:last])[-1]) + 1
        special = set(self._tokenizer.special_tokens.values())
        ends = [id for id in ids[begin : last + 1].tolist() if id in special]
        return ids[:begin].tolist(), set(ends[-1:])

    @property
    def begins_with_bos(self) -> bool:
        """Whether the template puts the tokenizer's BOS before a conversation."""
        messages = [{"role": role, "content": "x"} for role in ("user", ASSISTANT)]
        first = int(self.encode(json.dumps(messages), "a test")[0] & ID_MASK)
        return self._tokenizer.has_bos and first == self._tokenizer.bos_id

    def _encode_segments(self, segments: Iterator[Segment]) -> Iterator[np.ndarray]:
        """Adjacent texts are encoded as one, except at the beginning and the end of an answer."""
        stripped = _strip_around(list(segments), self._strips)
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


def encode_chats(
    encoder: ChatEncoder, documents: Sequence[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """(entries of all conversations that have an answer, length of each), from (text, origin)."""
    parts: list[np.ndarray] = []
    for number, (text, origin) in enumerate(documents):
        entries = encoder.encode(text, origin)
        if len(entries):
            parts.append(entries)
        if number % 256 == 0:
            report_progress()
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.concatenate([np.empty(0, np.int32), *parts]), lengths


def _check_messages(messages: Any) -> Sequence[Message]:
    """Messages with roles and text; raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("it has no list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object")
        for key in ("role", "content"):
            only_calls = key == "content" and message.get(key) is None and message.get("tool_calls")
            if not isinstance(message.get(key), str) and not only_calls:
                raise ValueError(f'message {number} has no "{key}" that is a string')
    return messages


def _check_tools(tools: Any) -> Tools:
    """A list of objects; raises ValueError."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError('its "tools" are not a list of objects')
    return tools
