"""Packed corpora: what is in the windows, and what a run reads of them."""

from __future__ import annotations

import json
from itertools import pairwise, repeat
from pathlib import Path

import numpy as np
import pytest
import torch

from titanlite.data import (
    SampleStream,
    SourceConfig,
    open_corpus,
    open_sample_stream,
    open_token_source,
    open_validation,
    prefetch,
    rank_slices,
)
from titanlite.errors import DataError
from titanlite.kernels.backend import set_attention_kernel
from titanlite.kernels.documents import document_positions, index_documents
from titanlite.labels import DOCUMENT_END, IGNORE_INDEX
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.packing.windows import PackSettings, count_truncated, pack_shard
from titanlite_corpus.pipeline import make_corpus
from titanlite_corpus.recipe import load_recipe
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest
from titanlite_corpus.summary import summarise_corpus

SEQ_LEN, PADDING, DOCUMENTS = 32, 0, 300
END = 1  # an id that ends no document here
VOCAB_SIZE = 16_384


def document_lengths(seed: int = 0) -> list[int]:
    """Of DOCUMENTS documents: some of one id, many short ones, a few of several windows."""
    draw = np.random.default_rng(seed)
    return np.clip(np.exp(draw.normal(2.8, 1.0, DOCUMENTS)), 1, None).astype(int).tolist()


def write_shard(prefix: Path, lengths: list[int], first_id: int) -> None:
    """Documents whose ids count up, and skip one between documents, so that each occurs once."""
    with ShardWriter(prefix, VOCAB_SIZE) as writer:
        for length in lengths:
            writer.add(np.arange(first_id, first_id + length))
            first_id += length + 1
        writer.close()


def write_manifest(folder: Path, records: list, packed_seq_len: int = SEQ_LEN) -> None:
    write_corpus_manifest(folder, "counted", VOCAB_SIZE, records, packed_seq_len=packed_seq_len)


@pytest.fixture
def packed(tmp_path) -> tuple[Path, list[int], dict]:
    """A packed corpus, the lengths of its documents, and the counts of packing."""
    lengths = document_lengths()
    write_shard(tmp_path / "unpacked", lengths, first_id=2)
    settings = PackSettings(SEQ_LEN, PADDING)
    record, counts = pack_shard(tmp_path / "unpacked", tmp_path / "packed" / "0", settings)
    write_manifest(tmp_path / "packed", [record])
    return tmp_path / "packed", lengths, counts


def open_packed_stream(path: Path, *more: SourceConfig, seq_len: int = SEQ_LEN) -> SampleStream:
    sources = [SourceConfig("packed", str(path), format="packed"), *more]
    return open_sample_stream(sources, seq_len=seq_len, seed=1, vocab_size=VOCAB_SIZE)


def test_an_epoch_has_every_id_but_the_first_of_each_document_once_as_a_label(packed):
    path, lengths, counts = packed
    inputs, labels = open_packed_stream(path).read(0, counts["windows"])
    valid = labels >= 0
    assert (labels[valid] == inputs[valid] + 1).all()  # so each follows its own predecessor
    firsts = 2 + np.cumsum([0, *lengths[:-1]]) + np.arange(DOCUMENTS)
    expected = [
        first + n for first, length in zip(firsts, lengths, strict=True) for n in range(1, length)
    ]
    assert sorted(labels[valid].tolist()) == expected
    assert len(expected) == counts["labels"] - counts["labels_ignored"]
    assert sum(length > SEQ_LEN + 1 for length in lengths) == counts["documents_truncated"] > 5


def test_positions_restart_at_each_document_and_not_at_an_id_inside_of_one(packed):
    path, _, counts = packed
    inputs, labels = open_packed_stream(path).read(0, counts["windows"])
    several = int((labels == DOCUMENT_END).sum(1).argmax())
    for end in (END, int(inputs[several, 1])):
        positions = document_positions(inputs, end, labels)
        follows = inputs[:, 1:] == inputs[:, :-1] + 1
        is_padding = inputs == PADDING
        expected = torch.zeros_like(positions)
        for t in range(1, SEQ_LEN):
            same = follows[:, t - 1] | is_padding[:, t] & is_padding[:, t - 1]
            expected[:, t] = torch.where(same, expected[:, t - 1] + 1, 0)
        assert torch.equal(positions, expected)


def test_the_end_id_inside_of_a_document_that_fills_its_window_does_not_divide_it(tmp_path):
    whole, part = SEQ_LEN + 1, SEQ_LEN // 2
    document = np.arange(2, 2 + 2 * SEQ_LEN + part)  # two windows and a part
    places = [5, 9, whole, 2 * SEQ_LEN]  # the last is the first id of the part
    document[places] = PADDING
    with ShardWriter(tmp_path / "unpacked", VOCAB_SIZE) as writer:
        writer.add(document)
        writer.add(np.arange(500, 500 + whole))  # without an end inside: every label is trained
        writer.add(np.array([*range(700, 699 + whole), PADDING]))  # the end as the last label
        writer.add(np.array([*range(800, 798 + whole), PADDING, 900]))  # and as the last input
        writer.close()
    settings = PackSettings(SEQ_LEN, PADDING)
    record, counts = pack_shard(tmp_path / "unpacked", tmp_path / "packed/0", settings)
    write_manifest(tmp_path / "packed", [record])
    inputs, labels = open_packed_stream(tmp_path / "packed").read(0, counts["windows"])
    positions = document_positions(inputs, PADDING, labels)
    full = (labels != DOCUMENT_END).all(1)
    assert full.sum() == 5 and (positions[full] == torch.arange(SEQ_LEN)).all()
    ignored = (labels[full] < 0).sum(1)
    assert sorted(ignored.tolist()) == [0, 0, 0, 1, 1]
    # the label after the first end in the window: what follows an end is not trained elsewhere
    followed = inputs[full].gather(1, (labels[full] < 0).int().argmax(1, keepdim=True))[ignored > 0]
    assert (followed == PADDING).all()
    assert counts["labels"] - counts["labels_ignored"] == int((labels >= 0).sum())
    _, counts = pack_shard(tmp_path / "unpacked", tmp_path / "one/0", PackSettings(1, PADDING))
    assert counts["labels_ignored"] == 0  # no end is inside of a window of one input


def test_changing_one_document_changes_no_logits_of_another_in_its_window(packed):
    path, _, counts = packed
    inputs, labels = open_packed_stream(path).read(0, counts["windows"])
    row = int((labels == DOCUMENT_END).sum(1).argmax())  # most documents
    inputs, labels = inputs[row : row + 1] % 61, labels[row : row + 1]
    bounds = [0, *((labels[0] == DOCUMENT_END).nonzero().flatten() + 1).tolist(), SEQ_LEN]
    assert len(bounds) > 4
    family = FAMILIES["llama3"]
    torch.manual_seed(0)
    sizes = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
    model = family.build(sizes)
    set_attention_kernel(model, family.attention_pattern, "flash", True)
    positions = document_positions(inputs, END, labels)
    documents = index_documents(positions)
    before = model(inputs, positions, documents=documents)
    for first, end in pairwise(bounds):
        changed = inputs.clone()
        changed[0, first:end] = (inputs[0, first:end] + 7) % 61
        after = model(changed, positions, documents=documents)
        same = (before == after).all(-1)[0]
        assert same[:first].all() and same[end:].all() and not same[first:end].any()
        assert (positions[0, first:end] == torch.arange(end - first)).all()


def test_every_split_over_ranks_and_every_start_reads_the_same_samples(packed):
    path, _, _ = packed
    stream = open_packed_stream(path)
    inputs, labels = stream.read(8, 16)
    for ranks in (1, 2, 4):
        slices = [rank_slices(8, repeat(8), rank, ranks) for rank in range(ranks)]
        batches = [prefetch(stream.read, of_rank) for of_rank in slices]
        parts = [[next(of_rank) for _ in range(2)] for of_rank in batches]
        ordered = [part for step in zip(*parts, strict=True) for part in step]
        assert torch.equal(torch.cat([part[0] for part in ordered]), inputs)
        assert torch.equal(torch.cat([part[1] for part in ordered]), labels)


def test_a_packed_source_mixes_with_a_concatenated_one(packed, tmp_path):
    path, _, _ = packed
    write_shard(tmp_path / "plain" / "0", [400], first_id=2)
    stream = open_packed_stream(path, SourceConfig("plain", str(tmp_path / "plain")))
    inputs, labels = stream.read(0, 64)
    sources = [sample["source"] for sample in stream.locate(0, 64)]
    plain = torch.tensor([source == "plain" for source in sources])
    assert 0 < plain.sum() < 64
    assert (labels[plain] == inputs[plain] + 1).all() and (labels[~plain] < 0).any()
    files = {
        "packed": open_token_source("packed", str(path)),
        "plain": open_corpus(tmp_path / "plain"),
    }
    for row, sample in enumerate(stream.locate(0, 64)):
        first = np.array([sample["first_token"]])
        assert files[sample["source"]].gather(first, 1)[0, 0] == inputs[row, 0]


def test_a_validation_set_has_each_window_once_in_order(packed):
    path, _, counts = packed
    source = SourceConfig("held out", str(path), format="packed")
    held_out = open_validation(source, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE)
    assert held_out.samples == counts["windows"]
    inputs, labels = held_out.read(counts["windows"] - 2, 4)
    assert inputs.shape == labels.shape == (4, SEQ_LEN)
    assert (labels[:2] >= 0).any(1).all() and (labels[2:] == IGNORE_INDEX).all()
    assert (labels >= 0).sum() and (inputs >= 0).all()


def test_another_seq_len_and_another_format_are_refused(packed, tmp_path):
    path, _, _ = packed
    with pytest.raises(DataError, match="windows of 32 tokens, but training.seq_len = 64") as error:
        open_packed_stream(path, seq_len=64)
    assert "training.seq_len = 32" in error.value.fix
    source = SourceConfig("held out", str(path), format="packed")
    with pytest.raises(DataError, match="but validation.seq_len = 16"):
        open_validation(source, seq_len=16, vocab_size=VOCAB_SIZE)
    with pytest.raises(DataError, match="windows of 32 tokens") as error:
        open_corpus(path)
    assert 'format = "packed"' in error.value.fix
    write_shard(tmp_path / "plain" / "0", [400], first_id=2)
    with pytest.raises(DataError, match="are not packed"):
        open_packed_stream(tmp_path / "plain")


def test_a_damaged_window_is_found(packed):
    path, _, _ = packed
    content = bytearray((path / "0.bin").read_bytes())
    content[100] ^= 1
    (path / "0.bin").write_bytes(content)
    with pytest.raises(DataError, match="damaged or replaced"):
        open_packed_stream(path)


def test_packing_wastes_and_truncates_less_than_concatenation(packed):
    _, lengths, counts = packed
    assert counts["padding"] < 0.01 * counts["labels"]
    assert counts["padding"] == counts["windows"] * (SEQ_LEN + 1) - counts["tokens_out"]
    documents, first = 0, 0
    for length in lengths:  # those with labels in two samples
        samples = {(first + i) // SEQ_LEN for i in range(length - 1)}
        documents, first = documents + (len(samples) > 1), first + length
    assert count_truncated(np.array(lengths), SEQ_LEN) == documents
    assert counts["documents_truncated_if_concatenated"] == documents
    assert counts["documents_truncated"] < 0.6 * documents


def test_a_recipe_packs_text_or_counts_what_concatenation_truncates(tmp_path):
    lines = [json.dumps({"text": "x" * length}) for length in document_lengths()]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    counts, sides, summaries = {}, {}, {}
    for mode in ("concatenate", "best_fit"):
        recipe = f"""
            out = "{tmp_path / mode}"
            tokenizer = "bytes"
            validation_share = 0.2
            [[sources]]
            name = "text"
            inputs = ["{tmp_path / "text.jsonl"}"]
            [pack]
            mode = "{mode}"
            seq_len = {SEQ_LEN}
        """
        (tmp_path / "recipe.toml").write_text(recipe)
        result = make_corpus(load_recipe(tmp_path / "recipe.toml"), LocalEngine(workers=1))
        counts[mode], summaries[mode] = result.stages["pack"], summarise_corpus(result, tmp_path)
        sides[mode] = [
            open_token_source(format, str(tmp_path / mode / "text" / side))
            for side, format in (
                ("train", "packed" if mode == "best_fit" else "megatron"),
                ("validation", "megatron"),  # every token counts, with any seq_len
            )
        ]
    plain, packed = counts["concatenate"], counts["best_fit"]
    assert plain["documents_truncated"] == packed["documents_truncated_if_concatenated"]
    assert packed["documents_truncated"] < plain["documents_truncated"]
    assert f"{plain['documents_truncated']:,} truncated" in summaries["concatenate"]
    assert "% padding" in summaries["best_fit"]
    (train, held_out), (windows, packed_held_out) = sides["concatenate"], sides["best_fit"]
    assert held_out.fingerprint == packed_held_out.fingerprint
    assert train.packed_seq_len is None and windows.packed_seq_len == SEQ_LEN
