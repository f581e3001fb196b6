"""Preparing text: every document is in train or validation once, also after interruptions."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from conftest import HANG_SECONDS
from tests.data.test_tokenizer import write_tokenizer_json
from titanlite.data import open_corpus, open_tokenizer, verify_corpus
from titanlite.data.parquet_text import _refuse_expansion
from titanlite.data.text import list_file_ranges, read_documents
from titanlite.data.text_files import find_files
from titanlite.errors import DataError
from titanlite.kernels.documents import document_positions
from titanlite_corpus.prepare import PreparedCorpus, PrepareSettings, prepare_corpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BYTES = open_tokenizer("bytes")
PIECE_BYTES = 4000


def prepare(inputs, out: Path, validation_share: float = 0.01, **settings) -> PreparedCorpus:
    return prepare_corpus(inputs, BYTES, out, PrepareSettings(validation_share, **settings))


def texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    words = ["eins", "zwei\r\n", "trois", "čtyři", "五", "\n\n", "🙂", " "]
    return [
        f"{seed}/{i} " + " ".join(generator.choices(words, k=generator.randrange(60)))
        for i in range(count)
    ]


def write_jsonl(path: Path, documents: list[str]) -> None:
    lines = [
        json.dumps({"text": text, "id": i}, ensure_ascii=i % 2 == 0)
        for i, text in enumerate(documents)
    ]
    path.write_bytes("\n".join(lines).encode())  # with no newline at the end


@pytest.fixture
def inputs(tmp_path) -> Path:
    """A folder with every kind of input: 260 documents in total."""
    folder = tmp_path / "inputs"
    (folder / "below").mkdir(parents=True)
    write_jsonl(folder / "many.jsonl", texts(200))
    table = pyarrow.table({"text": [*texts(40, 1), None, ""], "n": range(42)})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    for i, text in enumerate(texts(20, 2)):
        (folder / "below" / f"{i:02}.txt").write_bytes(text.encode())
    (folder / "README.md").write_text("not training text")
    return folder


def documents_in(folder: Path) -> list[str]:
    corpus = open_corpus(folder)
    ids = corpus.read(0, corpus.tokens)
    assert ids[-1] == BYTES.eos_id
    ends = np.flatnonzero(ids == BYTES.eos_id)
    return [BYTES.decode(part[part < 256]) for part in np.split(ids, ends + 1)[:-1]]


def content_of(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_every_document_of_every_kind_of_file_is_prepared_once(inputs, tmp_path):
    prepared = prepare([inputs], tmp_path / "out", 0.2, piece_bytes=PIECE_BYTES, workers=1)
    train, held_out = (documents_in(tmp_path / "out" / side) for side in ("train", "validation"))
    assert sorted(train + held_out) == sorted(texts(200) + texts(40, 1) + texts(20, 2))
    assert (prepared.documents, prepared.validation_documents) == (len(train), len(held_out))
    assert 20 < len(held_out) < 90
    assert verify_corpus(tmp_path / "out/train").tokens == prepared.tokens
    assert not (tmp_path / "out/.unfinished").exists()


def test_copies_of_a_document_are_never_in_both_train_and_validation(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    write_jsonl(tmp_path / "b.jsonl", texts(100)[::-1] + texts(50, 1))
    prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "out", 0.3, workers=1)
    train, held_out = (documents_in(tmp_path / "out" / side) for side in ("train", "validation"))
    assert len(train) + len(held_out) == 250
    assert not set(train) & set(held_out)


def test_the_number_of_workers_does_not_change_the_bytes(inputs, tmp_path):
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        prepared = prepare([inputs], out, 0.2, workers=workers, piece_bytes=PIECE_BYTES)
        assert prepared.pieces > 4
    assert content_of(tmp_path / "out1") == content_of(tmp_path / "out2")


def test_the_piece_size_does_not_change_the_documents(inputs, tmp_path):
    results = []
    for piece_bytes in (1500, 5001, 10**9):
        out = tmp_path / f"out{piece_bytes}"
        prepare([inputs], out, 0.2, workers=1, piece_bytes=piece_bytes)
        results.append((documents_in(out / "train"), documents_in(out / "validation")))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("limit", [1, 7, 100, 1001])
def test_a_file_split_anywhere_gives_each_document_once(inputs, limit):
    for name in ("many.jsonl", "rows.parquet"):
        (file,) = list_file_ranges([inputs / name])
        parts = file.split(limit)
        assert len(parts) > 1 and sum(part.bytes for part in parts) == file.bytes
        assert list(read_documents(parts)) == list(read_documents([file]))


PREPARE_SLOWLY = """
import sys, time
from titanlite.data import open_tokenizer
from titanlite_corpus.prepare import PrepareSettings, prepare_corpus

if __name__ == "__main__":
    inputs, out, workers = sys.argv[1:]
    settings = PrepareSettings(0.2, workers=int(workers), piece_bytes=4000)
    prepare_corpus([inputs], open_tokenizer("bytes"), out, settings,
                   progress=lambda done, total: time.sleep(0.3 if done else 0))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_kill_the_same_command_gives_the_same_bytes(inputs, tmp_path, workers):
    (tmp_path / "slowly.py").write_text(PREPARE_SLOWLY)
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    command = [sys.executable, str(tmp_path / "slowly.py"), str(inputs), str(out), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, start_new_session=True)
    wait_until(lambda: len(list(out.glob(".unfinished/*.json"))) >= 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: not group_exists(killed.pid))  # its workers end too
    with pytest.raises(DataError):
        open_corpus(out / "train")
    (out / ".unfinished/train/000001.bin.77.tmp").write_bytes(b"half a shard")
    damaged = out / ".unfinished/train/000000.bin"  # as after a power cut
    damaged.write_bytes(bytes(damaged.stat().st_size))

    resumed = prepare([inputs], out, 0.2, workers=1, piece_bytes=PIECE_BYTES)
    fresh = prepare([inputs], undisturbed, 0.2, workers=1, piece_bytes=PIECE_BYTES)
    assert 1 <= resumed.reused_pieces < resumed.pieces and fresh.reused_pieces == 0
    assert content_of(out) == content_of(undisturbed)


def test_the_piece_of_a_changed_input_is_not_reused(tmp_path):
    for name, content in (("a", "old a"), ("b", "old b"), ("c", "\udcff")):
        (tmp_path / f"{name}.txt").write_text(content, errors="surrogateescape")
    inputs = [tmp_path / f"{name}.txt" for name in "abc"]
    with pytest.raises(DataError, match="c.txt, line 1"):  # with two pieces finished
        prepare(inputs, tmp_path / "out", 0.0, workers=1, piece_bytes=1)
    (tmp_path / "a.txt").write_text("new a")
    (tmp_path / "c.txt").write_text("fixed")
    prepared = prepare(inputs, tmp_path / "out", 0.0, workers=1, piece_bytes=1)
    assert documents_in(tmp_path / "out/train") == ["new a", "old b", "fixed"]
    assert prepared.reused_pieces == 1


PREPARE_A_PIPE = """
import os, sys
from titanlite.data import open_tokenizer
from titanlite_corpus.prepare import PrepareSettings, prepare_corpus
from titanlite.errors import UserError, format_error

def replace_last_input(done, total):
    if done == 0:  # after the inputs were listed, before any worker opens one
        os.unlink(inputs + "/d.jsonl")
        os.mkfifo(inputs + "/d.jsonl")

if __name__ == "__main__":
    inputs, out, seconds = sys.argv[1:]
    settings = PrepareSettings(0.2, workers=2, piece_bytes=4000, stall_seconds=float(seconds))
    try:
        prepare_corpus([inputs], open_tokenizer("bytes"), out, settings, replace_last_input)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(error.code)
"""


def children_of(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return [child for child, parent in parents.items() if parent == pid]


@pytest.mark.parametrize("failure", ["hang", "death"])
def test_a_worker_that_hangs_or_dies_ends_the_command(tmp_path, failure):
    """One input is a pipe without a writer: reading it blocks, as on a dead disk."""
    for name in "abcd":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(60))
    (tmp_path / "prepare_a_pipe.py").write_text(PREPARE_A_PIPE)
    command = [sys.executable, str(tmp_path / "prepare_a_pipe.py"), str(tmp_path)]
    command += [str(tmp_path / "out"), "3" if failure == "hang" else "600"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"env": environment, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **options) as child:
        if failure == "death":
            workers: list[int] = []  # children of the fork server

            def has_workers() -> bool:
                workers.extend(w for c in children_of(child.pid) for w in children_of(c))
                return bool(workers)

            wait_until(has_workers)
            os.kill(workers[0], signal.SIGKILL)
        _, stderr = child.communicate(timeout=HANG_SECONDS)
    wait_until(lambda: not group_exists(child.pid))
    killed = "a worker was killed"
    expected = "no worker has made progress for 3 s" if failure == "hang" else killed
    assert child.returncode == 2 and expected in stderr and "Traceback" not in stderr, stderr


def wait_until(condition, seconds: float = HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_last_renames_is_completed_by_the_next_run(inputs, tmp_path, renames):
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    prepare([inputs], undisturbed, 0.2, workers=1)
    prepare([inputs], out, 0.2, workers=1)
    (out / ".unfinished").mkdir()  # the state that the killed run left
    for name in ("train", "prepared.json")[renames - 1 :]:
        os.rename(out / name, out / ".unfinished" / name)
    completed = prepare([inputs], out, 0.2, workers=1)
    assert completed.reused_pieces == completed.pieces
    assert content_of(out) == content_of(undisturbed)


def test_a_second_run_changes_nothing_and_other_settings_do_not_overwrite(inputs, tmp_path):
    out = tmp_path / "out"
    prepare([inputs], out, 0.2, workers=1)
    before = content_of(out)
    second = prepare([inputs], out, 0.2, workers=1)
    assert second.encoded_bytes == 0 and second.reused_pieces == second.pieces
    with pytest.raises(DataError, match="already exists"):
        prepare([inputs], out, 0.3, workers=1)
    (inputs / "more.txt").write_text("one more")
    with pytest.raises(DataError, match="already exists"):
        prepare([inputs], out, 0.2, workers=1)
    assert content_of(out) == before


def test_with_bos_every_document_begins_with_it_and_is_one_document_to_the_mask(inputs, tmp_path):
    out, plain = tmp_path / "out", tmp_path / "plain"
    options = {"piece_bytes": PIECE_BYTES, "workers": 1}
    prepare([inputs], out, 0.2, bos=True, **options)
    prepare([inputs], plain, 0.2, **options)
    for side in ("train", "validation"):
        assert documents_in(out / side) == documents_in(plain / side)
        corpus = open_corpus(out / side)
        ids = torch.from_numpy(corpus.read(0, corpus.tokens))
        first = document_positions(ids[None], BYTES.eos_id)[0] == 0
        assert torch.equal(first, ids == BYTES.bos_id) and first.sum() == sum(
            shard.documents for shard in corpus.manifest.shards
        )
        assert corpus.manifest.bos and not open_corpus(plain / side).manifest.bos
    with pytest.raises(DataError, match="made from other inputs"):
        prepare([inputs], out, 0.2, **options)
    without = open_tokenizer(write_tokenizer_json(tmp_path))  # its only special token is the end
    with pytest.raises(DataError, match="has no BOS of its own"):
        prepare_corpus([inputs], without, tmp_path / "other", PrepareSettings(bos=True))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3.*not JSON"),
        (
            "a.jsonl",
            b'{"text": ' + b"[" * 2000 + b"]" * 2000 + b"}",
            "a.jsonl, line 1: nested too deeply",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": 7}\n', 'a.jsonl, line 2.*no "text" that is a string'),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "a.jsonl, line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl, line 2: the byte 0xff"),
        ("a.txt", b"one\ntwo\nthr\xe9e\n", "a.txt, line 3: the byte 0xe9 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 200_000, "line 2: nested too deeply"),
        ("a.parquet", b"PAR1 no", "a.parquet: is not a readable .parquet"),
        ("a.txt", b"", "contain no text"),
        ("a.md", b"text", "contains no text files"),
    ],
)
def test_a_corrupt_input_is_named_with_its_line(tmp_path, name, content, message):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(content)
    for piece_bytes in (3, 10**6):  # lines are counted from the top of the file in any piece
        with pytest.raises(DataError, match=message):
            prepare([folder], tmp_path / "out", 0.0, workers=1, piece_bytes=piece_bytes)
    assert not (tmp_path / "out/train").exists()


def test_an_error_in_a_worker_is_reported_unchanged(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b"\n{broken")
    with pytest.raises(DataError, match="a.jsonl, line 51") as refusal:
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", workers=2, piece_bytes=1000)
    assert refusal.value.fix


MEMORY = """
import resource, sys
from titanlite.data.parquet_text import _refuse_expansion
from titanlite.data.text import list_file_ranges, read_documents
from titanlite.data.text_files import find_files
from titanlite.errors import UserError, format_error

import pyarrow.parquet
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = before + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
documents = characters = 0
try:
    for text in read_documents(list_file_ranges(find_files([sys.argv[1]]))):
        documents, characters = documents + 1, characters + len(text)
except UserError as error:
    sys.exit(format_error(error))
print(documents, characters)
"""


def read_in_little_memory(path: Path) -> subprocess.CompletedProcess:
    """Read all documents with 1 GiB of memory in addition to that of the imports."""
    command, environment = [sys.executable, "-c", MEMORY, str(path)], dict(os.environ)
    environment |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def write_shared_text(path: Path, rows: int, size: int) -> None:
    """All rows share one text of `size` characters, so the file has a few hundred bytes."""
    one = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array(["a" * size])
    )
    table = pyarrow.table({"text": one})
    pyarrow.parquet.write_table(
        table, path, compression="zstd", row_group_size=rows, store_schema=False
    )


def test_a_parquet_whose_column_has_a_name_that_is_not_utf8_is_refused(tmp_path):
    table, path = pyarrow.table({"text": ["a"], "QQQQ": ["b"]}), tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"QQQQ", b"\xffQQQ"))
    with pytest.raises(DataError, match="not a readable .parquet"):
        list_file_ranges([path])


def test_a_parquet_of_a_few_bytes_cannot_fill_the_memory(tmp_path):
    bomb, fine = tmp_path / "bomb.parquet", tmp_path / "fine.parquet"
    write_shared_text(bomb, rows=2000, size=1_000_000)  # 2 GB of text
    assert bomb.stat().st_size < 1000
    refused = read_in_little_memory(bomb)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr, refused.stderr
    assert "bytes expand to more than" in refused.stderr and "row group 0" in refused.stderr

    write_shared_text(fine, rows=200, size=1_000_000)  # decoded in one call, it would be too much
    read = read_in_little_memory(fine)
    assert read.stdout.split() == ["200", "200000000"], read.stderr


@pytest.mark.parametrize("rows, size", [(1 << 31, 9), (9, 1 << 31)], ids=["rows", "bytes"])
def test_a_row_group_with_implausible_metadata_is_refused_before_decoding(rows, size):
    column = SimpleNamespace(num_values=rows, total_uncompressed_size=size)
    with pytest.raises(DataError, match="289 bytes expand to 2,147,483,648"):
        _refuse_expansion("a.parquet", column, 289)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd", "use_dictionary": False},
        {"data_page_version": "2.0", "compression": "gzip"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
        {"dictionary_pagesize_limit": 1000, "data_page_size": 500},  # falls back to plain
    ],
    ids=["plain", "version 2", "delta", "delta length", "mixed"],
)
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
def test_a_parquet_of_any_encoding_is_read(tmp_path, options, kind):
    documents = [*texts(60), None, "", *texts(60)]
    table = pyarrow.table({"text": pyarrow.array(documents, kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50, **options)
    read = list(read_documents(list_file_ranges([tmp_path / "a.parquet"])))
    assert read == [text for text in documents if text]


def test_a_document_above_the_limit_is_refused_in_every_kind_of_file(tmp_path):
    limit, long = 1 << 20, "a" * (1 << 20)
    (tmp_path / "a.txt").write_text(long + "a")
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n{"text": "' + long)  # a line without an end
    pyarrow.parquet.write_table(pyarrow.table({"text": [long + "a"]}), tmp_path / "a.parquet")
    for name in ("a.txt", "a.jsonl, line 2", "a.parquet, row group 0"):
        parts = list_file_ranges([tmp_path / name.split(",")[0]])
        with pytest.raises(DataError, match=f"{name}: contains a document of more than 1 MiB"):
            list(read_documents(parts, limit))
    (tmp_path / "a.txt").write_text(long)
    assert list(read_documents(list_file_ranges([tmp_path / "a.txt"]), limit)) == [long]


def test_symlinks_are_followed_and_cycles_end(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.txt").write_text("text")
    folder, cases = tmp_path / "in", {}
    for case, name, target in (("file", "a.txt", "other/a.txt"), ("folder", "more", "other")):
        (folder / case).mkdir(parents=True)
        (folder / case / "own.txt").write_text("own")
        (folder / case / name).symlink_to(tmp_path / target)
        (folder / case / "again").symlink_to(folder / case)  # a cycle
        cases[case] = [folder / case, str(folder / case / "**/*.txt")]
    for given in (given for inputs in cases.values() for given in inputs):
        assert sorted(file.name for file in find_files([given])) == ["a.txt", "own.txt"]
    (tmp_path / "link").symlink_to(folder / "file/own.txt")
    assert find_files([tmp_path / "link"]) == [tmp_path / "link"]  # given by its own name


def test_a_broken_symlink_is_reported_like_a_missing_file(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "removed.txt")
    with pytest.raises(DataError, match="a.txt: no such file or folder"):
        find_files([tmp_path / "a.txt"])


def test_a_parquet_without_text_is_refused_with_its_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match='no column "text", only body, n'):
        prepare([tmp_path], tmp_path / "out")
    for ids in ([1], [b"a"]):
        pyarrow.parquet.write_table(pyarrow.table({"text": ids}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match='"text" contains (int64|binary), not text'):
            prepare([tmp_path], tmp_path / "out")
    broken = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row group 0: the byte 0xff is not UTF-8"):
        prepare([tmp_path], tmp_path / "out", 0.0)


def test_a_validation_share_that_leaves_one_side_empty_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(DataError, match="leaves none for validation"):
        prepare([tmp_path], tmp_path / "out", 0.01)
    assert not (tmp_path / "out/train").exists()
    prepare([tmp_path], tmp_path / "out", 0.0)
    assert documents_in(tmp_path / "out/train") == ["one document"]
    assert not (tmp_path / "out/validation").exists()


def test_named_files_and_patterns_accept_any_suffix_and_each_file_once(tmp_path):
    for name in ("a.md", "b.rst", "c.txt"):
        (tmp_path / name).write_text(name)
    inputs = [tmp_path / "b.rst", str(tmp_path / "*.*"), tmp_path]
    prepare(inputs, tmp_path / "out", 0.0)
    assert documents_in(tmp_path / "out/train") == ["b.rst", "a.md", "c.txt"]
    with pytest.raises(DataError, match="matches none"):
        prepare([tmp_path / "*.xyz"], tmp_path / "other")


def run_script(python: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    command = [python, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_scripts_make_a_corpus_of_this_pythons_library(python, tmp_path):
    collected = run_script(
        python, "-m", "titanlite_corpus", "collect-python", "--out", tmp_path / "python.jsonl"
    )
    assert collected.returncode == 0, collected.stderr
    lines = (tmp_path / "python.jsonl").read_bytes().splitlines()
    documents = [json.loads(line) for line in lines]
    paths = [document["path"] for document in documents]
    assert "json/decoder.py" in paths and paths == sorted(paths, key=Path)
    assert not any({"test", "tests", "site-packages"} & set(Path(path).parts) for path in paths)
    assert Path(json.__file__).read_text() in [document["text"] for document in documents]

    write_jsonl(tmp_path / "some.jsonl", [document["text"] for document in documents[:60]])
    command = ["scripts/prepare_data.py", tmp_path / "some.jsonl", "--tokenizer", "bytes"]
    command += ["--out", tmp_path / "out", "--validation-share", "0.3"]
    first, second = run_script(python, *command), run_script(python, *command)
    assert first.returncode == second.returncode == 0, first.stderr
    assert "MB/s" in first.stdout and "from an earlier run" in second.stdout
    intact = run_script(python, "scripts/prepare_data.py", "--verify", tmp_path / "out")
    assert intact.returncode == 0 and intact.stdout.count("intact") == 2, intact.stderr
    shard = tmp_path / "out/validation/000000.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 1
    shard.write_bytes(content)
    damaged = run_script(python, "scripts/prepare_data.py", "--verify", tmp_path / "out")
    assert damaged.returncode == 2 and "validation/000000: its bytes differ" in damaged.stderr
    assert "prepare the text again" in damaged.stderr and "--verify" not in damaged.stderr
    missing = run_script(python, "scripts/prepare_data.py", tmp_path / "missing", *command[2:])
    assert missing.returncode == 2 and "no such file" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_closing_stdout_ends_a_script_without_a_traceback(python, tmp_path):
    """As `… | head` does, when it has read enough."""
    write_jsonl(tmp_path / "some.jsonl", texts(50))
    prepare([tmp_path / "some.jsonl"], tmp_path / "out", 0.3, workers=1)
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [python, "scripts/prepare_data.py", "--verify", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert done.returncode == -signal.SIGPIPE
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
