"""Shards: what is written is read back, and incomplete or damaged shards are refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from titanlite.data import CorpusChecks, open_corpus, verify_corpus
from titanlite.errors import DataError
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [[1, 2, 3], [], [65_535], [7] * 100, list(range(50))]
FLAT = np.concatenate([np.array(d, dtype=np.int64) for d in DOCUMENTS])
INTEGERS = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


def write_shards(
    folder: Path, shards=(DOCUMENTS,), vocab_size: int = 65_536, manifest: bool = True
):
    records = []
    for number, documents in enumerate(shards):
        with ShardWriter(folder / f"{number:03}", vocab_size) as writer:
            for document in documents:
                writer.add(document)
            records.append(writer.close())
    if manifest:
        write_corpus_manifest(folder, "the tokenizer", vocab_size, records)
    return folder


def write_by_hand(prefix: Path, documents, code: int, starts, modes: bytes = b"") -> None:
    """Write a shard as Megatron documents it, without ShardWriter."""
    ids = [np.array(d, dtype="<" + INTEGERS[code]) for d in documents]
    lengths = [len(d) for d in documents]
    offsets = [sum(lengths[:i]) * ids[0].itemsize for i in range(len(ids))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(ids), len(starts))
    index += struct.pack(f"<{len(ids)}i", *lengths) + struct.pack(f"<{len(ids)}q", *offsets)
    index += struct.pack(f"<{len(starts)}q", *starts) + modes
    prefix.with_suffix(".bin").write_bytes(b"".join(d.tobytes() for d in ids))
    prefix.with_suffix(".idx").write_bytes(index)


@pytest.mark.parametrize("vocab_size, id_bytes", [(65_536, 2), (65_537, 4), (200_000, 4)])
def test_documents_are_read_back_unchanged(tmp_path, vocab_size, id_bytes):
    corpus = open_corpus(write_shards(tmp_path, vocab_size=vocab_size))
    assert corpus.tokens == FLAT.size
    assert np.array_equal(corpus.read(0, corpus.tokens), FLAT)
    assert (tmp_path / "000.bin").stat().st_size == id_bytes * FLAT.size
    assert verify_corpus(tmp_path).max_id == 65_535


def test_shards_have_the_bytes_that_megatron_readers_expect(tmp_path):
    write_shards(tmp_path)
    write_by_hand(tmp_path / "expected", DOCUMENTS, 8, range(len(DOCUMENTS) + 1))
    assert (tmp_path / "000.idx").read_bytes() == (tmp_path / "expected.idx").read_bytes()
    assert (tmp_path / "000.bin").read_bytes() == (tmp_path / "expected.bin").read_bytes()


@pytest.mark.parametrize("code", INTEGERS)
def test_a_shard_of_any_integer_type_opens_by_prefix_or_file(tmp_path, code):
    last = (
        -1 if INTEGERS[code].startswith("i") else 5
    )  # -1: some writers' padding, which is not changed here
    documents = [[1, 2, 3], [100], [5] * 8 + [last]]
    write_by_hand(tmp_path / "a", documents, code, range(4))
    for name in ("a", "a.bin", "a.idx", ""):
        corpus = open_corpus(tmp_path / name)
        assert corpus.read(2, 3).tolist() == [3, 100, 5] and corpus.manifest is None
        assert corpus.gather(np.array([11]), 2).tolist() == [[5, last]]


@pytest.mark.parametrize(
    "starts",
    [(0, 1, 3), (), (0, 1, 2)],
    ids=["two sequences in one document", "empty", "without its end"],
)
def test_an_invalid_list_of_documents_does_not_lose_tokens(tmp_path, starts):
    write_by_hand(tmp_path / "a", [[1, 2], [3], [4, 5, 6]], 4, starts)
    corpus = open_corpus(tmp_path)
    assert corpus.read(0, corpus.tokens).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_multimodal_index_is_refused(tmp_path):
    write_by_hand(tmp_path / "a", [[1, 2], [3], [4, 5, 6]], 4, range(4), modes=b"\0\1\0")
    with pytest.raises(DataError, match=r"a\.idx: is a multimodal Megatron index: 3 bytes"):
        open_corpus(tmp_path)


def test_reads_across_shard_boundaries_lose_no_tokens(tmp_path):
    generator = np.random.default_rng(0)
    shards = [[generator.integers(0, 999, n).tolist()] for n in (5, 1, 40, 0, 3, 17)]
    corpus = open_corpus(write_shards(tmp_path, shards))
    flat = np.concatenate([np.array(s[0], dtype=np.int64) for s in shards])
    assert corpus.tokens == 66
    starts = generator.permutation(np.arange(66 - 12))
    assert np.array_equal(corpus.gather(starts, 12), np.stack([flat[s : s + 12] for s in starts]))
    assert all(np.array_equal(corpus.read(s, 66 - s), flat[s:]) for s in range(66))


def truncate(name: str, by: int = 1):
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
    "truncated bin": (truncate("000.bin"), "is truncated"),
    "truncated idx": (truncate("001.idx"), "is truncated"),
    "only a header": (truncate("000.idx", 90), "index|is truncated"),
    "longer bin": (lengthen, "too long"),
    "foreign idx": (overwrite, "not a Megatron index|is truncated|too long"),
    "no idx": (lambda folder: (folder / "001.idx").unlink(), "missing: 001.idx"),
    "no bin": (lambda folder: (folder / "000.bin").unlink(), "missing: 000.bin"),
}


@pytest.mark.parametrize("manifest", [True, False], ids=["with manifest", "without"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_and_named(tmp_path, damage, manifest):
    apply, message = DAMAGES[damage]
    apply(write_shards(tmp_path, [DOCUMENTS, DOCUMENTS], manifest=manifest))
    with pytest.raises(DataError, match=message) as refusal:
        open_corpus(tmp_path)
    assert refusal.value.fix and str(tmp_path) in refusal.value.message


def test_a_missing_shard_is_refused_and_named(tmp_path):
    write_shards(tmp_path, [DOCUMENTS, DOCUMENTS])
    for end in ("bin", "idx"):
        (tmp_path / f"001.{end}").unlink()
    with pytest.raises(DataError, match="missing: 001.bin, 001.idx"):
        open_corpus(tmp_path)


def test_a_shard_that_is_not_in_the_manifest_is_refused(tmp_path):
    write_shards(tmp_path)
    write_by_hand(tmp_path / "zzz", [[1]], 8, (0, 1))
    with pytest.raises(DataError, match="zzz.bin, zzz.idx are not in its manifest"):
        open_corpus(tmp_path)


def test_a_shard_overwritten_at_its_size_is_refused_when_it_is_opened(tmp_path):
    write_shards(tmp_path, [DOCUMENTS, [list(range(40_000))]])
    ids = np.fromfile(tmp_path / "001.bin", "<u2")
    ids[::-1].tofile(tmp_path / "001.bin")
    with pytest.raises(DataError, match="001.bin: its bytes differ from those that were written"):
        open_corpus(tmp_path)
    open_corpus(tmp_path, CorpusChecks(verify="off"))


def test_full_verification_finds_one_flipped_bit_and_is_divided_among_ranks(tmp_path):
    write_shards(tmp_path, [[list(range(60_000))] for _ in range(3)])
    ids = np.fromfile(tmp_path / "001.bin", "<u2")
    changed = 0
    while True:  # search a byte that is not sampled
        ids[changed] ^= 1
        ids.tofile(tmp_path / "001.bin")
        try:
            open_corpus(tmp_path)
            break
        except DataError:
            ids[changed] ^= 1
            changed += 2048
    refused = []
    for rank in range(3):
        try:
            open_corpus(tmp_path, CorpusChecks(verify="full", verify_slice=(rank, 3)))
        except DataError as error:
            assert "001: its bytes differ" in error.message
            refused.append(rank)
    assert refused == [1]
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match="nothing to compare it with"):
        open_corpus(tmp_path, CorpusChecks(verify="full"))


def test_a_shard_truncated_during_a_run_is_an_error_not_a_sigbus(tmp_path):
    for number in range(2):
        write_shards(tmp_path / f"{number}", [[list(range(5000))]])
    opened, later = (open_corpus(tmp_path / f"{number}") for number in range(2))
    assert opened.read(4000, 1).tolist() == [4000]
    for folder in (tmp_path / "0", tmp_path / "1"):
        with open(folder / "000.bin", "r+b") as file:
            file.truncate(5000)
    with pytest.raises(DataError, match="000.bin: became shorter while it was read"):
        opened.read(4000, 1)
    with pytest.raises(DataError, match="has 5000 bytes, and had 10000 when this run started"):
        later.read(0, 1)


MANY_SHARDS = """
import os, resource, sys
import numpy as np
from titanlite.data import open_corpus

soft, hard, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
corpus = open_corpus(folder)
starts = np.random.default_rng(0).permutation(corpus.tokens - 3)
expected = np.arange(corpus.tokens)
for _ in range(2):
    assert np.array_equal(corpus.gather(starts, 3), expected[starts[:, None] + np.arange(3)])
print(len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("soft, hard", [(64, 64), (64, 1000)], ids=["hard", "soft"])
def test_a_corpus_with_more_shards_than_file_descriptors_is_read(tmp_path, soft, hard):
    write_shards(tmp_path, [[range(5 * n, 5 * n + 5)] for n in range(150)], manifest=False)
    command = [sys.executable, "-c", MANY_SHARDS, str(soft), str(hard), str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    used, limit = map(int, child.stdout.split())
    if hard == 64:
        assert (
            used <= 45 and limit == 64
        )  # half of them, plus the files that Python itself has open
    else:
        assert used >= 150 and limit == 1000  # raised, so that every shard stays open


def test_symlinks_out_of_the_corpus_are_followed(tmp_path):
    for name in ("a", "b"):
        write_shards(tmp_path / name, manifest=False)
    (tmp_path / "a/001.bin").symlink_to(tmp_path / "b/000.bin")
    (tmp_path / "a/001.idx").symlink_to(tmp_path / "b/000.idx")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert open_corpus(tmp_path / "link").tokens == 2 * FLAT.size


@pytest.mark.parametrize("name", ["000.bin", "000.idx"])
def test_verify_detects_a_flipped_bit(tmp_path, name):
    path = write_shards(tmp_path) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="differ from those that were written"):
        verify_corpus(tmp_path)


def test_an_unfinished_shard_leaves_no_files(tmp_path):
    refused = pytest.raises(DataError, match="id 100, outside 0…99")
    with refused, ShardWriter(tmp_path / "a", 100) as writer:
        writer.add([99])
        writer.add([1, 100])
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_without_tokens_is_refused(tmp_path):
    for shards in ([], [[[]]]):
        with pytest.raises(DataError, match="has no .bin|contains no tokens"):
            open_corpus(write_shards(tmp_path, shards))
    with pytest.raises(DataError, match="no such folder"):
        open_corpus(tmp_path / "nowhere")
    write_shards(tmp_path / "corpus" / "train")
    with pytest.raises(DataError, match="Did you mean .*train"):
        open_corpus(tmp_path / "corpus")


def test_the_fingerprint_depends_on_the_tokens_but_not_on_the_folder(tmp_path):
    for manifest in (True, False):
        fingerprints = []
        for name, last in (("a", DOCUMENTS[-1]), ("b", DOCUMENTS[-1]), ("c", [1] * 50)):
            folder = tmp_path / f"{name}{manifest}"
            write_shards(folder, [[*DOCUMENTS[:-1], last]], manifest=manifest)
            fingerprints.append(open_corpus(folder).fingerprint)
        assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize("value", (None, "", 1.5, True, [], {}))
def test_a_manifest_with_wrong_types_is_refused(tmp_path, value):
    path = write_shards(tmp_path) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for table in (manifest, manifest["shards"][0]):
        for key, old in table.items():
            if type(old) is not type(value):
                table[key] = value
                path.write_text(json.dumps(manifest))
                with pytest.raises(DataError, match="is not a valid manifest"):
                    open_corpus(tmp_path)
                table[key] = old


def test_a_truncated_manifest_is_refused_not_treated_as_missing(tmp_path):
    path = write_shards(tmp_path) / "manifest.json"
    intact = path.read_bytes()
    for content in (intact[:100], b'{"shards": ' + b"[" * 200_000):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a valid manifest"):
            open_corpus(tmp_path)
