"""Text that is tokenized while it is read: the same samples whatever ranks read them, once each."""

from __future__ import annotations

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch

from titanlite.data import (
    MixtureConfig,
    SourceConfig,
    lanes,
    merge_positions,
    open_sample_stream,
    open_tokenizer,
    open_validation,
    text_source,
    validation_set,
)
from titanlite.data.lanes import DocumentNode, TextUnit, assign_units_to_lanes, divide_files
from titanlite.data.text_source import TextSource
from titanlite.data.token_source import CorpusChecks
from titanlite.errors import CheckpointError, DataError
from titanlite_corpus.prepare import PrepareSettings, prepare_corpus

BYTES = open_tokenizer("bytes")
SEQ_LEN, LANES, END = 16, 3, BYTES.eos_id


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """Files of different kinds with 300 documents of 1 to 80 bytes, in units of about 400 bytes."""
    monkeypatch.setattr(lanes, "_MIN_UNIT_BYTES", 400)
    random = np.random.default_rng(0)
    documents = [f"{n:03}" + "x" * int(random.integers(0, 78)) for n in range(300)]
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in documents]
    (folder / "a.jsonl").write_text("".join(lines[:200]))
    with pyarrow.CompressedOutputStream(str(folder / "b.jsonl.zst"), "zstd") as file:
        file.write("".join(lines[200:299]).encode())
    (folder / "c.txt").write_text(documents[299])
    return folder


def open_texts(texts: Path, encoded: list[str] | None = None, **changes):
    """The source, whose encoder notes the documents in `encoded`."""

    def encode(text: str) -> np.ndarray:
        if encoded is not None:
            encoded.append(text)
        return np.array([*BYTES.encode(text), END])

    options = {"lanes": LANES, "sample_ids": SEQ_LEN + 1, "seed": "1", **changes}
    return TextSource(str(texts), encode=encode, checks=CorpusChecks(), **options)


def documents_of(source: TextSource, lane: int, samples: int) -> list[str]:
    """The complete documents in the first samples of a lane."""
    numbers = np.arange(samples) * LANES + lane
    windows = source.read(numbers)
    assert np.array_equal(windows[1:, 0], windows[:-1, -1])  # each begins with the last id
    ids = [*windows[:, :-1].flatten().tolist(), int(windows[-1, -1])]
    text = "".join("|" if id == END else chr(id) for id in ids)
    return text.split("|")[:-1]


def test_an_epoch_of_all_lanes_has_every_document_once(texts):
    found = [documents_of(open_texts(texts), lane, 1200) for lane in range(LANES)]
    sizes = []
    first_epochs = []
    for documents in found:
        size = next(n for n, text in enumerate(documents) if text in documents[:n])
        sizes.append(sum(map(len, documents[:size])))
        first_epochs += documents[:size]
        assert sorted(documents[:size]) == sorted(documents[size : 2 * size])
        assert documents[:size] != documents[size : 2 * size]  # the units have another order
    assert sorted(text[:3] for text in first_epochs) == [f"{n:03}" for n in range(300)]
    assert max(sizes) < 2 * min(sizes)  # the size of compressed text is estimated


def test_the_order_of_a_lanes_units_is_computed_once_an_epoch(monkeypatch):
    sorted_units, sort = [], np.argsort
    monkeypatch.setattr(np, "argsort", lambda a, **o: sorted_units.append(len(a)) or sort(a, **o))
    units = [SimpleNamespace(documents=lambda: iter(["text"])) for _ in range(100)]
    node = DocumentNode(units, np.zeros(1, np.uint64), np.array, "a source")
    node.reset()
    for _ in range(2 * len(units) + 1):
        next(node)
    assert sorted_units == [100] * 3


@pytest.mark.parametrize("bos", [False, True])
def test_a_document_has_the_ids_that_prepared_shards_have(bos):
    text = "na\u00efve \U0001f600"
    begin = [BYTES.bos_id] if bos else []
    ids = text_source.document_encoder(BYTES, bos)(text)
    assert ids.tolist() == [*begin, *BYTES.encode(text), END] and ids.dtype == np.int64
    assert text_source.document_encoder(BYTES, bos)("").tolist() == [*begin, END]


def test_samples_do_not_depend_on_the_order_in_which_they_are_read(texts):
    expected = open_texts(texts).read(np.arange(900))
    source, numbers = open_texts(texts), np.random.default_rng(1).permutation(900)[:200]
    for part in np.array_split(numbers, 20):
        assert np.array_equal(source.read(part), expected[part])


STREAM = {"seq_len": SEQ_LEN, "seed": 5, "vocab_size": 258, "tokenizer": BYTES}


def open_mixed(texts: Path, **changes):
    sources = [
        SourceConfig("a", str(texts / "*.jsonl*"), 0.6, "text", lanes=4),
        SourceConfig("b", str(texts), 0.4, "text", lanes=2),
    ]
    return open_sample_stream(sources, **{**STREAM, **changes})


def test_a_stream_stopped_at_2_ranks_goes_on_at_4_and_1_with_the_same_samples(texts):
    batch, steps, expected = 8, 9, open_mixed(texts).read(0, 72)
    position, lanes, parts = 0, None, []
    for ranks in (2, 4, 1):
        streams = [open_mixed(texts) for _ in range(ranks)]
        for stream in streams:
            if lanes is not None:
                stream.restore_lanes(lanes)
        for _ in range(steps // 3):
            own = batch // ranks
            for rank, stream in enumerate(streams):
                parts.append(stream.read(position + rank * own, own)[1])
                stream.read(position + batch + rank * own, own)  # ahead of the step
            position += batch
        positions = [stream.lane_positions(position) for stream in streams]
        lanes = json.loads(json.dumps(merge_positions(positions)))
    labels = np.concatenate([part.numpy() for part in parts])
    assert np.array_equal(labels, expected[1].numpy())


def test_resuming_tokenizes_only_the_documents_from_there_on(texts):
    encoded: list[str] = []
    source = open_texts(texts, encoded)
    expected = source.read(np.arange(1200))[900:]
    positions = source.positions(1200 - 300)
    encoded.clear()
    resumed = open_texts(texts, encoded)
    resumed.restore(json.loads(json.dumps(positions)))
    assert np.array_equal(resumed.read(np.arange(900, 1200)), expected)
    assert sum(map(len, encoded)) < 1.2 * 300 * SEQ_LEN + LANES * 80


def test_going_back_a_few_batches_and_to_the_start_gives_the_same_samples(texts):
    source = open_texts(texts)
    expected = source.read(np.arange(600))
    for numbers in (np.arange(500, 560), np.arange(30), np.arange(570, 600)):
        assert np.array_equal(source.read(numbers), expected[numbers])


def test_a_dump_does_not_tokenize_from_the_start(texts, monkeypatch):
    """Of lanes that another rank reads, this one knows only where they were at the last start."""
    monkeypatch.setattr(text_source, "_NEAR_SAMPLES", 3)
    stream = open_mixed(texts)
    assert stream.count_near(0, 8) == 8
    assert stream.count_near(400, 8) == 0
    stream.read(400, 5)
    assert stream.count_near(400, 5) == 5


def test_files_that_cannot_be_divided_are_assigned_by_document():
    class Part:
        path, bytes = "web.jsonl.zst", 5 << 20

        def split(self, limit):
            return [self]

    units = divide_files([Part()], 4)  # type: ignore[list-item]
    assert [(unit.first, unit.stride) for unit in units] == [(n, 4) for n in range(4)]
    assert [len(lane) for lane in assign_units_to_lanes(units, 4)] == [1, 1, 1, 1]
    assert isinstance(units[0], TextUnit)


class WithoutSize(SimpleHTTPRequestHandler):
    """A server that does not say how large a file is."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length":
            super().send_header(keyword, value)


def test_text_from_a_server_that_gives_no_size_is_read(texts):
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(WithoutSize, directory=texts)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        source = open_texts(f"http://127.0.0.1:{server.server_port}/b.jsonl.zst", lanes=1)
        ids = source.read(np.arange(20))
        server.shutdown()
    assert (ids == open_texts(texts / "b.jsonl.zst", lanes=1).read(np.arange(20))).all()


class WithoutBos(type(BYTES)):
    has_bos = False


def test_what_a_text_source_cannot_do_is_refused(texts, tmp_path):
    def refuse(match: str, tokenizer=BYTES, mixture=None, **changes) -> None:
        source = SourceConfig("a", str(texts), format="text", **changes)
        with pytest.raises(DataError, match=match):
            open_sample_stream([source], **{**STREAM, "tokenizer": tokenizer}, mixture=mixture)

    refuse("needs a tokenizer", tokenizer=None)
    refuse("need prepared shards", max_epochs=2.0)
    refuse("need prepared shards", shuffle=False)
    refuse("tokenizer has no BOS", bos=True, tokenizer=WithoutBos())
    refuse("size of the source", mixture=MixtureConfig(temperature=2.0))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="contains no text"):
        open_texts(tmp_path / "empty.txt")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n' * 9)
    with pytest.raises(DataError, match="has no document"):
        open_texts(tmp_path / "blank.jsonl").read(np.arange(1))


@pytest.mark.parametrize("bos", [False, True])
def test_a_validation_set_of_text_has_the_samples_of_prepared_shards(texts, tmp_path, bos):
    prepare_corpus([texts], BYTES, tmp_path / "out", PrepareSettings(validation_share=0, bos=bos))
    options = {"seq_len": SEQ_LEN, "vocab_size": 258, "tokenizer": BYTES}
    stored = open_validation(SourceConfig("a", str(tmp_path / "out/train")), **options)
    text = open_validation(SourceConfig("a", str(texts), format="text", bos=bos), **options)
    assert (text.samples, text.bos, text.name) == (stored.samples, bos, "a")
    for start in (0, 5, stored.samples - 2):  # the last ones are past the end
        for found, expected in zip(text.read(start, 7), stored.read(start, 7), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(text.token_bytes, stored.token_bytes)


def test_opening_a_validation_set_allocates_no_table_of_the_vocabulary(texts):
    """The size of an unknown model is checked as 2^31 ids: a table of them would take 17 GB."""
    source = SourceConfig("a", str(texts), format="text")
    opened = open_validation(source, seq_len=SEQ_LEN, vocab_size=1 << 50, tokenizer=BYTES)
    assert opened.samples


def test_a_validation_set_of_text_that_cannot_be_used_is_refused(texts, tmp_path, monkeypatch):
    def refuse(match: str, path=texts, tokenizer=BYTES, vocab_size=258, **changes) -> None:
        source = SourceConfig("a", str(path), format="text", **changes)
        with pytest.raises(DataError, match=match):
            open_validation(source, seq_len=8, vocab_size=vocab_size, tokenizer=tokenizer)

    refuse("needs a tokenizer", tokenizer=None)
    refuse("tokenizer has no BOS", bos=True, tokenizer=WithoutBos())
    refuse("outside 0…99", vocab_size=100)
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n' * 9)
    refuse("contains no text", tmp_path / "blank.jsonl")
    (tmp_path / "broken.jsonl").write_text("{")
    refuse("broken.jsonl", tmp_path / "broken.jsonl")
    refuse("no such", tmp_path / "nowhere.jsonl")
    monkeypatch.setattr(validation_set, "MAX_TEXT_BYTES", 9000)
    refuse("more than 0 MiB of text", texts)


def test_other_files_or_lanes_change_what_a_checkpoint_records(texts):
    before = open_texts(texts)
    assert open_texts(texts, lanes=2).fingerprint != before.fingerprint
    content = (texts / "c.txt").read_text()
    (texts / "c.txt").write_text(content[::-1])
    changed = open_texts(texts)
    assert changed.fingerprint == before.fingerprint
    assert changed.content_sample != before.content_sample


def test_a_state_that_is_not_valid_is_refused(texts):
    good = open_texts(texts).positions(30)
    for bad in ({"0": [1]}, {"0": [-1, good["0"][1]]}, {"0": [1, {"epoch": 0}]}, {"0": "x"}):
        with pytest.raises(CheckpointError, match="lane 0 of a text source is not valid"):
            open_texts(texts).restore(bad)
