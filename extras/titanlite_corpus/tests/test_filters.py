"""Filters: what each rule removes and changes, and that nothing else does."""

from __future__ import annotations

import json
import random
import re
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from conftest import ROOT
from tests.docs.pages import code_blocks
from titanlite.errors import UserError
from titanlite.files import parse_toml
from titanlite.settings import build_dataclass
from titanlite_corpus.counts import SAMPLE_CHARACTERS, SAMPLES, count_tables, merge_counts
from titanlite_corpus.documents import build_table, read_tables, write_tables
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.filters import (
    FilterConfig,
    filter_arguments,
    filter_documents,
    filter_table,
    language,
    open_rules,
    text_block,
)
from titanlite_corpus.filters.repetition import REPEATED_SIZES, TOP_SIZES, find_repeated_ngrams
from titanlite_corpus.filters.text_block import TextBlock
from titanlite_corpus.task import Task, run_tasks

# 60 distinct words without digits or punctuation, with two stop words
WORDS = ["the", "of", *[f"{a}{b}ord" for a in "bcdfghjklm" for b in "aeiouy"][:58]]
GOOD = "\n".join(" ".join(WORDS[n : n + 12]) + "." for n in range(0, 60, 12))


def configured(rules: list[str], **sections) -> FilterConfig:
    config, problems = build_dataclass(FilterConfig, {"rules": rules, **sections})
    assert not problems
    return config


def apply(texts: list[str], rules: list[str], **sections):
    """(texts kept, counts)"""
    table = build_table(texts, "web", [f"a.jsonl:{n}" for n in range(len(texts))])
    kept, counts = filter_table(table, open_rules(configured(rules, **sections)))
    return kept["text"].to_pylist(), counts


def removed(counts) -> dict[str, int]:
    return {rule: entry["documents"] for rule, entry in counts["removed"].items()}


def without(words: set[str]) -> str:
    return " ".join(word for word in WORDS if word not in words)


# --- rules ---------------------------------------------------------------------------------------

REMOVED = {  # check -> a document that fails it, and passes all checks before
    "length.few_characters": "",
    "length.many_characters": GOOD,
    "length.few_words": "three words here",
    "length.many_words": "x " * 45,
    "gopher_quality.too_few_words": " ".join(WORDS[:49]) + " ! 。 \x08" * 3,
    "gopher_quality.too_many_words": "the of morning " * 70,
    "gopher_quality.short_words": "the of a b c d e f " * 10,
    "gopher_quality.long_words": f"the of {'abcdefghijkl ' * 58}",
    "gopher_quality.hashes": GOOD + " #" * 7,
    "gopher_quality.ellipses": GOOD + " and so… on... it... goes... and... goes… on...",
    "gopher_quality.bullet_lines": "\n".join(f"  • the of {word} morning" for word in WORDS[:40]),
    "gopher_quality.ellipsis_lines": "\n".join([*(" ".join(WORDS) for _ in range(2)), "so..."]),
    "gopher_quality.non_alphabetic_words": GOOD + " 123" * 16,
    "gopher_quality.stop_words": without({"of"}) + " the the",
    "gopher_repetition.repeated_paragraphs": "a b c\n\n" * 2 + "d e f",
    "gopher_repetition.repeated_paragraph_characters": "\n\n".join(
        [*("x", "y", "z", "w", "v"), *(["a long paragraph, twice"] * 2)]
    ),
    "gopher_repetition.repeated_lines": "a b c\nd e f\na b c\n\n" + GOOD[:30] + "\na b c",
    "gopher_repetition.repeated_line_characters": "\n".join(
        [*("x", "y", "z", "w", "v", "u"), *(["a long line, two times"] * 2)]
    ),
    "gopher_repetition.top_2_gram": " ".join(f"{word} good morning" for word in WORDS[:8]),
    "gopher_repetition.top_3_gram": GOOD + " a good day" * 12,
    "gopher_repetition.repeated_5_grams": f"{' '.join(WORDS[:20])} " * 2,
    "c4.lorem_ipsum": "Here is Lorem Ipsum again.\n" + GOOD,
    "c4.curly_bracket": "It is { a bracket.\n" + GOOD,
    "c4.few_sentences": "One is here. Two is here. Three is here! Four is here?\nno end",
    "fineweb.punctuated_lines": GOOD.replace(".", ""),
    "fineweb.short_lines": "\n".join(f"{word} and one more." for word in WORDS),
    "fineweb.repeated_lines": GOOD + "\n" + GOOD,
    "fineweb.newlines": "\n\n\n\n\n\n".join(GOOD.splitlines()),
}
SECTIONS = {
    "length": {"max_characters": 250, "min_words": 4, "max_words": 40},
    "gopher_quality": {"max_words": 200},
    "gopher_repetition": {"max_top_ngram": [0.5, 0.18, 0.16]},
}


@pytest.mark.parametrize("check", REMOVED)
def test_each_check_removes_its_document_and_keeps_a_good_one(check):
    rule = check.partition(".")[0]
    sections = {} if check.endswith("2_gram") else {rule: SECTIONS.get(rule, {})}
    kept, counts = apply([REMOVED[check], GOOD], [rule], **sections)
    expected = {check: 1} if rule != "length" else {check: 1, "length.many_characters": 1}
    assert removed(counts) == ({check: 2} if check == "length.many_characters" else expected)
    assert kept == ([] if rule == "length" else [GOOD])


@pytest.mark.parametrize(
    ("key", "value", "document"),
    [
        ("gopher_quality.min_words", 49, "gopher_quality.too_few_words"),
        ("gopher_quality.max_words", 300, "gopher_quality.too_many_words"),
        ("gopher_quality.min_mean_word_length", 1.0, "gopher_quality.short_words"),
        ("gopher_quality.max_mean_word_length", 12.0, "gopher_quality.long_words"),
        ("gopher_quality.max_hashes_per_word", 0.2, "gopher_quality.hashes"),
        ("gopher_quality.max_ellipses_per_word", 0.2, "gopher_quality.ellipses"),
        ("gopher_quality.max_bullet_lines", 1.0, "gopher_quality.bullet_lines"),
        ("gopher_quality.max_ellipsis_lines", 0.4, "gopher_quality.ellipsis_lines"),
        ("gopher_quality.min_alphabetic_words", 0.7, "gopher_quality.non_alphabetic_words"),
        ("gopher_quality.min_stop_words", 1, "gopher_quality.stop_words"),
        ("c4.min_sentences", 4, "c4.few_sentences"),
        ("c4.lorem_ipsum", False, "c4.lorem_ipsum"),
        ("c4.curly_bracket", False, "c4.curly_bracket"),
        ("fineweb.min_punctuated_lines", 0.0, "fineweb.punctuated_lines"),
        ("fineweb.short_line_characters", 10, "fineweb.short_lines"),
        ("fineweb.max_short_lines", 1.0, "fineweb.short_lines"),
        ("fineweb.max_repeated_line_characters", 0.5, "fineweb.repeated_lines"),
        ("fineweb.max_newlines_per_word", 0.6, "fineweb.newlines"),
    ],
)
def test_each_threshold_is_a_setting(key, value, document):
    section, _, name = key.partition(".")
    kept, _ = apply([REMOVED[document]], [section], **{section: {name: value}})
    assert len(kept) == 1


def test_the_most_frequent_of_tied_ngrams_is_the_first():
    """As Counter.most_common does: "a b" and "b a" occur three times each."""
    ngrams = next(find_repeated_ngrams(TextBlock(pa.array(["aa b aa b aa b aa"])).words, 2))
    assert ngrams.characters_of_most_frequent().tolist() == [3 * len("aa b")]


def random_documents(source: random.Random, count: int) -> list[str]:
    """Few distinct words, so that n-grams repeat and overlap."""
    alphabets = ["ab", "abcd", "abcdefgh", "日本語abc", "é \u00a0x\u2003"]
    return [
        " ".join(
            "".join(source.choices(alphabet, k=source.randrange(1, 3)))
            for _ in range(source.randrange(0, 60))
        )
        for alphabet in source.choices(alphabets, k=count)
    ]


def read_repeated(words: list[str], size: int) -> int:
    """Characters in repeated n-grams, read one after the other: the definition, as a loop."""
    seen, total, start = set(), 0, 0
    while start + size <= len(words):
        ngram = tuple(words[start : start + size])
        total += sum(map(len, ngram)) if ngram in seen else 0
        start += size if ngram in seen else 1
        seen.add(ngram)
    return total


def read_most_frequent(words: list[str], size: int) -> int:
    ngrams = [" ".join(words[n : n + size]) for n in range(len(words) - size + 1)]
    best = max(ngrams, key=ngrams.count, default="")  # the first of several
    count = ngrams.count(best)
    return count * len(best) if count > 1 else 0


def test_repeated_ngrams_of_many_documents_are_those_of_each_alone():
    documents = random_documents(random.Random(1), 300)
    words = [text.split() for text in documents]
    block = TextBlock(pa.array(documents, pa.large_string()))
    for ngrams in find_repeated_ngrams(block.words, max(REPEATED_SIZES)):
        if ngrams.size in TOP_SIZES:
            expected = [read_most_frequent(w, ngrams.size) for w in words]
            assert ngrams.characters_of_most_frequent().tolist() == expected
        exact = ngrams.repeated_characters(np.zeros(len(documents)))
        expected = [read_repeated(w, ngrams.size) for w in words]
        assert exact.tolist() == expected
        limits = np.array([len(text) * 0.15 for text in documents])
        bound = ngrams.repeated_characters(limits)
        assert ((bound > limits) == (np.array(expected) > limits)).all()


def test_words_lines_and_lengths_are_those_of_python():
    documents = [
        *random_documents(random.Random(2), 50),
        "",
        " \n\t ",
        "a\u2028b\x1cc\x85d",
        "\n a\n",
    ]
    block = TextBlock(pa.array(documents, pa.large_string()))
    for parts, split in ((block.words, str.split), (block.lines, lambda t: t.split("\n"))):
        texts = parts.distinct.to_pylist()
        for number, text in enumerate(documents):
            part = slice(*parts.offsets[number : number + 2])
            expected = [p for p in split(text) if p.strip()]
            assert [texts[i] for i in parts.ids[part]] == expected
            assert parts.lengths[part].tolist() == list(map(len, expected))
    assert block.characters.tolist() == list(map(len, documents))


def test_c4_removes_lines_and_says_which():
    page = "\n".join(
        [
            "  Menu",
            "A line that has no end",
            "Dots at the end...",
            "Too short.",
            "Please enable JavaScript now.",
            "We use cookies on this page.",
            "x" * 1001 + " is a long word.",
            "A fact[12] with a note[edit].",
            "Four more sentences. Are here! Really? Yes.",
        ]
    )
    kept, counts = apply([page], ["c4"])
    assert kept == ["A fact with a note.\nFour more sentences. Are here! Really? Yes."]
    assert {rule: entry["parts"] for rule, entry in counts["changed"].items()} == {
        "c4.long_word": 1,
        "c4.no_terminal_punctuation": 3,
        "c4.few_words": 1,
        "c4.javascript": 1,
        "c4.policies": 1,
        "c4.citations": 1,
    }
    assert counts["samples"]["c4.javascript"][0]["text"] == "Please enable JavaScript now."
    line_settings = {"citations": False, "javascript": False, "policies": False}
    kept, _ = apply([page], ["c4"], c4={**line_settings, "terminal_punctuation": False})
    assert "JavaScript" in kept[0] and "cookies" in kept[0] and "[12]" in kept[0]
    assert "no end" in kept[0]


SECRETS = {
    "write to jane.doe+x@mail.example.org.": "write to <EMAIL>.",
    "x" * 100_000 + "@" * 1000: None,
    "not@anaddress, a @mention, a@b.": None,
    "host 8.8.8.8, 2606:4700:4700::1111!": "host <IP_ADDRESS>, <IP_ADDRESS>!",
    "private 10.0.0.1, 127.0.0.1, 192.168.1.1 and ::1": None,
    "version 1.2.3.4.5, 300.1.1.1, std::cout, d::c and 12:30:45": None,
    "id AKIAIOSFODNN7EXAMPLE ": "id <KEY> ",
    f"token ghp_{'a1B2' * 9} and hf_{'aB' * 17}": "token <KEY> and <KEY>",
    "-----BEGIN PRIVATE KEY-----\nMIIE+/=\nab\n-----END PRIVATE KEY-----\nend": "<KEY>\nend",
}


@pytest.mark.parametrize("text", SECRETS, ids=lambda text: text[:20])
def test_personal_data_is_replaced_and_nothing_else(text):
    kept, counts = apply([text, GOOD], ["personal_data"])
    assert kept == [text if SECRETS[text] is None else SECRETS[text], GOOD]
    assert bool(counts["changed"]) == (SECRETS[text] is not None)
    assert text not in json.dumps(counts["samples"])


KEYS = [
    *("AKIAABCDEFGHIJKLMNOP", "ghp_" + "a" * 36, "github_pat_" + "a" * 82, "glpat-" + "a" * 20),
    *("xoxb-" + "a" * 10, "AIza" + "a" * 35, "sk_live_" + "a" * 24, "sk-" + "a" * 32),
    *("hf_" + "a" * 34, "eyJaaaaaaaaaa.eyJaaaaaaaaaa.aaaaaaaaaa", "a@b.cd", "8.8.8.8"),
]
BEGINNINGS = [
    "-----BEGIN PRIVATE KEY----- ",
    "eyJaaaaaaaaaa-",
    "sk-",
    "a@b.c.",
    "2001:1:",
    "8.8.8.",
]


def assert_time_in_proportion(rule: str, unit: str | Callable[[int], str]) -> None:
    """Compare the CPU time of a rule for texts of n and of 4n characters."""
    seconds = []
    for size in (40_000, 160_000):
        text = unit * (size // len(unit)) if isinstance(unit, str) else unit(size)
        began = time.process_time()
        apply([text], [rule])
        seconds.append(time.process_time() - began)
    assert seconds[1] < 8 * seconds[0] + 0.1, text[:40]


@pytest.mark.slow
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_personal_data_takes_time_in_proportion_to_a_hostile_text(beginning):
    for key in KEYS:
        unit = f"{beginning}{key}-" if beginning.endswith("-") else f"{beginning}{key} "
        assert_time_in_proportion("personal_data", unit)


@pytest.mark.parametrize("rule", ["c4", "fineweb", "gopher_quality", "gopher_repetition"])
def test_filters_take_time_in_proportion_to_a_hostile_text(rule):
    for unit in ("a ", "a\n", ".)", "[1", "a a b ", "\u0301", "..."):
        assert_time_in_proportion(rule, unit)
    assert_time_in_proportion(rule, lambda size: " ".join(map(str, range(size // 12))) * 2)


def test_a_long_link_needs_memory_in_proportion(tmp_path):
    (tmp_path / "links").write_text("spam.example/shop\n")

    def peak(link: str) -> int:
        tracemalloc.start()
        apply([link], ["blocklist"], blocklist={"links": str(tmp_path / "links")})
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    for beginning, part in (("http://", "a."), ("http://x/", "a/"), ("http://", "a/a.")):
        assert peak(beginning + part * 16_000) < 8 * peak(beginning + part * 4_000), part


def test_personal_data_stays_where_its_placeholder_is_empty():
    text = "a@b.example.org at 8.8.8.8"
    assert apply([text], ["personal_data"], personal_data={"mail": "", "ip": "[IP]"})[0] == [
        "a@b.example.org at [IP]"
    ]


def test_only_the_languages_that_are_kept_stay():
    pytest.importorskip("py3langid")
    german = "Der schnelle braune Fuchs springt über den faulen Hund, und alle sehen ihm dabei zu."
    english = "The quick brown fox jumps over the lazy dog, and all of them watch it do that."
    unsure = "1234 5678"
    kept, counts = apply([german, english, unsure], ["language"])
    assert kept == [english]
    assert counts["removed"]["language.other_language"]["documents"] >= 1
    sample = counts["samples"]["language.other_language"]
    assert any(entry["value"].startswith("de ") for entry in sample)
    kept, _ = apply([german, english], ["language"], language={"keep": ["de", "en"]})
    assert kept == [german, english]


def test_blocklists_of_words_and_links(tmp_path):
    (tmp_path / "words").write_text("# words\nBadword\nvery bad phrase\n悪い\n")
    (tmp_path / "links").write_text("spam.example\nhttps://www.fine.example/bad/\n")
    lists = {"words": str(tmp_path / "words"), "links": str(tmp_path / "links")}
    clean = [
        "badwords are other words",
        "very bad and a phrase, very bad",
        "very",
        "see https://fine.example/badly and http://notspam.example",
        "mail@spam.example",
    ]
    blocked = [
        'a "BADWORD".',
        "A very BAD phrase!",
        "これは悪いです",
        "see <https://www.shop.spam.example:80/x?y>.",
        "(www.fine.example/bad/page)",
    ]
    kept, counts = apply([*clean, *blocked], ["blocklist"], blocklist=lists)
    assert kept == clean
    assert removed(counts) == {"blocklist.words": 3, "blocklist.links": 2}
    kept, _ = apply(blocked, ["blocklist"], blocklist={**lists, "max_words": 1, "max_links": 1})
    assert kept == blocked


def test_a_function_of_the_user_keeps_removes_or_changes(tmp_path, monkeypatch):
    code = "def keep(text):\n    return text.upper() if 'up' in text else 'no' not in text\n"
    (tmp_path / "users_own_filters.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept, counts = apply(["up we go", "no", "yes"], ["users_own_filters:keep"])
    assert kept == ["UP WE GO", "yes"]
    assert removed(counts) == {"users_own_filters:keep.removed": 1}
    assert counts["changed"]["users_own_filters:keep.changed"] == {"documents": 1, "parts": 1}


def test_the_examples_of_the_guide_work(tmp_path, monkeypatch):
    blocks = code_blocks(ROOT / "docs" / "how-to" / "filter-a-corpus.md")
    (tmp_path / "my_filters.py").write_text(next(block.text for block in blocks if block.file))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipes = [parse_toml(block.text) for block in blocks if block.language == "toml"]
    for recipe in recipes:
        open_rules(configured(**recipe["filter"]))
    assert apply(["a\tb" * 9, "a\t" + GOOD], recipes[-1]["filter"]["rules"])[0] == ["a    " + GOOD]


# --- tables --------------------------------------------------------------------------------------

ALL = ["length", "gopher_quality", "gopher_repetition", "c4", "fineweb", "personal_data"]


def mixed_documents() -> list[str]:
    source = random.Random(3)
    texts = [*REMOVED.values(), *SECRETS, *random_documents(source, 40), *([GOOD] * 20)]
    texts += [GOOD + f"\nWrite a mail to a{n}@example.org now." for n in range(20)]
    source.shuffle(texts)
    return texts


def test_the_size_of_blocks_changes_no_result(monkeypatch):
    texts = mixed_documents()
    at_once = apply(texts, ALL)
    monkeypatch.setattr(text_block, "BLOCK_BYTES", 4000)
    assert apply(texts, ALL) == at_once
    assert len(at_once[0]) >= 30


def test_every_document_is_kept_or_counted_once():
    texts = mixed_documents()
    kept, counts = apply(texts, ALL)
    assert counts["documents_in"] == len(texts) and counts["documents_out"] == len(kept)
    assert sum(removed(counts).values()) == len(texts) - len(kept)
    lost = sum(entry["bytes"] for entry in counts["removed"].values())
    unchanged, _ = apply(texts, [rule for rule in ALL if rule not in ("c4", "personal_data")])
    assert counts["bytes_in"] - lost >= counts["bytes_out"] > 0 and unchanged
    assert sum(counts["lengths_in"].values()) == len(texts)
    assert counts["sources"]["web"]["documents_out"] == len(kept)


def test_samples_are_few_short_and_do_not_depend_on_how_tables_are_divided():
    texts = [f"{n} " * 400 for n in range(100, 200)]
    table = build_table(texts, "web", [f"a:{n}" for n in range(len(texts))])
    rules = open_rules(configured(["gopher_quality"]))
    whole = filter_table(table, rules)[1]
    parts = [filter_table(table.slice(start, 7), rules)[1] for start in range(0, 100, 7)]
    assert merge_counts(reversed(parts)) == whole
    (samples,) = whole["samples"].values()
    assert len(samples) == SAMPLES and len({s["origin"] for s in samples}) == SAMPLES
    assert all(len(sample["text"]) <= SAMPLE_CHARACTERS for sample in samples)


def test_only_the_sources_that_are_named_are_filtered():
    tables = [build_table(["short", GOOD], name, ["1", "2"]) for name in ("web", "books")]
    table = pa.concat_tables(tables)
    kept, counts = filter_table(table, open_rules(configured(["gopher_quality"])), ["web"])
    assert kept["origin"].to_pylist() == ["2", "1", "2"]
    assert kept["source"].to_pylist() == ["web", "books", "books"]
    assert counts["sources"]["books"] == count_tables(tables[1], tables[1])["sources"]["books"]


def test_a_document_that_a_rule_empties_is_removed():
    kept, counts = apply(["a line without end"], ["c4"], c4={"min_sentences": 0})
    assert kept == [] and removed(counts) == {"c4.empty": 1}


def write_texts(out, inputs, texts):
    write_tables(out, [build_table(texts, "web", [f"a.jsonl:{n}" for n in range(len(texts))])])
    return {}


def test_the_task_writes_what_is_kept(tmp_path):
    texts = mixed_documents()
    reads = [Task("read", write_texts, texts[number::2]) for number in range(2)]
    arguments = filter_arguments(configured(ALL))
    tasks = [Task("filter", filter_documents, arguments, (read.key,)) for read in reads]
    counts = run_tasks([*reads, *tasks], tmp_path / "work", LocalEngine(1))[2:]
    for number, task in enumerate(tasks):
        kept = [t for table in read_tables(tmp_path / "work" / task.key) for t in table["text"]]
        alone = apply(texts[number::2], ALL)
        assert [text.as_py() for text in kept] == alone[0]
        assert {**counts[number], "seconds": 0} == {**alone[1], "seconds": 0}


def test_progress_is_reported_within_a_table(monkeypatch):
    """Otherwise a task that is cancelled or hangs is noticed only after a table of 64 MB."""
    reports = []
    monkeypatch.setattr("titanlite_corpus.engine._count_progress", lambda: reports.append(1))
    monkeypatch.setattr(text_block, "BLOCK_BYTES", 2 * len(GOOD))
    apply([GOOD] * 10, ["length"])
    assert len(reports) == 5
    apply([GOOD] * 10, ["builtins:bool"])
    assert len(reports) == 5 + 5 + 10


# --- settings ------------------------------------------------------------------------------------


def test_arguments_change_with_what_the_result_depends_on(tmp_path):
    words = tmp_path / "words"
    words.write_text("one\n")
    config = configured(["fineweb", "blocklist"], blocklist={"words": str(words)})
    before = filter_arguments(config)
    assert filter_arguments(configured(["fineweb"]))["config"].keys() == {
        "rules",
        "sources",
        "fineweb",
    }
    words.write_text("two\n")
    assert filter_arguments(config) != before
    assert json.loads(json.dumps(before)) == before


REFUSED = {
    "is not a rule": ({"rules": ["gopher"]}, 'contains "gopher"'),
    "no list is given": ({"rules": ["blocklist"]}, "blocklist.words"),
    "cannot be read": ({"rules": ["blocklist"], "blocklist": {"words": "/nowhere"}}, "/nowhere"),
    "cannot be imported": ({"rules": ["no_such_package:keep"]}, "package.module:function"),
    "not a function": ({"rules": ["json:__name__"]}, "str"),
    "twice": ({"rules": ["c4", "c4"]}, '"c4"'),
    "3 numbers": ({"rules": ["gopher_repetition"], "gopher_repetition": {"max_top_ngram": [0.1]}},
                  "max_top_ngram"),
    "backslash": ({"rules": ["personal_data"], "personal_data": {"key": "\\0"}}, "personal_data"),
}  # fmt: skip


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_not_understood_is_refused(problem):
    table, named = REFUSED[problem]
    with pytest.raises(UserError, match=problem) as refused:
        open_rules(configured(**table))
    assert named in str(refused.value)


def test_all_problems_are_reported_together():
    with pytest.raises(UserError, match="(?s)one.*two") as refused:
        open_rules(configured(["one", "two"]))
    assert len(re.findall("is not a rule", str(refused.value))) == 2


def test_an_unknown_language_is_refused():
    pytest.importorskip("py3langid")
    with pytest.raises(UserError, match="english"):
        open_rules(configured(["language"], language={"keep": ["english"]}))


def test_a_missing_language_library_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    language._load_identifier.cache_clear()
    with pytest.raises(UserError, match="pip install"):
        open_rules(configured(["language"]))


def test_a_function_that_returns_something_else_is_an_error():
    with pytest.raises(UserError, match=r"builtins:len.*returned 4"):
        apply(["text"], ["builtins:len"])
