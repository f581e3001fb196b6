"""The Jinja chat template of a Hugging Face tokenizer.

The answers are what a template marks with {% generation %}, as transformers defines it. In a
template without these marks, an answer is what the rendered text has after the generation prompt,
up to the end of the assistant's message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titanlite.corpus.chat.template import ASSISTANT, Message, Segment, Tools
from titanlite.corpus.hashing import hash_json
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file

_MAX_BYTES = 4 << 20
# Noncharacters, which text for interchange does not contain: they mark answers, and keep the name
# of a control token, in a message, from becoming the token.
_ANSWER, _ANSWER_END, _BREAK = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = str.maketrans(dict.fromkeys((_ANSWER, _ANSWER_END, _BREAK), "\ufffd"))


def open_jinja_template(path: Path, tokenizer: Tokenizer) -> JinjaTemplate:
    """The template of a tokenizer_config.json, or of a file of its own; raises DataError."""
    try:
        text = read_regular_file(path, _MAX_BYTES).decode()
        config = parse_json(text.encode()) if path.suffix == ".json" else {"chat_template": text}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a chat template ({error}).") from None
    source = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        beside = path.with_name("chat_template.jinja")
        fix = f"Did you mean {beside}?" if beside.exists() else 'Use "llama3" or "chatml".'
        raise DataError(f"{path}: has no chat_template.", fix=fix)
    names = {key: _token_name(config.get(key)) for key in ("bos_token", "eos_token")}
    return JinjaTemplate(str(path), source, names, tokenizer)


def _token_name(value: Any) -> str:
    """The name of a special token, which may be an object with its `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _find_control_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[str, ...]:
    """The tokenizer's control tokens, and the special tokens that `texts` of a template name.

    A word, punctuation or white space that a tokenizer has added is vocabulary, not a name.
    """
    named = {
        name
        for name in tokenizer.special_tokens
        if re.search(r"\w", name) and re.search(r"[^\w\s]", name) and any(name in t for t in texts)
    }
    return tuple(sorted(tokenizer.control_tokens | named))


class JinjaTemplate:
    """A chat template in Jinja, run in Jinja's sandbox: it may come from a stranger."""

    def __init__(self, name: str, source: str, names: dict[str, str], tokenizer: Tokenizer):
        """`names`: bos_token and eos_token; where they are empty, those of the tokenizer."""
        self.name = name
        self._names = {
            "bos_token": names["bos_token"] or tokenizer.special_token_name(tokenizer.bos_id),
            "eos_token": names["eos_token"] or tokenizer.special_token_name(tokenizer.eos_id),
        }
        self.special_tokens = _find_control_tokens([source, *self._names.values()], tokenizer)
        self.fingerprint = hash_json([source, self._names, self.special_tokens])
        self._marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        specials = sorted(self.special_tokens, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials)))
        self._template = _compile(name, source)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Iterator[Segment]:
        """The segments of a conversation; raises ValueError if the template refuses it."""
        messages = [self._protect(message) for message in messages]
        render = partial(self._render_text, [self._protect(tool) for tool in tools])
        text = render(messages)
        if not self._marks_answers:
            text = _mark_answers(messages, text, render)
        trained = False
        for part in re.split(f"([{_ANSWER}{_ANSWER_END}])", text):
            if part in (_ANSWER, _ANSWER_END):
                trained = part == _ANSWER
            else:
                yield from self._split_specials(part, trained)

    def _protect(self, value: Any) -> Any:
        """`value` with marks removed, and special tokens' names divided, in all its strings."""
        if isinstance(value, str):
            text = value.translate(_MARKS)
            return self._specials.sub(lambda name: name[0][0] + _BREAK + name[0][1:], text)
        if isinstance(value, dict):
            return {self._protect(key): self._protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._protect(item) for item in value]
        return value

    def _render_text(
        self, tools: Tools, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except (TemplateError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
            raise ValueError(f"the template fails ({error})") from None

    def _split_specials(self, text: str, trained: bool) -> Iterator[Segment]:
        start = 0
        for name in self._specials.finditer(text):
            yield Segment(text[start : name.start()].replace(_BREAK, ""), trained=trained)
            yield Segment(name[0], special=True, trained=trained)
            start = name.end()
        yield Segment(text[start:].replace(_BREAK, ""), trained=trained)


def _mark_answers(messages: Sequence[Message], text: str, render: Callable[..., str]) -> str:
    """`text` with marks around what each message of the assistant adds to its prompt."""
    marked, done = [], 0
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        prompt = _render_prompt(messages[: number + 1], render)
        end = render(messages[: number + 1])
        if not (text.startswith(end) and end.startswith(prompt) and done <= len(prompt)):
            raise ValueError(
                "the template does not render a conversation as a continuation of its beginning,"
                " and has no {% generation %} that would mark the answers"
            )
        marked += [text[done : len(prompt)], _ANSWER, text[len(prompt) : len(end)], _ANSWER_END]
        done = len(end)
    return "".join([*marked, text[done:]])


def _render_prompt(messages: Sequence[Message], render: Callable[..., str]) -> str:
    """What the template puts before the last of `messages`, which is an answer."""
    if len(messages) > 1:
        return render(messages[:-1], add_generation_prompt=True)
    # Templates put BOS and a default system message before the first message.
    return render([{**messages[0], "content": _ANSWER}]).partition(_ANSWER)[0]


def _compile(name: str, source: str) -> Any:
    """The compiled template, with what transformers offers to chat templates."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as missing:
        raise DataError(
            f"{name}: needs jinja2, which is not installed.", fix="pip install jinja2"
        ) from missing

    class Generation(Extension):
        """{% generation %} … {% endgeneration %}: the block is an answer."""

        def __init__(self, environment):
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller) -> str:
            return f"{_ANSWER}{caller()}{_ANSWER_END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"{name}: its chat_template is not valid ({error}).") from None
