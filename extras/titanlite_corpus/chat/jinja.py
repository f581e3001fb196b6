"""The Jinja chat template of a Hugging Face tokenizer.

The answers are what a template marks with {% generation %}, as transformers defines it. In a
template without these marks, an answer is what its turn has after the generation prompt, up to the
end of the turn. A template may come from a stranger: it runs in Jinja's sandbox, in a child process
whose memory and CPU time are limited.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file
from titanlite_corpus.chat import render
from titanlite_corpus.chat.render import ANCHOR, ANSWER, ANSWER_END, BREAK, TemplateProblem
from titanlite_corpus.chat.template import REASONING, ROLES, Message, Segment, Tools
from titanlite_corpus.hashing import hash_json

_MAX_BYTES = 4 << 20
_VERSION = 4  # increase it when the same template gives other text or labels
RENDERER = [sys.executable, "-W", "ignore", render.__file__]
_CPU_SECONDS = 10.0  # to compile a template and render one conversation
_ROLES = (*ROLES, "tool", "developer", "function")  # others must be in the text of the template
_MARKS = str.maketrans(dict.fromkeys((ANSWER, ANSWER_END, BREAK, ANCHOR), "\ufffd"))


def open_jinja_template(path: Path, tokenizer: Tokenizer) -> JinjaTemplate:
    """The template of a tokenizer_config.json, or of a file of its own; raises DataError."""
    try:
        text = read_regular_file(path, _MAX_BYTES).decode()
        config = parse_json(text.encode()) if path.suffix == ".json" else {"chat_template": text}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a chat template ({error}).") from None
    return template_of_config(config, str(path), tokenizer)


def template_of_config(config: Any, name: str, tokenizer: Tokenizer) -> JinjaTemplate:
    """The template in the content of a tokenizer_config.json; raises DataError."""
    source = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(source, list):  # several, by name
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    if not isinstance(source, str):
        beside = Path(name).with_name("chat_template.jinja")
        fix = f"Did you mean {beside}?" if beside.exists() else 'Use "llama3" or "chatml".'
        raise DataError(f"{name}: has no chat_template.", fix=fix)
    names = {key: _token_name(config.get(key)) for key in ("bos_token", "eos_token")}
    return JinjaTemplate(name, source, names, tokenizer)


def _complete(message: Message) -> Message:
    """The message without keys that are null, because templates write "None", and with its
    reasoning under the two names that templates read, both as in transformers."""
    message = {key: value for key, value in message.items() if value is not None}
    for text in (message[name] for name in REASONING if name in message):
        return {"thinking": text, **message, "reasoning_content": text}
    return message


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
    """A chat template in Jinja."""

    def __init__(self, name: str, source: str, names: dict[str, str], tokenizer: Tokenizer):
        """`names`: bos_token and eos_token; where they are empty, those of the tokenizer."""
        self.name = name
        self._names = {
            "bos_token": names["bos_token"] or tokenizer.special_token_name(tokenizer.bos_id),
            "eos_token": names["eos_token"] or tokenizer.special_token_name(tokenizer.eos_id),
        }
        self.special_tokens = _find_control_tokens([source, *self._names.values()], tokenizer)
        self.fingerprint = hash_json([source, self._names, self.special_tokens, _VERSION])
        self._request = {"source": source, "names": self._names}
        specials = sorted(self.special_tokens, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials)) or "(?!)")
        if not find_spec("jinja2"):
            raise DataError(f"{name}: needs jinja2, which is not installed.", "pip install jinja2")
        try:
            _renderer().ask(self._request)
        except ValueError as error:
            raise DataError(f"{name}: its chat_template cannot be used: {error}.") from None
        self._request["specials"] = specials

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> Iterator[Segment]:
        """The segments of a conversation; raises ValueError if the template refuses it."""
        for role in {message["role"] for message in messages}.difference(_ROLES):
            if not any(f"{quote}{role}{quote}" in self._request["source"] for quote in "'\""):
                raise ValueError(f"its template names no role {role!r:.40}")
        messages = self._protect([_complete(message) for message in messages])
        conversation = {"messages": messages, "tools": self._protect(list(tools))}
        trained = False
        text = _renderer().ask(self._request | conversation)
        for part in re.split(f"([{ANSWER}{ANSWER_END}])", text):
            if part in (ANSWER, ANSWER_END):
                trained = part == ANSWER
            else:
                yield from self._split_specials(part, trained)

    def _protect(self, value: Any) -> Any:
        """`value` with marks removed, and special tokens' names divided, in all its strings."""
        if isinstance(value, str):
            text = value.translate(_MARKS)
            return self._specials.sub(lambda name: name[0][0] + BREAK + name[0][1:], text)
        if isinstance(value, dict):
            return {self._protect(key): self._protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._protect(item) for item in value]
        return value

    def _split_specials(self, text: str, trained: bool) -> Iterator[Segment]:
        start = 0
        for name in self._specials.finditer(text):
            yield Segment(text[start : name.start()].replace(BREAK, ""), trained=trained)
            yield Segment(name[0], special=True, trained=trained)
            start = name.end()
        yield Segment(text[start:].replace(BREAK, ""), trained=trained)


class _Renderer:
    """The child process that renders; started again after a request that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> str:
        """The rendered text; raises ValueError, TemplateProblem if the template is at fault."""
        with self._lock:
            if self._process is None:
                command = [*RENDERER, str(_CPU_SECONDS)]
                pipe, out = subprocess.PIPE, subprocess.STDOUT
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=out)
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None and stdout is not None
            try:
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
                answer = json.loads(stdout.readline())
            except (OSError, ValueError):  # it ended: SIGPROF, or memory that Python must have
                self._process.kill()
                self._process.communicate()
                self._process = None
                raise TemplateProblem(
                    f"it needs more than {_CPU_SECONDS:g} s of CPU time or"
                    f" {render.MEMORY_BYTES >> 20} MiB"
                ) from None
        if "error" in answer:
            raise (TemplateProblem if answer["template"] else ValueError)(answer["error"])
        return answer["text"]


@cache
def _renderer() -> _Renderer:
    """The renderer of this process."""
    return _Renderer()
