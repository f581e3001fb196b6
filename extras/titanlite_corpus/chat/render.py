"""Render chat templates of strangers: the program of a child process with limits.

Reads a request a line from stdin, writes an answer a line to stdout, both JSON. A request has the
`source` of a template, the `names` of its tokens, `specials` and, unless it is only to be compiled,
`messages` and `tools`. The answer is a `text`, or an `error` that may be of the `template`.
Imports only jinja2 and the standard library, so that it starts in 0.1 s.
"""

from __future__ import annotations

import datetime
import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 64 << 20  # of a rendered conversation
# Noncharacters, which text for interchange does not contain: they mark answers, and keep the name
# of a control token, in a message, from becoming the token. Anchors are the ends of messages.
ANSWER, ANSWER_END, BREAK, ANCHOR = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_ANCHOR = re.compile(f"{ANCHOR}([0-9]+){ANCHOR}")
DATE = datetime.datetime(2024, 7, 26)  # of strftime_now: what Llama 3.2's template takes without it
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Message = dict[str, Any]  # {"role": …, "content": …}, and what else a template uses


class TemplateProblem(ValueError):
    """The template is at fault, not the conversation."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request; whatever a template raises is an error of it."""
    try:
        template = _compile(request["source"])
        if "messages" not in request:
            return {"text": ""}

        def render(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
            text = template.render(
                messages=messages,
                tools=request["tools"] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **request["names"],
            )
            if len(text) > MAX_CHARACTERS:
                raise TemplateProblem(f"it writes more than {MAX_CHARACTERS:,} characters")
            return text

        if _GENERATION.search(request["source"]):
            return {"text": render(request["messages"])}
        specials = [*map(re.escape, request["specials"]), "."]
        tokens = re.compile("|".join(specials), re.DOTALL)
        return {"text": _mark_answers(request["messages"], render, tokens)}
    except TemplateProblem as error:
        return {"error": str(error), "template": True}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB", "template": True}
    except Exception as error:
        reason = f"{error}"[:1000] or type(error).__name__
        return {"error": f"the template fails ({reason})", "template": False}


def _mark_answers(messages: list[Message], render: Callable[..., str], tokens: re.Pattern) -> str:
    """The rendered text with marks around each answer, for a template that marks none.

    An answer begins where the text departs from that of the generation prompt, and ends where it
    departs from that of a conversation which ends with it; both are compared from the end of the
    message before on, because templates change earlier turns as a conversation grows. An anchor,
    which is removed again, shows where the template puts the end of each message.
    """
    anchored = [_anchor(message, index) for index, message in enumerate(messages)]
    texts, owners = _split_at_anchors(render(anchored))
    if "".join(texts) != render(messages):
        raise TemplateProblem(_NOT_FOUND)
    marks: list[list[tuple[int, str]]] = [[] for _ in texts]  # (offset, mark) in each text
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompts, before = _split_at_anchors(_render_prompt(anchored[: index + 1], render))
        ends, until = _split_at_anchors(render(anchored[: index + 1]))
        place = _place_of(index, owners, message)
        names = [[t for t in tokens.findall(text[-1]) if len(t) > 1] for text in (ends, prompts)]
        tail, heads = names[0][-2:], names[1]
        # a template that ends every conversation with a generation prompt, asked for or not
        prompted = len(tail) == 2 and tail in [heads[i : i + 2] for i in range(len(heads))]
        if (
            place < 0
            or until[-1:] != [index]
            or before[-1:] != owners[:place][-1:]
            or (prompted and index and messages[index - 1]["role"] != "assistant")
        ):
            raise TemplateProblem(_NOT_FOUND)
        begin = _common_length(prompts[-1], texts[place], tokens, 1)
        end = _common_length(ends[-1], texts[place + 1], tokens, 2)
        if marks[place] and begin < marks[place][-1][0]:
            raise TemplateProblem(_NOT_FOUND)
        marks[place].append((begin, ANSWER))
        marks[place + 1].append((end, ANSWER_END))
    for place, inserted in enumerate(marks):
        for offset, mark in reversed(inserted):
            texts[place] = texts[place][:offset] + mark + texts[place][offset:]
    return "".join(texts)


_NOT_FOUND = (
    "its answers cannot be told from its prompts: a turn renders differently when others follow,"
    " and no {% generation %} marks the answers"
)


def _anchor(message: Message, index: int) -> Message:
    """The message with an anchor at the end of its text or, without text, of its last call."""
    mark, content, calls = f"{ANCHOR}{index}{ANCHOR}", message.get("content"), "tool_calls"
    if content or not message.get(calls):
        text = (content or "").rstrip()
        return {**message, "content": text + mark + (content or "")[len(text) :]}
    *others, last = message[calls] if isinstance(message[calls], list) else [None]
    if isinstance(last, dict) and isinstance(function := last.get("function", last), dict):
        named = {**function, "name": f"{function.get('name')}{mark}"}
        last = {**last, "function": named} if "function" in last else named
    return {**message, calls: [*others, last]}


def _place_of(index: int, owners: list[int], message: Message) -> int:
    """Where the anchor of an answer is among all anchors; -1 if that is not certain.

    A template may write the name of a call a second time, in the result that follows it.
    """
    places = [place for place, owner in enumerate(owners) if owner == index]
    in_name = not message.get("content") and places == [
        *range(min(places, default=0), max(places, default=-1) + 1)
    ]
    return places[0] if len(places) == 1 or (places and in_name) else -1


def _split_at_anchors(text: str) -> tuple[list[str], list[int]]:
    """(the texts around the anchors, the index of the message of each anchor)."""
    parts = _ANCHOR.split(text)
    return parts[::2], [int(index) for index in parts[1::2]]


def _render_prompt(messages: list[Message], render: Callable[..., str]) -> str:
    """What the template puts before the last of `messages`, which is an answer."""
    if len(messages) > 1:
        return render(messages[:-1], add_generation_prompt=True)
    # Templates put BOS and a default system message before the first message.
    return render([{**messages[0], "content": ANSWER}]).partition(ANSWER)[0]


def _common_length(expected: str, text: str, tokens: re.Pattern, special: int) -> int:
    """Length of `expected` in `text`, or of what they share before a special token of `expected`.

    `special`: in how many of the two the token after that must be a special one.
    """
    if text.startswith(expected):
        return len(expected)
    length, following = 0, tokens.finditer(text)
    for one in tokens.finditer(expected):
        other = next(following, None)  # None, the end of the text, counts as a special token
        if other is None or one[0] != other[0]:
            if len(one[0]) == 1 or (special == 2 and other and len(other[0]) == 1):
                break
            return length
        length += len(one[0])
    raise TemplateProblem(_NOT_FOUND)


@lru_cache(maxsize=1)
def _compile(source: str) -> Any:
    """The compiled template, with what transformers offers to chat templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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
            return f"{ANSWER}{caller()}{ANSWER_END}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=DATE.strftime)
    environment.globals.pop("lipsum")  # writes any amount of text
    try:
        return environment.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # of jinja2, and of Python, which compiles what jinja2 writes
        reason = f"{error}"[:1000] or type(error).__name__
        raise TemplateProblem(f"it is not valid ({reason})") from None


def main(cpu_seconds: float) -> None:
    """Answer requests until stdin ends; more than `cpu_seconds` for one end the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        result = json.dumps(answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(result, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
