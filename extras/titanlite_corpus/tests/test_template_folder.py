"""Chat templates give the ids of transformers, and its answers or those of the documented rule.

Of the families of docs/how-to/fine-tune.md, those that TRL ships, and Mistral's in a short form.

`pytest test_template_folder.py --chat-templates FOLDER` compares those of a folder: NAME.jinja with
a small tokenizer that has the tokens it names, NAME/tokenizer_config.json with the tokenizer.json
beside it. Templates of other projects are read, never copied here.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest

from titanlite.data import open_tokenizer
from titanlite.errors import DataError
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.render import DATE
from titanlite_corpus.chat.template import open_chat_template
from titanlite_corpus.tests.chats import EOS_TURNS, MARKED, turns, write_tokenizer
from titanlite_corpus.tests.test_chat import CHANGING, ODD_CHATS, TOOL_TURNS, ids_and_answers

_TOKEN = re.compile(
    r"<[|｜][^\s|｜<>]+[|｜]>|</?(?:think|tool_call|tool_response)>|\[/?[A-Z_]{4,}\]"
    r"|<(?:start|end)_of_turn>"
)
ADD = {"name": "add", "description": "a sum", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": ADD}]


def called(content) -> list[dict]:
    """A question that needs a tool, its call, the result and the answer."""
    call = {"id": "abcdefghi", "type": "function"}
    call["function"] = {"name": "add", "arguments": {"a": 1}}
    return [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]


def thought(chat) -> list[dict]:
    """The conversation, with reasoning before each answer."""
    think = {"reasoning_content": "let me see"}
    return [m | think if m["role"] == "assistant" else m for m in chat]


CONVERSATIONS = [  # (messages, tools)
    *((chat, None) for chat in ODD_CHATS),
    (turns("a", "b", "c", "d", "e", "f", system="Be brief."), None),
    (turns("same", "same", system="same"), None),
    (turns("a b", "[INST] c [/INST] <x>", "d", "</y> e"), None),
    (turns("code", "```python\nprint(1)\n```\n\n", "more", "- a\n- b"), None),
    (thought(turns("q", "five", "again", "six")), None),
    (called(None), TOOLS),
    (called(""), TOOLS),
    ([*turns("hi", "yo"), *called(None), *turns("thanks", "bye")], TOOLS),
    ([{"role": "system", "content": "S"}, *called(None)], TOOLS),
    (turns("x", "y"), TOOLS),
]


# Of Mistral, reduced: the tokenizers v3 and tekken
_CALLS_AND_ANSWERS = (
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS]' }}{% for call in m.tool_calls %}CALL{% endfor %}"
    "{{ eos_token }}{% elif m.role == 'assistant' %}{{ ANSWER + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_V3 = (
    "{{ bos_token }}{% set at = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set at.last = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.index == at.last %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{% else %}{{ '[INST] ' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + {'content': m.content, 'call_id': "
    "m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}"
    + _CALLS_AND_ANSWERS.replace("ANSWER", "' ' + m.content | trim").replace(
        "CALL{", "{{ call.function | tojson }}{"
    )
)
TEKKEN = (
    "{{ bos_token + '[SYSTEM_PROMPT]' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% else %}{{ strftime_now('%Y-%m-%d') }}{% endif %}"
    "{{ '[/SYSTEM_PROMPT]' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}"
    + _CALLS_AND_ANSWERS.replace("ANSWER", "m.content").replace(
        "CALL{", "{{ call.function.name + '[ARGS]' + call.function.arguments | tojson }}{"
    )
)
FAMILIES = ("qwen3", "deepseekv3", "llama3", "llama3_1", "llama3_2", "gemma", "gemma3", "gptoss")
# Conversations that are refused: the template of Llama 3 leaves out calls, so they have no answer
REFUSED = {name: 4 * (name == "llama3") for name in (*FAMILIES, "mistral_v3", "tekken")}


class Published:
    """A template and its tokenizer, here and in transformers."""

    def __init__(self, path: Path, scratch: Path):
        from transformers import PreTrainedTokenizerFast

        self.name, folder = path.stem, path
        if not path.is_dir():
            folder = write_tokenizer(scratch / path.stem, path.read_text("utf-8"))
            _add_tokens(folder / "tokenizer.json", path.read_text("utf-8"))
        self.reference = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
        jinja = folder / "chat_template.jinja"
        template = str(jinja if jinja.exists() else folder / "tokenizer_config.json")
        self.encoder = ChatEncoder(tokenizer, open_chat_template(template, tokenizer))
        self.is_marked = re.search(r"{%[-+]?\s*generation", self.reference.chat_template)

    def compare(self, messages, tools) -> str:
        """How the two agree on a conversation: a column of the table."""
        for chat in (messages, _with_text_arguments(messages)):  # DeepSeek's templates want text
            try:
                wanted, mask = self._encode_by_transformers(chat, tools)
                break
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        else:
            return f"invalid for it: {reason}"
        try:
            ids, answers = ids_and_answers(self.encoder, {"messages": chat, "tools": tools or []})
        except DataError as error:
            assert "answers cannot be told from its prompts" in str(error), error
            return "refused"
        decode = self.reference.decode
        assert decode(ids) == decode(wanted), (decode(ids), decode(wanted))
        found = [decode(part) for part in _trained(ids, answers)]
        if self.is_marked:
            self._complete_characters(wanted, mask)
            expected = [decode(part) for part in _trained(wanted, mask)]
            if ids == wanted:
                assert found == expected
            else:  # a token of transformers crosses the beginning or the end of an answer
                found, expected = (_squeeze("".join(texts)) for texts in (found, expected))
                assert found in expected and len(expected) <= len(found) + len(chat)
        else:
            self._check_rule(chat, tools, found)
        return "ids" if ids == wanted else "text"

    def _encode_by_transformers(self, chat, tools) -> tuple[list[int], list[int]]:
        options = {"return_dict": True, "return_assistant_tokens_mask": bool(self.is_marked)}
        encoded = self.reference.apply_chat_template(chat, tools=tools, **options)
        return encoded["input_ids"], encoded.get("assistant_masks", [])

    def _complete_characters(self, ids: list[int], mask: list[int]) -> None:
        """Mark all tokens of a character; transformers marks the first if it ends an answer."""
        for index in range(1, len(ids)):
            if mask[index - 1] and self.reference.decode(ids[index]).startswith("\ufffd"):
                mask[index] = 1

    def _check_rule(self, chat, tools, found: list[str]) -> None:
        """An answer is what its turn has after the generation prompt, where turns do not change."""

        def render(count: int, prompt: bool = False) -> str:
            options = {"tokenize": False, "add_generation_prompt": prompt}
            return self.reference.apply_chat_template(chat[:count], tools=tools, **options)

        spans, text = [], render(len(chat))
        for index in (n for n, m in enumerate(chat) if n and m["role"] == "assistant"):
            begin, end = render(index, prompt=True), render(index + 1)
            assert (chat[index]["content"] or "").strip() in "".join(found), (chat[index], found)
            spans += [(begin, end)] if end.startswith(begin) and text.startswith(end) else []
        if len(spans) == sum(m["role"] == "assistant" for m in chat):
            expected = "".join(end[len(begin) :] for begin, end in spans)
            assert _squeeze("".join(found)) == _squeeze(expected), (found, expected)


def _squeeze(text: str) -> str:
    """Without white space, which tokens such as Phi-3's <|end|> strip from an encoded text."""
    return re.sub(r"\s", "", text)


def _trained(ids: list[int], mask: list[int]) -> Iterator[list[int]]:
    for is_answer, pairs in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        if is_answer:
            yield [id for id, _ in pairs]


def _add_tokens(path: Path, template: str) -> None:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    names = sorted(set(_TOKEN.findall(template)))
    options = {"normalized": False}
    tokenizer.add_tokens([AddedToken(n, special=n[1] in "|｜", **options) for n in names])
    tokenizer.save(str(path))


def _with_text_arguments(chat):
    """The conversation, with the arguments of calls as JSON."""
    return json.loads(
        json.dumps(chat).replace('"arguments": {"a": 1}', r'"arguments": "{\"a\": 1}"')
    )


def _write_own(folder: Path) -> Path:
    write_tokenizer(folder / "llama3_folder")
    changing = {name.split()[0]: plain for name, (plain, _) in CHANGING.items()}
    thinking = MARKED.replace("{{ m.content", "{{ (m.thinking or '') + m.content")
    own = {"thinking": thinking, "eos_turns": EOS_TURNS, "tools": TOOL_TURNS, **changing}
    own |= {"mistral_v3": MISTRAL_V3, "tekken": TEKKEN}
    shipped = files("trl") / "chat_templates"
    own |= {name: (shipped / f"{name}.jinja").read_text("utf-8") for name in FAMILIES}
    for name, template in own.items():
        (folder / f"{name}.jinja").write_text(template)
    return folder


def test_templates_of_a_folder_agree_with_transformers(request, tmp_path, monkeypatch, capsys):
    if not find_spec("transformers") or not find_spec("trl"):
        pytest.fail("the comparison needs transformers and trl: pip install 'titanlite[dev]'")
    from transformers.utils import chat_template_utils

    today = type("Today", (), {"now": staticmethod(lambda *_: DATE)})
    monkeypatch.setattr(chat_template_utils, "datetime", today)
    given = request.config.getoption("--chat-templates")
    folder = Path(given) if given else _write_own(tmp_path / "own")
    paths = [p for p in sorted(folder.iterdir()) if p.suffix == ".jinja" or p.is_dir()]
    assert paths, f"--chat-templates {folder}: has no NAME.jinja and no folders of tokenizers"
    failures = []
    for path in paths:
        tally, published = Counter(), Published(path, tmp_path)
        for number, (messages, tools) in enumerate(CONVERSATIONS):
            try:
                tally[published.compare(messages, tools).partition(":")[0]] += 1
            except AssertionError as error:
                tally["DIFFERENT"] += 1
                failures.append(f"{path.name}, conversation {number}: {error}"[:2000])
        if not given and path.stem in REFUSED and tally["refused"] != REFUSED[path.stem]:
            failures.append(f"{path.name} refuses {tally['refused']} conversations")
        if given:
            with capsys.disabled():
                marked = "marked  " if published.is_marked else "unmarked"
                print(f"{path.stem:36} {marked} {dict(tally)}")
    assert not failures, "\n".join(failures)
