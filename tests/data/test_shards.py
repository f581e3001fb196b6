"""What was written is what is read, and what is not whole is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from titanlite.data import ShardWriter, open_corpus, verify
from titanlite.data.manifest import write_manifest
from titanlite.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [65_535], [7] * 100, list(range(50))]
FLAT = np.concatenate([np.array(d, dtype=np.int64) for d in DOCUMENTS])
INTEGERS = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


def write(folder: Path, shards=(DOCUMENTS,), vocab_size: int = 65_536, manifest: bool = True):
    records = []
    for number, documents in enumerate(shards):
        with ShardWriter(folder / f"{number:03}", vocab_size) as writer:
            for document in documents:
                writer.add(document)
            records.append(writer.close())
    if manifest:
        write_manifest(folder, "the tokenizer", vocab_size, records)
    return folder


def write_by_hand(prefix: Path, documents, code: int, starts, modes: bytes = b"") -> None:
    """A pair as Megatron's description has it, independent of our writer."""
    ids = [np.array(d, dtype="<" + INTEGERS[code]) for d in documents]
    lengths = [len(d) for d in documents]
    offsets = [sum(lengths[:i]) * ids[0].itemsize for i in range(len(ids))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(ids), len(starts))
    index += struct.pack(f"<{len(ids)}i", *lengths) + struct.pack(f"<{len(ids)}q", *offsets)
    index += struct.pack(f"<{len(starts)}q", *starts) + modes
    prefix.with_suffix(".bin").write_bytes(b"".join(d.tobytes() for d in ids))
    prefix.with_suffix(".idx").write_bytes(index)


@pytest.mark.parametrize("vocab_size, id_bytes", [(65_536, 2), (65_537, 4), (200_000, 4)])
def test_documents_come_back_as_they_were_written(tmp_path, vocab_size, id_bytes):
    corpus = open_corpus(write(tmp_path, vocab_size=vocab_size))
    assert (corpus.tokens, corpus.documents) == (FLAT.size, len(DOCUMENTS))
    assert np.array_equal(corpus.read(0, corpus.tokens), FLAT)
    assert (tmp_path / "000.bin").stat().st_size == id_bytes * FLAT.size
    assert verify(tmp_path).max_id == 65_535


def test_our_shards_are_what_other_readers_of_the_format_expect(tmp_path):
    write(tmp_path)
    write_by_hand(tmp_path / "theirs", DOCUMENTS, 8, range(len(DOCUMENTS) + 1))
    assert (tmp_path / "000.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    assert (tmp_path / "000.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()


@pytest.mark.parametrize("code", INTEGERS)
def test_a_pair_of_any_integer_type_opens_by_prefix_or_file(tmp_path, code):
    last = -1 if INTEGERS[code].startswith("i") else 5  # some readers' padding; to be seen as it is
    documents = [[1, 2, 3], [100], [5] * 8 + [last]]
    write_by_hand(tmp_path / "a", documents, code, range(4))
    for name in ("a", "a.bin", "a.idx", ""):
        corpus = open_corpus(tmp_path / name)
        assert corpus.read(2, 3).tolist() == [3, 100, 5] and corpus.manifest is None
        assert corpus.gather(np.array([11]), 2).tolist() == [[5, last]]


@pytest.mark.parametrize(
    "starts, modes, count",
    [((0, 1, 3), b"", 2), ((), b"", 3), ((0, 1, 2), b"", 3), ((0, 1, 2, 3), b"\0\1\0", 3)],
    ids=["two sequences in one document", "empty", "without its end", "with modes"],
)
def test_a_strange_list_of_documents_does_not_lose_tokens(tmp_path, starts, modes, count):
    write_by_hand(tmp_path / "a", [[1, 2], [3], [4, 5, 6]], 4, starts, modes)
    corpus = open_corpus(tmp_path)
    assert corpus.read(0, corpus.tokens).tolist() == [1, 2, 3, 4, 5, 6]
    assert corpus.documents == count


def test_reading_over_the_edges_of_shards_misses_nothing(tmp_path):
    generator = np.random.default_rng(0)
    shards = [[generator.integers(0, 999, n).tolist()] for n in (5, 1, 40, 0, 3, 17)]
    corpus = open_corpus(write(tmp_path, shards))
    flat = np.concatenate([np.array(s[0], dtype=np.int64) for s in shards])
    assert corpus.tokens == 66
    starts = generator.permutation(np.arange(66 - 12))
    assert np.array_equal(corpus.gather(starts, 12), np.stack([flat[s : s + 12] for s in starts]))
    assert all(np.array_equal(corpus.read(s, 66 - s), flat[s:]) for s in range(66))


def cut(name: str, by: int = 1):
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-by])

    return damage


def lengthen(folder: Path) -> None:
    with open(folder / "000.bin", "ab") as file:
        file.write(b"\0\0")


def overwrite(folder: Path) -> None:
    (folder / "000.idx").write_bytes(b"something else" * 10)


DAMAGES = {
    "cut bin": (cut("000.bin"), "cut short"),
    "cut idx": (cut("001.idx"), "cut short"),
    "only a header": (cut("000.idx", 90), "index|cut short"),
    "longer bin": (lengthen, "too long"),
    "foreign idx": (overwrite, "not a Megatron index|cut short|too long"),
    "no idx": (lambda folder: (folder / "001.idx").unlink(), "missing: 001.idx"),
    "no bin": (lambda folder: (folder / "000.bin").unlink(), "missing: 000.bin"),
}


@pytest.mark.parametrize("manifest", [True, False], ids=["ours", "foreign"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_and_named(tmp_path, damage, manifest):
    act, said = DAMAGES[damage]
    act(write(tmp_path, [DOCUMENTS, DOCUMENTS], manifest=manifest))
    with pytest.raises(DataError, match=said) as refusal:
        open_corpus(tmp_path)
    assert refusal.value.fix and str(tmp_path) in refusal.value.message


def test_a_lost_shard_is_missed(tmp_path):
    write(tmp_path, [DOCUMENTS, DOCUMENTS])
    for end in ("bin", "idx"):
        (tmp_path / f"001.{end}").unlink()
    with pytest.raises(DataError, match="missing: 001.bin, 001.idx"):
        open_corpus(tmp_path)


def test_a_shard_that_came_from_elsewhere_is_not_trained_on(tmp_path):
    write(tmp_path)
    write_by_hand(tmp_path / "zzz", [[1]], 8, (0, 1))
    with pytest.raises(DataError, match="zzz.bin, zzz.idx are not in its manifest"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("name", ["000.bin", "000.idx"])
def test_a_flipped_bit_is_found_by_verify(tmp_path, name):
    path = write(tmp_path) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="not those that were written"):
        verify(tmp_path)


def test_nothing_is_there_of_a_shard_that_was_not_finished(tmp_path):
    with pytest.raises(DataError, match="id 100, outside 0…99"):
        with ShardWriter(tmp_path / "a", 100) as writer:
            writer.add([99])
            writer.add([1, 100])
    assert list(tmp_path.iterdir()) == []


def test_no_text_at_all_is_refused(tmp_path):
    for shards in ([], [[[]]]):
        with pytest.raises(DataError, match="has no .bin|holds no tokens"):
            open_corpus(write(tmp_path, shards))
    with pytest.raises(DataError, match="no such folder"):
        open_corpus(tmp_path / "nowhere")
    write(tmp_path / "corpus" / "train")
    with pytest.raises(DataError, match="Did you mean .*train"):
        open_corpus(tmp_path / "corpus")


def test_the_fingerprint_is_of_the_tokens_and_not_of_the_place(tmp_path):
    for manifest in (True, False):
        prints = []
        for name, last in (("a", DOCUMENTS[-1]), ("b", DOCUMENTS[-1]), ("c", [1] * 50)):
            folder = tmp_path / f"{name}{manifest}"
            write(folder, [[*DOCUMENTS[:-1], last]], manifest=manifest)
            prints.append(open_corpus(folder).fingerprint)
        assert prints[0] == prints[1] != prints[2]


def test_a_torn_manifest_is_not_taken_for_none(tmp_path):
    path = write(tmp_path) / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be understood"):
        open_corpus(tmp_path)
