"""Deduplication: what is found, what is kept, and that neither depends on how tasks are divided."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
import unicodedata
from itertools import combinations, pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from titanlite.errors import DataError
from titanlite_corpus.deduplicate import (
    DeduplicateConfig,
    PartSizes,
    check_deduplicate,
    deduplicate,
    match_probability,
)
from titanlite_corpus.deduplicate.lines import _remove_from_table
from titanlite_corpus.deduplicate.minhash import band_keys, compute_signatures
from titanlite_corpus.deduplicate.pairs import _choose_pairs
from titanlite_corpus.deduplicate.stars import (
    connect,
    count_unsettled,
    in_both_directions,
    large_star,
    small_star,
)
from titanlite_corpus.deduplicate.words import HashedDocuments, hash_ngrams, hash_words
from titanlite_corpus.documents import build_table, read_tables, write_tables
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.task import RECORD, Task, run_tasks

ROOT = Path(__file__).parents[3]
SMALL_PARTS = PartSizes(keys=40, edges=30, lines=50)
PROSE = [path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]


def make_table(out: Path, inputs: list[Path], arguments: dict) -> dict:
    """Task: a table of the given texts, in two row groups."""
    texts, first = arguments["texts"], arguments["first"]
    half = len(texts) // 2
    origins = [str(first + n) for n in range(len(texts))]
    parts = (slice(0, half), slice(half, None))
    write_tables(out, [build_table(texts[p], "web", origins[p]) for p in parts])
    return {}


class ShuffledEngine:
    """Runs the calls of this process in a random order."""

    def run(self, calls):
        for index in random.Random(len(calls)).sample(range(len(calls)), len(calls)):
            yield index, calls[index].function(*calls[index].arguments)


class Corpus:
    """Texts in tables, deduplicated in a folder."""

    def __init__(self, work: Path, texts: list[str], tables: int = 3, engine=None):
        self.work, self._engine = work, engine or LocalEngine(1)
        bounds = [len(texts) * n // tables for n in range(tables + 1)]
        self.tables = [
            Task("read", make_table, {"texts": texts[a:b], "first": a}) for a, b in pairwise(bounds)
        ]
        self.run(self.tables)
        self.counts: dict[str, list[dict]] = {}

    def run(self, tasks):
        return run_tasks(tasks, self.work, self._engine)

    def deduplicate(self, sizes: PartSizes | None = None, **settings) -> list[tuple[int, str]]:
        """(number, text) of each document that is kept; the counts are in `counts`."""
        self.counts = {}

        def run(tasks):
            counts = self.run(tasks)
            for task, count in zip(tasks, counts, strict=True):
                self.counts.setdefault(task.stage, []).append(count)
            return counts

        kept = deduplicate(self.tables, DeduplicateConfig(**settings), run, sizes)
        rows = [
            row
            for task in kept
            for table in read_tables(self.work / task.key)
            for row in table.to_pylist()
        ]
        return [(int(row["origin"]), row["text"]) for row in rows]

    def total(self, stage: str, *keys: str) -> int:
        total = 0
        for count in self.counts[stage]:
            for key in keys:
                count = count.get(key, {})
            total += count or 0
        return total


def numbers(kept: list[tuple[int, str]]) -> list[int]:
    return [number for number, _ in kept]


def column(texts: list[str]) -> pa.Array:
    return pa.array(texts, pa.large_string())


def word_hashes(texts: list[str]) -> list[list[int]]:
    """The hashes of the words of each text."""
    return [
        hashes.tolist()
        for batch in hash_words(column(texts))
        for hashes in np.split(batch.hashes, np.cumsum(batch.counts)[:-1])
    ]


def words_of(text: str) -> list[str]:
    """Words as documented, in plain Python."""
    plain = [
        c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) not in ("Mn", "Cf")
    ]
    return "".join(c.lower() if c.isalnum() else " " for c in plain).split()


def random_words(source: random.Random, number: int) -> list[str]:
    return [f"w{source.randrange(10**9)}" for _ in range(number)]


# --- words and n-grams ---------------------------------------------------------------------------


def test_words_are_equal_whatever_their_case_accents_and_punctuation():
    first, *others = word_hashes(
        [
            "le café, naïve — “Ärger”!",
            unicodedata.normalize("NFD", "Le CAFÉ\n\tnaïve ärger"),
            "le cafe naive Arger",
            "\u00adle ca\u200dfe\u0301 naive… (arger)",
        ]
    )
    assert len(set(first)) == 4 and all(other == first for other in others)
    for text in ("λόγος", "µ", "ẛ", "\u0374", "\u1fbe"):
        word, *others = word_hashes([text, text.upper(), unicodedata.normalize("NFD", text)])
        assert len(word) == 1 and all(other == word for other in others), text


def test_scripts_without_spaces_have_a_word_for_each_character():
    assert [len(set(words)) for words in word_hashes(["我们 学习", "ไทย", "русский текст"])] == [
        4,
        3,
        2,
    ]


def test_different_ngrams_have_different_hashes():
    """As many as sets of Python have, so none collide and none cross a document's end."""
    for n in (1, 5, 13):
        seen = [hash_ngrams(words, n).hashes for words in hash_words(column(PROSE))]
        expected = []
        for text in PROSE:
            words = words_of(text)
            expected += [tuple(words[i : i + n]) for i in range(len(words) - n + 1)] or [words]
        assert sum(map(len, seen)) == len(expected)
        assert len(np.unique(np.concatenate(seen))) == len(set(map(tuple, expected)))


def test_hashes_of_a_document_do_not_depend_on_those_around_it():
    long = " ".join(PROSE) + "x" * 300_000 + "é" * 150_000 + " ".join(PROSE[:3])
    texts = ["", "a", *PROSE[:20], long, "?!", "b c", long, "é", ""]
    together = word_hashes(texts)
    assert together == [word_hashes([text])[0] for text in texts]
    assert together[22][:1000] == word_hashes([long[:20_000]])[0][:1000]
    sliced = next(hash_words(column(texts).slice(5, 3)))
    assert sliced.hashes.tolist() == [word for text in together[5:8] for word in text]


def test_a_document_with_fewer_words_than_an_ngram_has_one():
    texts = ["one two", "one two three", "two one", "", "!?", "One, two."]
    words = next(hash_words(column(texts)))
    ngrams = hash_ngrams(words, 5)
    assert ngrams.counts.tolist() == [1, 1, 1, 0, 0, 1]
    a, b, c, d = ngrams.hashes.tolist()
    assert a == d and len({a, b, c}) == 3


# --- MinHash -------------------------------------------------------------------------------------


def test_signatures_are_those_of_datasketch():
    """`MinHash(num_perm=…, seed=1, hashfunc=int)` of datasketch 2.0.0 on the same hashes."""
    hashes = np.random.RandomState(7).randint(0, 1 << 32, 40, dtype=np.uint32).astype(np.uint64)
    two = np.concatenate([hashes[:25], hashes[15:]]) << np.uint64(32)
    signatures = compute_signatures(HashedDocuments(0, two, np.array([25, 0, 25])), 8).T.tolist()
    common = [51755912, 23489024], [39470165, 13218683]
    assert signatures == [
        [18868916, 189842216, *common[0], 23018655, 437305423, *common[1]],
        [18868916, 18642432, *common[0], 68750825, 340726389, *common[1]],
    ]
    one = HashedDocuments(0, hashes[:25] << np.uint64(32), np.array([25]))
    assert compute_signatures(one, 112).sum(dtype=np.uint64) == 19187106219


@pytest.mark.parametrize(("bands", "rows"), [(14, 8), (20, 5)])
def test_pairs_are_found_with_the_probability_of_the_s_curve(bands, rows):
    """1,000 pairs of each similarity; within 4 standard deviations, also of the estimate."""
    source = random.Random(0)
    for percent in (50, 60, 70, 72, 80, 90):
        texts, different = [], (100 - percent) // 2  # of 100 n-grams of both, in each
        for _ in range(1000):
            common = random_words(source, percent + 4)
            texts += [" ".join(common + random_words(source, different)) for _ in range(2)]
        keys, signatures = [], []
        for words in hash_words(column(texts)):
            ngrams = hash_ngrams(words, 5)
            assert set(ngrams.counts.tolist()) == {percent + different}
            signatures.append(compute_signatures(ngrams, bands * rows))
            keys.append(band_keys(signatures[-1], bands))
        every = np.concatenate(keys, axis=1)
        found = (every[:, ::2] == every[:, 1::2]).any(axis=0).mean()
        expected = match_probability(percent / 100, bands, rows)
        assert abs(found - expected) <= 4 * sqrt(expected * (1 - expected) / 1000) + 1e-9, percent
        minima = np.concatenate(signatures, axis=1)
        equal = (minima[:, ::2] == minima[:, 1::2]).mean(axis=0)
        s, number = percent / 100, bands * rows
        assert abs(equal.mean() - s) <= 4 * sqrt(s * (1 - s) / number / 1000)
        assert equal.var() == pytest.approx(s * (1 - s) / number, rel=0.2)


# --- clusters ------------------------------------------------------------------------------------


def first_of_components(edges: list[tuple[int, int]]) -> dict[int, int]:
    """{document: first document of its component}, by union-find."""
    parent: dict[int, int] = {}

    def find(x: int) -> int:
        while parent.setdefault(x, x) != x:
            x = parent[x]
        return x

    for a, b in edges:
        a, b = sorted((find(a), find(b)))
        parent[b] = a
    return {x: find(x) for x in parent}


GRAPHS = {
    "chain": list(pairwise(range(60))),
    "shuffled chain": list(pairwise(random.Random(1).sample(range(60), 60))),
    "star with a late centre": [(59, n) for n in range(59)],
    "random": [tuple(random.Random(n).sample(range(200), 2)) for n in range(130)],
    "none": [],
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("parts", [1, 3])
def test_clusters_are_connected_components(graph, parts):
    expected = first_of_components(GRAPHS[graph])
    edges = in_both_directions(np.array(GRAPHS[graph], np.int64).reshape(-1, 2).T)
    if parts == 1:
        edges = connect(edges)
    rounds = 0
    while count_unsettled(edges):
        for operation in (large_star, small_star):
            owner = edges[0] * parts // 200
            pieces = [operation(edges[:, owner == p]) for p in range(parts)]
            edges = np.concatenate(pieces, axis=1)
            edges = np.unique(edges, axis=1)
        rounds += 1
    assert rounds <= 10
    found = {int(d): int(n) for d, n in edges.T if n < d}
    assert found == {d: first for d, first in expected.items() if d != first}


def noisy_corpus(source: random.Random) -> list[str]:
    """240 texts: originals, equal and near copies, chains of copies, short and empty ones."""
    texts = [" ".join(random_words(source, source.randrange(1, 120))) for _ in range(80)]
    while len(texts) < 230:
        words = source.choice(texts).split()
        for _ in range(source.choice([0, 0, 1, 1, 2, 6])):
            words[source.randrange(len(words))] = random_words(source, 1)[0]
        texts.append(" ".join(words))
    texts += ["", "", "?!", "?!", "one two", "One, two.", "one two", "", "x", "X"]
    source.shuffle(texts)
    return texts


def brute_force(texts: list[str]) -> tuple[set[int], set[int]]:
    """Documents to be removed: equal to an earlier one; not the first of their cluster."""
    exact = {b for a, b in combinations(range(len(texts)), 2) if texts[a] == texts[b]}
    bands: list[list[int]] = []
    for text in texts:
        ngrams = hash_ngrams(next(hash_words(column([text]))), 5)
        keys = band_keys(compute_signatures(ngrams, 112), 14)
        bands.append(keys[:, 0].tolist() if keys.shape[1] else [])
    edges = [
        (a, b)
        for a, b in combinations(range(len(texts)), 2)
        if texts[a] == texts[b] or any(x == y for x, y in zip(bands[a], bands[b], strict=False))
    ]
    first = first_of_components(edges)
    return exact, {document for document in first if first[document] != document}


def test_the_first_document_of_each_cluster_is_kept(tmp_path):
    texts = noisy_corpus(random.Random(3))
    exact, removed = brute_force(texts)
    corpus = Corpus(tmp_path, texts)
    expected = [n for n in range(len(texts)) if n not in removed]
    assert numbers(corpus.deduplicate()) == expected
    assert corpus.total("duplicates", "removed", "exact", "documents") == len(exact)
    assert corpus.total("duplicates", "removed", "near", "documents") == len(removed - exact) > 30
    assert corpus.total("duplicates", "documents_out") == len(expected)
    sizes = [clusters for count in corpus.counts["duplicates"] for clusters in [count["clusters"]]]
    in_clusters = sum((int(size) - 1) * number for c in sizes for size, number in c.items())
    assert in_clusters == len(removed)

    assert corpus.deduplicate(SMALL_PARTS) == [(n, texts[n]) for n in expected]
    assert len(corpus.counts["duplicate-matches"]) > 1 < len(corpus.counts["duplicate-clusters"])
    assert numbers(Corpus(tmp_path / "one", texts, tables=1).deduplicate()) == expected
    only_exact = numbers(corpus.deduplicate(near=False))
    assert only_exact == [n for n in range(len(texts)) if n not in exact]


def read_result(path: Path) -> bytes | dict:
    """A file of a task; of its record, everything but the CPU time."""
    if path.name != RECORD:
        return path.read_bytes()
    record = json.loads(path.read_bytes())
    del record["counts"]["seconds"]
    return record


def test_the_order_of_tasks_and_restarts_do_not_change_a_byte(tmp_path):
    texts = noisy_corpus(random.Random(4))
    sizes = PartSizes(keys=100, edges=250, lines=100)
    settings = {"lines": "line", "line_documents": 1}
    files = []
    for engine in (LocalEngine(1), ShuffledEngine()):
        corpus = Corpus(tmp_path / str(len(files)), texts, engine=engine)
        corpus.deduplicate(sizes, **settings)
        if files:
            for stage in ("duplicate-matches", "duplicates", "lines"):  # as if killed there
                for folder in sorted((corpus.work / stage).iterdir())[::2]:
                    shutil.rmtree(folder)
            corpus.deduplicate(sizes, **settings)
        found = [path for path in sorted(corpus.work.rglob("*")) if path.is_file()]
        files.append({str(path.relative_to(corpus.work)): read_result(path) for path in found})
    assert len(corpus.counts["duplicate-clusters"]) > 2
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []


def test_planted_near_duplicates_are_found_and_nothing_else_is_removed(tmp_path):
    """Copies with one word in 100 replaced: similarity about 0.9, found with 0.9995."""
    source = random.Random(5)
    originals = [" ".join(random_words(source, 150)) for _ in range(300)]
    copies = []
    for text in originals[:200]:
        words = text.split()
        for place in source.sample(range(150), 1):
            words[place] = "changed"
        copies.append(" ".join(words))
    corpus = Corpus(tmp_path, originals + copies)
    kept = numbers(corpus.deduplicate())
    assert kept[:300] == list(range(300))  # precision 1
    assert len(kept) == 300  # recall 1
    (pairs,) = corpus.counts["duplicate-pairs"]
    samples = pairs["samples"]["near"]
    assert len(samples) == 10
    for sample in samples:
        assert int(sample["origin"]) == int(sample["kept_origin"]) + 300
        assert 0.9 < sample["value"] < 1 and abs(sample["estimate"] - sample["value"]) < 0.12


def test_tables_without_documents_are_no_error(tmp_path):
    corpus = Corpus(tmp_path, ["one text", "one text"], tables=4)
    assert corpus.deduplicate(lines="line") == [(0, "one text")]
    assert Corpus(tmp_path / "empty", [], tables=2).deduplicate(lines="line") == []


# --- lines ---------------------------------------------------------------------------------------

FOOTER = "Subscribe to our newsletter for updates"


def test_a_line_in_many_documents_remains_in_the_first(tmp_path):
    texts = [f"Article {n} about subject {n}.\n {FOOTER} \nEnd." for n in range(8)]
    texts += [FOOTER, f"{FOOTER}\n{FOOTER}\nlast"]
    for sizes in (PartSizes(), SMALL_PARTS):
        corpus = Corpus(tmp_path / str(sizes.lines), texts, tables=4)
        kept = corpus.deduplicate(sizes, near=False, lines="line", line_documents=6)
        cleaned = [f"Article {n} about subject {n}.\nEnd." for n in range(1, 8)]
        assert kept == [*enumerate([texts[0], *cleaned]), (9, "last")]
        assert corpus.total("lines", "removed", "repeated_lines", "documents") == 1
        assert corpus.total("lines", "changed", "repeated_lines", "documents") == 8
        assert corpus.total("lines", "changed", "repeated_lines", "parts") == 10
    untouched = corpus.deduplicate(near=False, lines="line", line_documents=10)
    assert [text for _, text in untouched] == texts
    untouched = corpus.deduplicate(
        near=False, lines="line", line_documents=1, line_characters=len(FOOTER) + 1
    )
    assert [text for _, text in untouched] == texts


def test_repeated_lines_of_a_long_address_need_memory_in_proportion():
    lines, address = [f"line {n}" for n in range(1000)], "u" * 60_000
    arguments = {"lines": "line", "line_characters": 1}
    table = build_table(["\n".join(lines)], "web", [address])
    hashes = {0: {xxhash.xxh3_64_intdigest(line.encode()) for line in lines}}
    tracemalloc.start()
    kept, counts = _remove_from_table(table, 0, hashes, arguments)
    assert tracemalloc.get_traced_memory()[1] < 30 * len(address)
    tracemalloc.stop()
    assert kept.num_rows == 0 and counts["changed"]["repeated_lines"]["parts"] == 1000


def test_pairs_are_chosen_without_comparing_every_cluster_with_every_match(tmp_path, monkeypatch):
    looked_up, isin = [], np.isin
    monkeypatch.setattr(np, "isin", lambda a, b: looked_up.append(len(b)) or isin(a, b))

    def count(parts: int) -> int:
        documents = np.arange(100 * parts)
        looked_up.clear()
        folders = [tmp_path / f"{parts}-{part}" for part in range(parts)]
        for part, folder in enumerate(folders):
            folder.mkdir()
            cluster = documents[100 * part : 100 * (part + 1)]
            stars = in_both_directions(np.stack([cluster[1:], np.full(99, cluster[0])]))
            np.save(folder / "edges.npy", stars)
            equal = documents[(documents % 100 > 50) & (documents % parts == part)]
            np.save(folder / "exact.npy", np.stack([equal, equal // 100 * 100]))
        chosen = _choose_pairs(folders, folders)
        assert chosen.shape[1] == 10 and (chosen[0] % 100 <= 50).all()
        return sum(looked_up)

    assert count(16) <= 4 * count(4)


def test_lines_of_removed_documents_are_not_counted(tmp_path):
    texts = [f"{FOOTER}\nsame"] * 9 + [f"{FOOTER}\nother"]
    kept = Corpus(tmp_path, texts).deduplicate(near=False, lines="line", line_documents=2)
    assert kept == [(0, texts[0]), (9, texts[9])]


def test_paragraphs_are_compared_as_a_whole(tmp_path):
    texts = [f"{FOOTER}\nPart {n}.\n\n{FOOTER}\nEvery day.\n\nText {n}." for n in range(3)]
    kept = Corpus(tmp_path, texts).deduplicate(near=False, lines="paragraph", line_documents=1)
    cleaned = [f"{FOOTER}\nPart {n}.\n\nText {n}." for n in (1, 2)]
    assert kept == list(enumerate([texts[0], *cleaned]))


# --- benchmarks ----------------------------------------------------------------------------------

QUESTION = (
    "Which of the following rivers flows through the largest number of capital cities in Europe?"
)


@pytest.fixture
def benchmark_folder(tmp_path) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    row = {"question": QUESTION, "choices": ["Danube", "Rhine"], "answer": 0}
    (folder / "rivers.jsonl").write_text(json.dumps(row) + "\n\n")
    (folder / "short.txt").write_text("Too short for an n-gram.")
    nested = {"item": {"text": ["Nested strings count as one text", "of " + "many " * 6 + "words"]}}
    pq.write_table(pa.Table.from_pylist([nested]), folder / "nested.parquet")
    (folder / "README.md").write_text(" ".join(PROSE[0].split()[:200]))
    return folder


def test_documents_with_a_passage_of_a_benchmark_are_removed(tmp_path, benchmark_folder):
    shouted = QUESTION.upper().replace(" ", "\n* ")
    half = " ".join(QUESTION.split()[:12])
    texts = [
        f"A quiz: {shouted} Answer: Danube.",
        f"{half} in the world?",
        "Too short for an n-gram.",
        f"{QUESTION.split()[0]} of these is right? {half}",
        "as text of many many many many many many words go",
        PROSE[0],
        "nested strings count as one text of many many many many many many words",
    ]
    corpus = Corpus(tmp_path / "work", texts)
    kept = numbers(corpus.deduplicate(benchmarks=[str(benchmark_folder)]))
    assert kept == [1, 2, 3, 4, 5]
    assert corpus.total("duplicates", "removed", "benchmark", "documents") == 2
    assert corpus.counts["benchmark-ngrams"][0]["benchmark_texts_too_short"] == 1
    samples = [c["samples"].get("benchmark", []) for c in corpus.counts["duplicates"]]
    assert [s["origin"] for sample in samples for s in sample] == ["0", "6"]
    # the first has 3 n-grams of a question of 15 words, the last 2 of 14 words
    for matches, removed in ((2, 2), (3, 1), (4, 0)):
        settings = {"benchmarks": [str(benchmark_folder)], "benchmark_matches": matches}
        assert len(texts) - len(corpus.deduplicate(**settings)) == removed


def test_a_changed_benchmark_is_read_again(tmp_path, benchmark_folder):
    corpus = Corpus(tmp_path / "work", [QUESTION, " ".join(PROSE[1].split()[:40])])
    settings = {"benchmarks": [str(benchmark_folder / "rivers.jsonl")], "near": False}
    assert numbers(corpus.deduplicate(**settings)) == [1]
    (benchmark_folder / "rivers.jsonl").write_text(json.dumps({"text": PROSE[1]}))
    assert numbers(corpus.deduplicate(**settings)) == [0]


def test_settings_that_cannot_work_are_refused_together(tmp_path, benchmark_folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    names = [tmp_path / "none", benchmark_folder / "README.md", empty, benchmark_folder]
    config = DeduplicateConfig(bands=1000, benchmarks=[str(name) for name in names])
    problems = [str(problem) for problem in check_deduplicate(config)]
    assert len(problems) == 4
    assert "deduplicate.bands = 1000" in problems[0] and "8,000" in problems[0]
    assert (
        "no such file" in problems[1] and ".jsonl" in problems[2] and "has no file" in problems[3]
    )
    assert check_deduplicate(DeduplicateConfig(benchmarks=[str(benchmark_folder)])) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": ', "a.jsonl: cannot be read"),
        ("a.txt", b"\xff\xfe", "a.txt: cannot be read"),
        ("a.parquet", b"PAR1", "a.parquet: cannot be read"),
        ("a.txt", b"few words", "none of the 1 texts has 13 words"),
    ],
)
def test_a_benchmark_that_cannot_be_used_is_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        Corpus(tmp_path / "work", ["text"]).deduplicate(benchmarks=[str(tmp_path / name)])
