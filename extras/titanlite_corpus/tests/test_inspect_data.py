"""python -m titanlite_corpus inspect shows what a run reads, and refuses what does not exist."""

from __future__ import annotations

import json
import re

import fsspec
import numpy as np
import pytest

from titanlite.checkpoint.manifest import CheckpointManifest, write_checkpoint_manifest
from titanlite.data import BatchDump, open_tokenizer
from titanlite.data.packed import BEGINS, UNTRAINED
from titanlite.data.shards import open_corpus
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.errors import DataError, format_error, printable
from titanlite.storage import StorageFolder
from titanlite_corpus.commands import inspect as inspect_command
from titanlite_corpus.inspection.documents import CorpusDocuments
from titanlite_corpus.inspection.run_data import open_run_data
from titanlite_corpus.inspection.samples import format_sample
from titanlite_corpus.shard_writer import EntryWriter, describe_shard, write_corpus_manifest


@pytest.fixture
def inspect(capsys):
    def run(*argv) -> list[dict]:
        assert inspect_command.main([str(word) for word in (*argv, "--json")]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def refusal(capsys):
    def run(*argv) -> str:
        assert inspect_command.main([str(word) for word in argv]) == 2
        return capsys.readouterr().err

    return run


@pytest.fixture
def started_run(run_toml, tmp_path):
    """The folder of a run of three steps, as far as its records go."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.toml").write_text(run_toml.read_text())
    lines = [{"step": step, "samples": 8 * step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def documents_of(path) -> list[np.ndarray]:
    corpus, end = open_corpus(path), open_tokenizer("bytes").eos_id
    ids = corpus.read(0, corpus.tokens)
    return np.split(ids, np.flatnonzero(ids == end) + 1)[:-1]


def test_the_document_of_every_id_is_found(corpus):
    path = str(corpus / "train")
    documents, first = CorpusDocuments(open_corpus(path)), 0
    for number, ids in enumerate(documents_of(path)):
        for position in (first, first + len(ids) - 1):
            found = documents.at(position)
            assert (found.document, found.first_token, found.tokens) == (number, first, len(ids))
        first += len(ids)


def test_a_sample_has_its_ids_text_and_documents(inspect, corpus):
    path, length = corpus / "validation", 100
    ids = np.concatenate(documents_of(str(path)))
    number = int(np.flatnonzero(ids == 257)[0]) // length  # the end of a document is in it
    (sample,) = inspect("sample", path, number, "--seq-len", length, "--tokenizer", "bytes")
    expected = ids[number * length : number * length + length + 1].tolist()
    assert sample["tokens"] == expected
    assert sample["text"] == open_tokenizer("bytes").decode(expected)
    assert [d["document"] for d in sample["documents"]] == [0, 1]
    assert sample["documents"][1]["first_token"] == sample["documents"][0]["tokens"]
    without = inspect("sample", path, 0, "--seq-len", length, "--count", 3)
    assert len(without) == 3 and "text" not in without[0]


@pytest.fixture
def packed(tmp_path):
    """A folder of three windows of 4 tokens, in which the first and the last label are ignored."""
    folder, ids = tmp_path / "packed", np.arange(97, 112, dtype=np.int32).reshape(3, 5)
    ids[:, 0] |= BEGINS
    ids[:, [1, 4]] |= UNTRAINED
    with EntryWriter(folder / "shard") as writer:
        for window in ids:
            writer.add(window)
        record = describe_shard(writer.close(), documents=3, max_id=111)
    tokenizer = open_tokenizer("bytes")
    write_corpus_manifest(folder, tokenizer.fingerprint, 258, [record], packed_seq_len=4)
    return folder


def test_a_sample_of_a_packed_corpus_is_a_window(inspect, refusal, packed):
    found = inspect("sample", packed, 1, "--count", 9, "--tokenizer", "bytes")
    assert [sample["text"] for sample in found] == ["fghi", "klmn"]  # the last id is no label
    assert [(s["sample"], s["first_token"], s["ignored_labels"]) for s in found] == [
        (1, 5, 2),
        (2, 10, 2),
    ]
    assert "is packed in windows of 4 tokens" in refusal("sample", packed, 0, "--seq-len", 8)
    assert "there is no sample 3" in refusal("sample", packed, 3)
    message = refusal("search", packed, "f", "--tokenizer", "bytes")
    assert "without packing" in message and "format =" not in message


def test_shards_by_url_are_shown_without_their_documents(inspect, corpus, run_toml):
    """Their indexes are not on this machine."""
    url = f"memory://{corpus}/bucket"
    fsspec.filesystem("memory").put(f"{corpus}/train", url, recursive=True)
    (local,) = inspect("sample", corpus / "train", 3, "--seq-len", 48)
    (remote,) = inspect("sample", url, 3, "--seq-len", 48)
    assert remote["tokens"] == local["tokens"] and "documents" not in remote
    (found,) = inspect("search", url, "import", "--limit", 1, "--tokenizer", "bytes")
    assert found["documents"] == []
    run_toml.write_text(run_toml.read_text().replace(f"{corpus}/train", url))
    (at_position,) = inspect("position", run_toml, 2)
    assert at_position["path"] == url and len(at_position["tokens"]) == 49


def test_a_late_position_of_streamed_text_does_not_tokenize_all_text_before(
    inspect, run_toml, tmp_path, monkeypatch
):
    texts = "".join(json.dumps({"text": f"{n:05} " + "x" * 90}) + "\n" for n in range(900))
    (tmp_path / "texts.jsonl").write_text(texts)
    old = re.search(r'\{ name = "code", path = "[^"]*train" \}', run_toml.read_text())[0]
    new = f'{{ name = "t", path = "{tmp_path}/texts.jsonl", format = "text", lanes = 1 }}'
    run_toml.write_text(run_toml.read_text().replace(old, new))
    stream = open_run_data(str(run_toml)).stream
    stream.read(0, 1200)
    folder = tmp_path / "out"
    progress = {"position": 1184, "tokens": 1184 * 48, "lanes": stream.lane_positions(1184)}
    write_records(folder, run_toml, stream, 148, {"step": 148, **progress})
    expected = inspect("position", run_toml, 1192)
    encoded: list[str] = []
    encode = ByteTokenizer.encode_array
    monkeypatch.setattr(
        ByteTokenizer, "encode_array", lambda self, t: (encoded.append(t), encode(self, t))[1]
    )
    assert inspect("position", folder, 1192) == expected
    assert 0 < len(encoded) < 20
    encoded.clear()
    assert inspect("step", folder, 149)[0]["position"] == 1184
    assert 0 < len(encoded) < 20


def write_records(folder, run_toml, stream, step: int, progress: dict) -> None:
    """The records of a run that has saved a checkpoint after `step`, and taken one more step."""
    folder.mkdir()
    (folder / "config.toml").write_text(run_toml.read_text())
    lines = [{"step": s, "samples": 8 * s} for s in range(1, step + 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = CheckpointManifest(step, progress, stream.properties, {}, "", {}, 0.0, {}, {})
    saved = StorageFolder(folder / "checkpoint" / f"step-{step}")
    saved.create_folder()
    write_checkpoint_manifest(saved, manifest)


def test_a_step_is_the_positions_that_it_consumed(inspect, started_run, run_toml):
    samples = inspect("step", started_run, 2)
    assert [sample["position"] for sample in samples] == list(range(8, 16))
    inputs, labels = open_run_data(str(started_run)).stream.read(8, 8)
    assert [sample["tokens"][:-1] for sample in samples] == inputs.tolist()
    assert [sample["tokens"][1:] for sample in samples] == labels.tolist()
    assert samples == inspect("position", run_toml, 8, "--count", 8)  # before the run starts


def test_the_batch_that_a_guard_dumped_is_shown(inspect, started_run, tmp_path):
    stream = open_run_data(str(started_run)).stream
    path = BatchDump(tmp_path / "guard", stream).write(2, 8, 8)
    keys = ("position", "source", "path", "epoch", "sample", "first_token", "tokens", "text")
    seen = [{key: s[key] for key in keys} for s in inspect("step", started_run, 2)]
    assert inspect("dump", path) == seen


def test_a_text_is_found_in_each_document_that_has_it(inspect, corpus, started_run, monkeypatch):
    monkeypatch.setattr("titanlite_corpus.inspection.search._CHUNK_IDS", 1000)
    wanted, path = "from __future__ import annotations", corpus / "train"
    texts = [bytes(ids[:-1].tolist()).decode() for ids in documents_of(str(path))]
    expected = [n for n, text in enumerate(texts) for _ in range(text.count(wanted))]
    options = ("--limit", 1000, "--tokenizer", "bytes", "--seq-len", 48)
    found = inspect("search", path, wanted, *options)
    assert [match["documents"][0]["document"] for match in found] == expected
    assert all(wanted in match["text"] for match in found)
    sample = found[7]["sample"]
    (shown,) = inspect("sample", path, sample, "--seq-len", 48, "--tokenizer", "bytes")
    assert shown["first_token"] < found[7]["first_token"] <= shown["first_token"] + 48
    in_run = inspect("search", started_run, wanted, "--limit", 3)
    assert [m["first_token"] for m in in_run] == [m["first_token"] for m in found[:3]]
    # the end of a document is not text, so nothing matches across it
    first = next(n for n, text in enumerate(texts) if len(text) > 20 and len(texts[n + 1]) > 20)
    across = texts[first][-20:] + texts[first + 1][:20]
    assert not any(across in text for text in texts)
    assert inspect("search", path, across, *options) == []


def test_what_does_not_exist_is_refused(refusal, corpus, started_run, tmp_path):
    cases = [
        (("sample", corpus / "train", 10**9, "--seq-len", 48), "there is no sample 1000000000"),
        (("sample", corpus / "train", -1, "--seq-len", 48), "there is no sample -1"),
        (("sample", tmp_path / "none", 0), "no such folder or shard"),
        (("sample", corpus / "train", 0, "--count", 0), "--count 0: must be at least 1"),
        (("position", started_run, -1), "position -1"),
        (("position", started_run, 10**30), "there are no such positions"),
        (("position", tmp_path, 0), "has no config.toml"),
        (("step", started_run, 4), "has taken 3 steps; there is no step 4"),
        (("step", started_run / "config.toml", 1), "only a run has steps"),
        (("search", corpus / "train", "x"), "--tokenizer FILE"),
        (("search", started_run, ""), "the text to search for is empty"),
        (("search", started_run, "caf\udce9"), "the text to search for is not UTF-8"),
        (("dump", started_run / "metrics.jsonl"), "is not a batch that the guard wrote"),
        (("dump", tmp_path / "none.json"), "cannot be read"),
    ]
    document = '{"first_token": 0, "shard": "a", "document": 1, "tokens": 2}'
    documents = [document, document, "{}", document, document]  # the third is shown by --full
    for number, field in enumerate(
        (
            *('"documents": [1]', '"documents": [{}]', '"documents": 5', '"text": 5'),
            *('"tokens": 5', f'"first_token": 0, "documents": [{", ".join(documents)}]'),
        )
    ):
        dump = tmp_path / f"dump-{number}.json"
        dump.write_text(f'{{"samples": [{{"position": 1, {field}}}]}}')
        cases.append((("dump", dump), "is not a batch that the guard wrote"))
    for argv, message in cases:
        text = refusal(*argv)
        assert message in text and text.startswith("titanlite: "), (argv, text)


def test_text_of_a_corpus_cannot_control_the_terminal():
    assert printable("a\x1b[2Jb\x07\u202ec\td\né") == "a\\x1b[2Jb\\x07\\x202ec\td\né"
    long = format_sample({"position": 3, "text": "x" * 3000})
    assert len(long) < 500 and "2600 characters" in long
    hostile = {"position": "\x1b]52;c;aGk=\x07", "source": "\x1b", "path": "\x9b2J", "tokens": []}
    assert not any(letter in format_sample(hostile) for letter in "\x1b\x07\x9b")
    assert "\x1b" not in format_error(DataError("\x1b[2J: no such file.", fix="\x1b"))
    shown = format_sample({"position": 3, "tokens": [5, 6], "path": "corpus"})
    assert shown == "position 3\n  corpus\n  | 5 6"
