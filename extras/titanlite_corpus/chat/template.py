"""Chat templates: a conversation -> text and special tokens, and which of them are answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite_corpus.chat.render import Message

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)  # of the built-in templates
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of it in a message

Tools = Sequence[dict[str, Any]]  # JSON schemas of what the assistant may call


class Segment(NamedTuple):
    """A part of a rendered conversation."""

    text: str  # ordinary text, or the name of a special token
    special: bool = False
    trained: bool = False  # part of an answer, so its ids are labels


class ChatTemplate(Protocol):
    """Renders conversations."""

    name: str  # shown in errors
    fingerprint: str  # of everything that the result depends on
    special_tokens: tuple[str, ...]  # of the tokenizer; inside a message they are ordinary text

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Iterator[Segment]:
        """The segments of a conversation; raises ValueError if it cannot be rendered."""
        ...


def _check_plain(messages: Sequence[Message], tools: Tools) -> None:
    """Raise ValueError unless all messages have a role of ROLES, and text alone."""
    keys = [key for key in ("tool_calls", *REASONING) if any(m.get(key) for m in messages)]
    if tools or keys:
        first = "tools" if tools else keys[0]
        raise ValueError(f"it has {first}, which only the model's own template can use")
    for message in messages:
        if message["role"] not in ROLES:
            raise ValueError(f"the role {message['role']!r:.40} is none of {', '.join(ROLES)}")


class Llama3Template:
    """Llama 3's template, as its model card describes it.

    https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/
    """

    name: str = "llama3"
    fingerprint: str = "llama3"
    special_tokens: tuple[str, ...] = (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    )

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Iterator[Segment]:
        """The segments of a conversation; raises ValueError unless they are plain text."""
        _check_plain(messages, tools)
        begin, start_header, end_header, end_of_turn = self.special_tokens
        yield Segment(begin, special=True)
        for message in messages:
            trained = message["role"] == ASSISTANT
            yield Segment(start_header, special=True)
            yield Segment(message["role"])
            yield Segment(end_header, special=True)
            yield Segment("\n\n")
            yield Segment(message["content"].strip(), trained=trained)
            yield Segment(end_of_turn, special=True, trained=trained)


class ChatMLTemplate:
    """ChatML, as OpenAI published it and many models use it, without a default system message.

    https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
    """

    name: str = "chatml"
    fingerprint: str = "chatml"
    special_tokens: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Iterator[Segment]:
        """The segments of a conversation; raises ValueError unless they are plain text."""
        _check_plain(messages, tools)
        start, end = self.special_tokens
        for message in messages:
            trained = message["role"] == ASSISTANT
            yield Segment(start, special=True)
            yield Segment(message["role"] + "\n")
            yield Segment(message["content"], trained=trained)
            yield Segment(end, special=True, trained=trained)
            yield Segment("\n")


TEMPLATES: dict[str, type[Llama3Template] | type[ChatMLTemplate]] = {
    "llama3": Llama3Template,
    "chatml": ChatMLTemplate,
}


def open_chat_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """A built-in template, or that of a tokenizer_config.json or .jinja file; raises DataError."""
    if name in TEMPLATES:
        template: ChatTemplate = TEMPLATES[name]()
    elif Path(name).suffix in (".json", ".jinja"):
        from titanlite_corpus.chat.jinja import open_jinja_template  # which imports this module

        template = open_jinja_template(Path(name), tokenizer)
    else:
        raise DataError(
            f'template = "{name}": is not a chat template.',
            fix=f"Use {', '.join(TEMPLATES)}, or the path of a tokenizer_config.json or .jinja.",
        )
    missing = [token for token in template.special_tokens if token not in tokenizer.special_tokens]
    if missing:
        raise DataError(
            f'tokenizer "{tokenizer.name}": has no special token {" ".join(missing)}, which the'
            f' chat template "{name}" needs.',
            fix="Use the tokenizer and the template of one model.",
        )
    return template
