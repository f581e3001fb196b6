"""Batches: each position gives its tokens, with labels shifted by one, or an error."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from titanlite.data import (
    BatchDump,
    CorpusChecks,
    SampleOrder,
    SourceConfig,
    background,
    open_sample_stream,
    open_tokenizer,
    open_validation,
    prefetch,
)
from titanlite.errors import DataError, UserErrors
from titanlite.labels import IGNORE_INDEX
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest

ROOT = Path(__file__).parents[2]
SEQ_LEN = 16
VOCAB_SIZE = 258
BYTES = open_tokenizer("bytes")


def write_corpus(folder: Path, tokens: int, seed: int = 0, shards: int = 3, fingerprint=None):
    """Write random ids as a folder of shards; returns the ids."""
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, tokens)
    records = []
    for number, part in enumerate(np.array_split(ids, shards)):
        with ShardWriter(folder / f"{number}", VOCAB_SIZE) as writer:
            writer.add(part)
            records.append(writer.close())
    write_corpus_manifest(folder, fingerprint or BYTES.fingerprint, VOCAB_SIZE, records)
    return ids


@pytest.fixture
def mixture(tmp_path):
    sizes = {"a": (700, 0.6), "b": (333, 0.3), "c": (18, 0.1)}
    ids = {n: write_corpus(tmp_path / n, t, i) for i, (n, (t, _)) in enumerate(sizes.items())}
    sources = [SourceConfig(n, str(tmp_path / n), weight) for n, (_, weight) in sizes.items()]
    return sources, ids


def open_mixture(sources, seed: int = 1, vocab_size: int = VOCAB_SIZE, **others):
    return open_sample_stream(sources, seq_len=SEQ_LEN, seed=seed, vocab_size=vocab_size, **others)


def test_a_batch_equals_slices_of_the_sources(mixture):
    sources, ids_of = mixture
    samples = [(len(ids_of[s.name]) - 1) // SEQ_LEN for s in sources]
    order = SampleOrder(1, [(s.name, s.weight, n) for s, n in zip(sources, samples, strict=True)])
    inputs, labels = open_mixture(sources).read(5000, 300)
    for row, (source, _, sample) in enumerate(np.stack(order.sample_at(np.arange(5000, 5300)), 1)):
        ids = ids_of[sources[source].name][sample * SEQ_LEN :][: SEQ_LEN + 1]
        assert inputs[row].tolist() == ids[:-1].tolist()
        assert labels[row].tolist() == ids[1:].tolist()
    assert inputs.dtype == labels.dtype == torch.int64


def test_an_epoch_has_every_token_as_a_label_once_except_the_first_and_the_tail(mixture):
    sources, ids_of = mixture
    stream = open_mixture(sources[:1])
    samples = (len(ids_of["a"]) - 1) // SEQ_LEN
    assert (len(ids_of["a"]) - 1) % SEQ_LEN == 11  # the tail, which is never a label
    labels = torch.cat([stream.read(i, 1)[1] for i in range(samples)]).flatten()
    assert sorted(labels.tolist()) == sorted(ids_of["a"][1 : samples * SEQ_LEN + 1].tolist())


def test_the_slices_of_all_ranks_are_the_batch_of_one_process(mixture):
    stream = open_mixture(mixture[0])
    expected = stream.read(4090, 24)
    for ranks in (2, 3, 24):
        sequences = 24 // ranks
        parts = [stream.read(4090 + rank * sequences, sequences) for rank in range(ranks)]
        for number in (0, 1):
            assert torch.equal(torch.cat([part[number] for part in parts]), expected[number])


@pytest.mark.parametrize("sequences", [1, 2])
def test_inputs_and_labels_share_no_memory(mixture, sequences):
    for reader in (
        open_mixture(mixture[0]),
        open_validation(mixture[0][0], seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE),
    ):
        inputs, labels = reader.read(0, sequences)
        before = inputs.clone()
        labels.fill_(IGNORE_INDEX)
        assert torch.equal(inputs, before)


def test_prefetch_returns_the_requested_batches_in_order(mixture):
    stream = open_mixture(mixture[0])
    slices = [(position, 3) for position in range(0, 60, 7)]
    for ahead in (1, 2, 50):
        batches = list(prefetch(stream.read, iter(slices), ahead))
        for (inputs, labels), (position, sequences) in zip(batches, slices, strict=True):
            assert torch.equal(inputs, stream.read(position, sequences)[0])
            assert torch.equal(labels, stream.read(position, sequences)[1])


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_leaves_no_thread_however_it_ends(mixture):
    stream = open_mixture(mixture[0])
    endless = ((position, 2) for position in range(0, 10**9, 2))
    batches = prefetch(stream.read, endless)
    next(batches)
    assert len(prefetch_threads()) == 1
    batches.close()
    assert prefetch_threads() == []
    list(prefetch(stream.read, [(0, 1)]))
    assert prefetch_threads() == []
    with pytest.raises(ZeroDivisionError):
        for _ in prefetch(stream.read, ((1 // (3 - i), 1) for i in range(9))):
            pass
    assert prefetch_threads() == []


class RacingQueue(SimpleQueue):
    """A queue whose last request is taken by the thread between `empty` and `get`."""

    def empty(self) -> bool:
        return False


def test_closing_a_reader_does_not_wait_for_a_request_that_its_thread_has_taken(monkeypatch):
    """Else a run could hang after its last step."""
    monkeypatch.setattr(background, "SimpleQueue", RacingQueue)
    reader = background.BackgroundReader(lambda position, sequences: position)
    assert reader.submit((7, 1)).result() == 7
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and prefetch_threads() == []


def write_bad_id(folder: Path) -> None:
    """Overwrite token 500 with an id outside the vocabulary."""
    ids = np.memmap(folder / "2.bin", "<u2", mode="r+")
    ids[500 - 467] = 40_000
    ids.flush()


def test_an_id_outside_the_vocabulary_is_an_error_that_names_the_token(mixture):
    sources, ids_of = mixture
    assert sum(len(part) for part in np.array_split(ids_of["a"], 3)[:2]) == 467
    write_bad_id(Path(sources[0].path))
    stream = open_mixture(sources[:1], checks=CorpusChecks(verify="off"))
    good_batches = 0
    with pytest.raises(DataError, match='"a".*token 500 has the id 40000, outside 0…257'):
        for _ in prefetch(stream.read, ((position, 1) for position in range(10**6))):
            good_batches += 1
    assert 0 < good_batches < 43 and prefetch_threads() == []


@pytest.mark.parametrize("tokens", [2, 16, 17, 18, 33, 100])
@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_validation_has_every_token_except_the_first_as_a_label_once(tmp_path, tokens, sequences):
    ids = write_corpus(tmp_path, tokens, shards=2)
    source = SourceConfig("held out", str(tmp_path))
    held_out = open_validation(source, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    assert held_out.name == "held out" and held_out.samples == -(-(tokens - 1) // SEQ_LEN)
    parts = [
        held_out.read(start, sequences)
        for start in range(0, held_out.samples + 2 * sequences, sequences)
    ]
    inputs, labels = (torch.cat(part).flatten() for part in zip(*parts, strict=True))
    has_label = labels != IGNORE_INDEX
    assert labels[has_label].tolist() == ids[1:].tolist()
    assert inputs[has_label].tolist() == ids[:-1].tolist()
    assert has_label[: tokens - 1].all() and inputs.min() >= 0 and inputs.max() < VOCAB_SIZE


def test_shards_of_another_tokenizer_are_refused(tmp_path):
    write_corpus(tmp_path, 100, fingerprint="0123456789abcdef")
    source = SourceConfig("a", str(tmp_path))
    for open_source in (
        lambda: open_mixture([source], tokenizer=BYTES),
        lambda: open_validation(source, seq_len=8, vocab_size=VOCAB_SIZE, tokenizer=BYTES),
    ):
        with pytest.raises(DataError, match="made by the tokenizer 0123456789ab"):
            open_source()
    open_mixture([source])


def test_a_vocabulary_too_small_for_the_shards_is_refused_before_reading(mixture):
    largest = max(mixture[1]["a"])
    with pytest.raises(DataError, match=f"ids up to {largest}, outside 0…{largest - 1}"):
        open_mixture(mixture[0][:1], vocab_size=largest)
    open_mixture(mixture[0][:1], vocab_size=largest + 1)


def test_all_unreadable_sources_are_reported_together(mixture, tmp_path):
    missing = [SourceConfig("x", str(tmp_path / "x")), SourceConfig("y", str(tmp_path / "y"))]
    with pytest.raises(UserErrors) as refusal:
        open_mixture([*missing, mixture[0][0]])
    assert len(refusal.value.problems) == 2
    with pytest.raises(DataError, match="needs its own name"):
        open_mixture([mixture[0][0], mixture[0][0]])


def test_a_source_shorter_than_one_sequence_is_refused(tmp_path):
    write_corpus(tmp_path / "a", SEQ_LEN)
    with pytest.raises(DataError, match="has 16 tokens, but one sample needs 17"):
        open_mixture([SourceConfig("a", str(tmp_path / "a"))])
    write_corpus(tmp_path / "b", 1, shards=1)
    with pytest.raises(DataError, match="has 1 tokens"):
        open_validation(SourceConfig("b", str(tmp_path / "b")), seq_len=8, vocab_size=VOCAB_SIZE)


def test_properties_change_with_the_order_but_not_with_the_folder(mixture, tmp_path):
    sources, _ = mixture
    (tmp_path / "a").rename(tmp_path / "moved")
    moved = [SourceConfig("a", str(tmp_path / "moved"), 0.6), *sources[1:]]
    same = open_mixture(moved).properties
    (tmp_path / "moved").rename(tmp_path / "a")
    assert open_mixture(sources).properties == same
    assert open_mixture(sources, seed=2).properties != same
    assert open_mixture(sources[:2]).properties != same


def test_properties_change_with_content_of_the_same_size(tmp_path):
    """Also in a foreign corpus, without recorded samples."""
    source = SourceConfig("a", str(tmp_path / "a"))
    write_corpus(tmp_path / "a", 150_000, shards=1)
    ids = tmp_path / "a/0.bin"
    recorded = open_mixture([source]).properties["data.content"]
    (tmp_path / "a/manifest.json").unlink()
    assert open_mixture([source]).properties["data.content"] == recorded
    ids.write_bytes(np.random.default_rng(9).integers(0, 99, 150_000).astype("<u2").tobytes())
    assert open_mixture([source]).properties["data.content"] != recorded
    unchecked = open_mixture([source], checks=CorpusChecks(verify="off")).properties
    assert "data.content" not in unchecked  # so a checkpoint is not refused for it


def test_properties_distinguish_weights_that_give_another_order(tmp_path):
    write_corpus(tmp_path / "a", 100 * SEQ_LEN + 1)

    def weights(first: float, second: float) -> list[str]:
        pairs = (("a", first), ("b", second))
        sources = [SourceConfig(name, str(tmp_path / "a"), weight) for name, weight in pairs]
        properties = open_mixture(sources).properties["data.sources"]
        return [fact.split(",")[1].removeprefix(" weight ") for fact in properties.values()]

    assert weights(1 / 3, 1) == ["0.3333333333333333", "1"]
    assert weights(0.333333, 1) == ["0.333333", "1"]


def test_bos_is_detected_and_must_be_the_same_in_all_sources(tmp_path):
    sources = []
    for name, bos in (("with", True), ("without", False)):
        with ShardWriter(tmp_path / name / "0", VOCAB_SIZE) as writer:
            for _ in range(3):
                writer.add([BYTES.bos_id] * bos + [5] * 40 + [BYTES.eos_id])
            record = writer.close()
        sources.append(SourceConfig(name, str(tmp_path / name)))
        for manifest in (False, True):  # without one, the first id decides
            if manifest:
                made_by = (BYTES.fingerprint, VOCAB_SIZE)
                write_corpus_manifest(tmp_path / name, *made_by, [record], bos=bos)
            stream = open_mixture(sources[-1:], tokenizer=BYTES)
            assert stream.bos == stream.properties["data.bos"] == bos
    with pytest.raises(DataError, match="begin with BOS in with, and not in without"):
        open_mixture(sources, tokenizer=BYTES)


def test_a_written_batch_says_where_each_sample_is_from(mixture, tmp_path, monkeypatch):
    sources, ids = mixture
    stream = open_mixture(sources, tokenizer=BYTES)
    dump = BatchDump(tmp_path / "guard", stream)
    monkeypatch.setattr("titanlite.data.dump.MAX_TOKENS", 6 * SEQ_LEN)
    path = dump.write(7, 100, 8)
    assert path == str(tmp_path / "guard" / "step-7.json")
    samples = json.loads(Path(path).read_text())["samples"]
    assert [sample["position"] for sample in samples] == list(range(100, 108))
    for sample in samples[:6]:
        first = sample["first_token"]
        assert sample["tokens"] == ids[sample["source"]][first : first + SEQ_LEN + 1].tolist()
        assert sample["text"] == BYTES.decode(sample["tokens"])
    assert all("tokens" not in sample for sample in samples[6:])
    monkeypatch.setattr("titanlite.data.dump.MAX_FILES", 1)
    assert dump.write(7, 100, 8) == path and dump.write(8, 108, 8) == ""


def test_a_batch_that_cannot_be_written_does_not_end_the_run(mixture, tmp_path):
    (tmp_path / "guard").write_text("a file")
    assert BatchDump(tmp_path / "guard", open_mixture(mixture[0])).write(7, 100, 8) == ""
