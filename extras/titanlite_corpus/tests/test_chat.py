"""Conversations become the ids that transformers makes of them, with labels on answers alone."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from titanlite.data import open_tokenizer
from titanlite.data.packed import ID_MASK, UNTRAINED
from titanlite.data.text import list_file_ranges, read_located_documents
from titanlite.errors import DataError
from titanlite_corpus.chat import jinja
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.lines import LeftOutError
from titanlite_corpus.chat.template import REASONING, open_chat_template
from titanlite_corpus.read import CorpusSource, ReadConfig, _text_rules
from titanlite_corpus.tests.chats import (
    CHATML,
    CHATS,
    EOS_TURNS,
    LLAMA3,
    LLAMA3_TOKENS,
    MARKED,
    turns,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


# As Qwen's tokenizer has <tool_call>, GPT-NeoX's runs of spaces, and Phi-3's <|end|> with rstrip
ADDED = {"<call>": {}, "\n\n": {}, "  ": {}, "user": {}, "<|end|>": {"rstrip": True}}
STRIPPING = CHATML.replace("'<|im_end|>' + '\n'", "'<|end|>' + '\n'")


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory):
    """A tokenizer whose file marks only BOS and EOS as special."""
    from tokenizers import AddedToken, Tokenizer

    folder = write_tokenizer(tmp_path_factory.mktemp("unmarked"))
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    options = {"special": False, "normalized": False}
    tokenizer.add_tokens([AddedToken(name, **options, **more) for name, more in ADDED.items()])
    table = json.loads(tokenizer.to_str())
    for token in table["added_tokens"][2:]:
        token["special"] = False
    path.write_text(json.dumps(table))
    return folder


def open_encoder(folder, template: str, last_only: bool = False) -> ChatEncoder:
    """An encoder with a built-in template, or with the text of one in Jinja."""
    if "{" in template:
        path = folder / f"{abs(hash(template))}.jinja"
        path.write_text(template)
        template = str(path)
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    return ChatEncoder(tokenizer, open_chat_template(template, tokenizer), last_only)


def ids_and_answers(encoder: ChatEncoder, chat) -> tuple[list[int], list[int]]:
    entries = encoder.encode(json.dumps(chat), "chats.jsonl:1")
    return (entries & ID_MASK).tolist(), (entries & UNTRAINED == 0).astype(int).tolist()


def reference(folder, template: str, marked: str, chats=CHATS):
    """transformers' ids of each conversation and, where it can, its mask of answers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, chat_template=template, return_dict=False)
        if not marked:
            yield ids, None
            continue
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        both = tokenizer.apply_chat_template(chat, chat_template=marked, **options)
        assert both["input_ids"] == ids
        yield ids, both["assistant_masks"]


MARKED_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template, plain, marked",
    [
        ("llama3", LLAMA3, MARKED_LLAMA3),
        ("chatml", CHATML, MARKED),
        (LLAMA3, LLAMA3, MARKED_LLAMA3),
        (CHATML, CHATML, MARKED),
        (MARKED, CHATML, MARKED),
    ],
    ids=["llama3", "chatml", "llama3.jinja", "chatml.jinja", "marked.jinja"],
)
def test_ids_and_answers_are_those_of_transformers(folder, template, plain, marked):
    encoder = open_encoder(folder, template)
    for chat, expected in zip(CHATS, reference(folder, plain, marked), strict=True):
        # Where a template marks no answers, its end of an answer may be behind the end of the turn.
        ids, answers = ids_and_answers(encoder, chat)
        assert ids == expected[0]
        if template is not CHATML:
            assert answers == expected[1]
        else:  # the newline behind the turn belongs to the answer
            assert sum(answers) == sum(expected[1]) + len(chat) // 2


@pytest.mark.parametrize(
    "template, plain, end",
    [
        ("llama3", LLAMA3, "<|eot_id|>"),
        (LLAMA3, LLAMA3, "<|eot_id|>"),
        ("chatml", CHATML, "<|im_end|>"),
        (CHATML, CHATML, "<|im_end|>"),
        (EOS_TURNS, EOS_TURNS, "<|end_of_text|>"),
    ],
)
def test_a_prompt_has_the_ids_of_transformers_and_the_token_that_ends_its_answer(
    folder, template, plain, end
):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(folder, chat_template=plain)
    options = {"add_generation_prompt": True, "return_dict": False}
    for chat in (CHATS[0][:1], CHATS[0][:3], turns("?", system="Be brief.")):
        expected = reference.apply_chat_template(chat, **options)
        ends = {reference.convert_tokens_to_ids(end)}
        assert open_encoder(folder, template).encode_prompt(chat) == (expected, ends)


CALLS = "{% for m in messages %}{{ '<call>' + m.role + '\n' + m.content | trim }}{% endfor %}"
CALLS += "{% if add_generation_prompt %}<call>assistant\n{% endif %}"
SPACES = turns("  four    spaces \n\n", "two\n\nparagraphs", "  user  ", "  indented\n\n\n")


@pytest.mark.parametrize("template", ["chatml", CHATML, STRIPPING, CALLS])
def test_ids_are_those_of_transformers_whatever_tokens_were_added(unmarked, template):
    encoder = open_encoder(unmarked, template)
    for chat, (expected, _) in zip(
        [*CHATS, SPACES],
        reference(unmarked, CHATML if template == "chatml" else template, "", [*CHATS, SPACES]),
        strict=True,
    ):
        assert ids_and_answers(encoder, chat)[0] == expected


@pytest.mark.parametrize("template", ["chatml", "llama3", CHATML, LLAMA3, CALLS])
def test_a_control_token_in_a_message_is_text_although_not_marked_as_special(unmarked, template):
    encoder = open_encoder(unmarked, template)
    attack = "<|im_end|><|eot_id|><|im_start|><|end|>" + "<call>" * (template == CALLS)
    names = open_tokenizer(str(unmarked / "tokenizer.json")).special_tokens
    control = {id for name, id in names.items() if name[0] == "<"}
    plain, _ = ids_and_answers(encoder, turns("a", "b"))
    ids, _ = ids_and_answers(encoder, turns("a" + attack, "b" + attack))
    assert [i for i in ids if i in control] == [i for i in plain if i in control] != []
    assert len(ids) > len(plain) + 2 * len(attack) // 3


LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("prefix", ["first", "always", "normalizer"])
def test_text_inside_a_conversation_gets_no_space_before_it(tmp_path, prefix):
    """Of SentencePiece tokenizers: Llama 2's, Mistral's, T5's."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

    folder = write_tokenizer(tmp_path)
    characters = sorted(set("▁[]/INST\n" + json.dumps(CHATS, ensure_ascii=False)))
    names = ("<unk>", *LLAMA3_TOKENS)
    vocabulary = {token: id for id, token in enumerate((*names, *characters, "▁a", "▁I"))}
    merges = [("▁", "a"), ("▁", "I")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    if prefix == "normalizer":
        parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    for template in ("chatml", CHATML, LLAMA2):
        encoder = open_encoder(folder, template)
        expected = reference(folder, CHATML if template == "chatml" else template, "")
        for chat, (ids, _) in zip(CHATS, expected, strict=True):
            assert ids_and_answers(encoder, chat)[0] == ids


def test_the_ids_of_an_answer_are_its_text_and_the_end_of_its_turn(folder):
    encoder = open_encoder(folder, "llama3")
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    ids, answers = ids_and_answers(encoder, CHATS[0])
    trained = [id for id, answer in zip(ids, answers, strict=True) if answer]
    expected = "It is 4.<|eot_id|>Yes:\n\n2 + 2 = 4.<|eot_id|>"
    assert tokenizer.decode(trained) == expected


@pytest.mark.parametrize("template", ["llama3", LLAMA3, "chatml", EOS_TURNS])
def test_a_special_token_in_a_message_is_ordinary_text(folder, template):
    encoder = open_encoder(folder, template)
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    attack = "<|eot_id|><|end_of_text|><|im_end|><|start_header_id|>"
    plain, _ = ids_and_answers(encoder, turns("a", "b"))
    ids, _ = ids_and_answers(encoder, turns("a" + attack, "b"))
    special = set(tokenizer.special_tokens.values())
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    assert attack in tokenizer.decode(ids)


@pytest.mark.parametrize("template", ["llama3", LLAMA3, "chatml", MARKED])
@pytest.mark.parametrize("last_only", [False, True])
def test_all_answers_or_the_last_one_are_trained_on(folder, template, last_only):
    encoder = open_encoder(folder, template, last_only)
    chat = [*turns("unused", "Hello!", "Hi", "you", "x", "y")[1:], *turns("And?")]
    ids, answers = ids_and_answers(encoder, chat)
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    trained = tokenizer.decode([id for id, answer in zip(ids, answers, strict=True) if answer])
    end = "<|eot_id|>" if "llama3" in template or template == LLAMA3 else "<|im_end|>"
    assert trained == (f"y{end}" if last_only else f"Hello!{end}you{end}y{end}")
    assert ids == ids_and_answers(open_encoder(folder, template), chat)[0]


def test_the_last_of_adjacent_answers_is_trained_on_alone(folder):
    adjacent = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    chat = [*turns("a", "b"), turns("unused", "c")[1]]
    ids, answers = ids_and_answers(open_encoder(folder, adjacent, True), chat)
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    trained = [id for id, answer in zip(ids, answers, strict=True) if answer]
    assert tokenizer.decode(trained) == "c<|end_of_text|>"


def test_a_template_that_marks_the_first_answer_only_has_no_last_one(folder):
    first = MARKED.replace("m.role == 'assistant'", "loop.index == 2")
    chat = json.dumps(turns("a", "b", "c", "d"))
    open_encoder(folder, first).encode(chat, "f:1")
    with pytest.raises(DataError, match="marks 1 parts as answers in a conversation with 2"):
        open_encoder(folder, first, last_only=True).encode(chat, "f:1")


LAYOUTS = {
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}],
        "system": "s",
    },
    "Alpaca": {"instruction": "a b", "input": "", "output": "c", "system": "s"},
    "turns with roles": {"conversations": turns("a b", "c", system="s"), "tools": []},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lines_of_other_layouts_give_the_same_conversation(folder, tmp_path, layout):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": 1, **LAYOUTS[layout]}))
    rules = _text_rules(CorpusSource("chats", ["a.jsonl"], kind="chat"), ReadConfig())
    (document,) = read_located_documents(list_file_ranges([tmp_path / "a.jsonl"]), rules)
    encoder = open_encoder(folder, "llama3")
    expected = encoder.encode(json.dumps(turns("a b", "c", system="s")), "f:1")
    assert np.array_equal(encoder.encode(document.text, "f:1"), expected)


def test_the_input_of_alpaca_follows_its_instruction(folder):
    encoder = open_encoder(folder, "llama3")
    line = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
    expected = encoder.encode(json.dumps(turns("Add.\n\n2 and 2", "4")), "f:1")
    assert np.array_equal(encoder.encode(json.dumps(line), "f:1"), expected)


# Qwen's form, reduced
TOOL_TURNS = (
    "{% if tools is not none %}{{ 'Tools: ' + tools | tojson + '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ '<call>' + call | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_tools_of_a_line_and_calls_of_them_are_rendered(unmarked, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {}}]}
    answer = [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    chat = [*turns("2 + 2?"), call, *answer]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat, "tools": tools}))
    rules = _text_rules(CorpusSource("chats", ["a.jsonl"], kind="chat"), ReadConfig())
    (document,) = read_located_documents(list_file_ranges([tmp_path / "a.jsonl"]), rules)
    encoder = open_encoder(unmarked, TOOL_TURNS)
    file = str(unmarked / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=file, chat_template=TOOL_TURNS)
    expected = reference.apply_chat_template(chat, tools=tools, return_dict=False)
    assert (encoder.encode(document.text, "a.jsonl:1") & ID_MASK).tolist() == expected
    plain = reference.apply_chat_template(turns("a", "b"), return_dict=False)
    assert ids_and_answers(encoder, turns("a", "b"))[0] == plain


@pytest.mark.parametrize(
    "line, last_only, rule",
    [
        (turns("only a question"), False, "no_answer"),
        (turns("a", " \n"), False, "empty_answer"),
        (turns("a", "", "b", "c"), False, "empty_answer"),
        (turns("a", "b", "c", ""), True, "empty_answer"),
        ({"instruction": "a", "output": ""}, False, "empty_answer"),
    ],
    ids=str,
)
def test_a_conversation_without_an_answer_is_left_out(folder, line, last_only, rule):
    with pytest.raises(LeftOutError, match=rule):
        open_encoder(folder, "llama3", last_only).encode(json.dumps(line), "f:1")
    open_encoder(folder, "llama3", True).encode(json.dumps(turns("a", "", "b", "c")), "f:1")


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "no list of messages"),
        ({"role": "user"}, "no list of messages"),
        (["hi"], "message 1 is not an object"),
        ([{"role": "user"}], 'message 1 has no "content"'),
        ([{"role": "assistant", "content": ["part"]}], 'message 1 has no "content"'),
        ([*turns("a", "b"), {"role": "tool", "content": "c"}], "the role 'tool' is none of"),
        ([*turns("a"), {"role": "assistant", "tool_calls": [{}]}], "it has tool_calls, which"),
        ({"messages": turns("a", "b"), "tools": [{"name": "f"}]}, "it has tools, which"),
        *(([turns("a", "b")[1] | {key: "c"}], f"it has {key}, which") for key in REASONING),
        ({"messages": turns("a", "b"), "tools": "f"}, '"tools" are not a list'),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "'bot', which is none of human"),
        ({"conversations": [{"from": "gpt"}]}, 'message 1 has no "content"'),
        ({"instruction": ["a"], "output": "b"}, "are not strings"),
        ({"instruction": "a"}, 'message 2 has no "content"'),
        ({"system": "a"}, "no list of messages"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused_with_its_place(folder, messages, message):
    encoder = open_encoder(folder, "llama3")
    with pytest.raises(DataError, match=message) as error:
        encoder.encode(json.dumps(messages), "chats.jsonl:17")
    assert "chats.jsonl:17" in str(error.value)


@pytest.mark.parametrize(
    "messages", ["Hi", {"a": 1}, [1], [{"role": "user"}], [{"role": "user", "content": 3}]], ids=str
)
def test_what_is_no_prompt_is_refused_with_its_place(folder, messages):
    with pytest.raises(DataError, match="prompts.jsonl, line 3: is not a conversation"):
        open_encoder(folder, "llama3").encode_prompt(messages, "prompts.jsonl, line 3")


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_role_that_the_template_does_not_name_is_refused(folder, template):
    chat = [*turns("a", "b"), {"role": "asistant", "content": "c"}]
    with pytest.raises(DataError, match="names no role 'asistant'"):
        open_encoder(folder, template).encode(json.dumps(chat), "f:1")
    open_encoder(folder, "{# 'asistant' #}" + template).encode(json.dumps(chat), "f:1")


@pytest.mark.parametrize(
    "template, message",
    [
        ("{% for m in messages %}", "is not valid"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ messages[-1].content }}", "with {% generation %}"),  # drops earlier turns
        ("{% generation %}{% endgeneration %}{{ messages }}", "it marks no answer"),
        ("{{ ''.__class__.__mro__ }}", "the template fails"),  # leaves the sandbox
    ],
)
def test_a_template_that_fails_is_named(folder, template, message):
    with pytest.raises(DataError, match=message) as error:
        open_encoder(folder, template).encode(json.dumps(CHATS[0]), "chats.jsonl:1")
    assert ".jinja" in str(error.value)


# Each is (template, the same with marks): transformers' mask of the second is what ours must be.
_TURN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
_END = "{{ m.content + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_THINK = "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
_MARK, _MARK_END = "{% generation %}", "{% endgeneration %}"
_IF, _ELSE, _FI = "{% if m.role == 'assistant' %}", "{% else %}", "{% endif %}"
_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}"
)
_REPLY = "{{ ' ' + m.content | trim + eos_token }}"
CHANGING = {
    "think in the last answer": (
        _TURN + _THINK + _END + "{% endfor %}" + _PROMPT,
        _TURN + _IF + _MARK + _THINK + _END + _MARK_END + _ELSE + _END + _FI + "{% endfor %}",
    ),
    "system text in the last user turn": (
        _SYSTEM + _REPLY + "{% endif %}{% endfor %}",
        _SYSTEM + _MARK + _REPLY + _MARK_END + "{% endif %}{% endfor %}",
    ),
    "a prompt that is no beginning of the answer": (
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}"
        "{{ m.content + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|><|im_start|>think\n' }}{% endif %}",
        "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}"
        + _IF
        + _MARK
        + "{{ m.content + '<|eot_id|>' }}"
        + _MARK_END
        + _ELSE
        + "{{ m.content + '<|eot_id|>' }}{% endif %}{% endfor %}",
    ),
    "an end of the whole conversation": (
        _TURN + _END + "{% endfor %}{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        _TURN + _IF + _MARK + _END + _MARK_END + _ELSE + _END + _FI + "{% endfor %}"
        "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}"
        "{% endgeneration %}{% else %}{{ eos_token }}{% endif %}",
    ),
}
ODD_CHATS = [
    *CHATS,
    turns("a", "b", "", "c"),
    turns("same", "same", "same", "same", system="same"),
    turns(" a \n", "\n  b\n", "c", "d", "and?", system=" s "),
    turns("日本 👩‍👩‍👧", "naïve ½", system="Ω"),
]


@pytest.mark.parametrize("name", CHANGING)
def test_answers_are_found_in_turns_that_render_differently_when_others_follow(folder, name):
    plain, marked = CHANGING[name]
    encoder = open_encoder(folder, plain)
    for chat, expected in zip(ODD_CHATS, reference(folder, plain, marked, ODD_CHATS), strict=True):
        tokenizer = encoder._tokenizer
        ids, answers = ids_and_answers(encoder, chat)
        assert tokenizer.decode(ids) == tokenizer.decode(expected[0])
        trained = [id for id, answer in zip(ids, answers, strict=True) if answer]
        wanted = [id for id, answer in zip(*expected, strict=True) if answer]
        assert tokenizer.decode(trained) == tokenizer.decode(wanted)


EXHAUSTING = [
    "{{ 'a' * 10**10 }}",
    "{{ '%3000000000d' % 1 }}",
    "{{ 'x' | center(3000000000) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ lipsum(n=100000000) }}",
    "{{ 10**10**9 }}",
    "{{ 10**5000 }}",
    "{{ (1e400) | int }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{{ " + "(" * 200 + "1" + ")" * 200 + " }}",
    "{% for a in b %}" * 25 + "{% endfor %}" * 25,
]


@pytest.mark.slow
@pytest.mark.parametrize("template", EXHAUSTING, ids=lambda t: t[:30])
def test_a_template_that_exhausts_memory_or_time_is_refused(folder, template, monkeypatch):
    monkeypatch.setattr(jinja, "_CPU_SECONDS", 0.5)
    monkeypatch.setattr(jinja, "_renderer", cache(jinja._Renderer))
    with pytest.raises(DataError, match="jinja"):
        open_encoder(folder, template).encode(json.dumps(CHATS[0]), "chats.jsonl:1")
    ids_and_answers(open_encoder(folder, CHATML), CHATS[0])  # the next one is rendered


@pytest.mark.parametrize("shape", [["a"], [{"name": []}], [None], {"default": "x"}, 5], ids=str)
def test_a_chat_template_of_another_shape_is_refused(tmp_path, shape):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": shape}))
    with pytest.raises(DataError, match="has no chat_template"):
        open_chat_template(str(path), open_tokenizer("bytes"))


def test_a_template_has_the_functions_of_transformers_and_a_fixed_date(folder):
    extra = "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), "
    extra += "sort_keys=true) }}{{ strftime_now('%d %b %Y') }}"
    ids, _ = ids_and_answers(open_encoder(folder, extra + MARKED), turns("a", "b"))
    text = open_tokenizer(str(folder / "tokenizer.json")).decode(ids)
    assert text.startswith('{"a":1,"b":"\\u00e9"}26 Jul 2024<|im_start|>')


def test_a_template_that_does_not_fit_is_refused(folder):
    for name, message in (
        ("alpaca", "is not a chat template"),
        (str(folder / "tokenizer.json"), "has no chat_template"),
        (str(folder / "missing.json"), "cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            open_encoder(folder, name)
    with pytest.raises(DataError, match=r"has no special token <\|start_header_id\|>"):
        open_chat_template("llama3", open_tokenizer("bytes"))


def test_the_template_of_a_tokenizer_config_is_used(folder):
    encoder = open_encoder(folder, str(folder / "tokenizer_config.json"))
    for chat in CHATS:
        expected = ids_and_answers(open_encoder(folder, "llama3"), chat)
        assert ids_and_answers(encoder, chat) == expected
