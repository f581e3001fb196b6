"""Every document is prepared once, on one side, whatever was interrupted, whoever worked."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tests.data.test_tokenizer import hugging_face

from titanlite.data import open_corpus, open_tokenizer, verify
from titanlite.data.prepare import prepare
from titanlite.data.text import parts_of, read_documents
from titanlite.errors import DataError
from titanlite.models.documents import document_positions

ROOT = Path(__file__).parents[2]
BYTES = open_tokenizer("bytes")
PIECE_BYTES = 4000


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
    """A folder of every kind of input: 260 documents in all."""
    folder = tmp_path / "inputs"
    (folder / "below").mkdir(parents=True)
    write_jsonl(folder / "many.jsonl", texts(200))
    table = pyarrow.table({"text": [*texts(40, 1), None, ""], "n": range(42)})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    for i, text in enumerate(texts(20, 2)):
        (folder / "below" / f"{i:02}.txt").write_bytes(text.encode())
    (folder / "README.md").write_text("not text to learn from")
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


def test_every_document_of_every_kind_of_file_is_there_once(inputs, tmp_path):
    made = prepare([inputs], BYTES, tmp_path / "out", 0.2, piece_bytes=PIECE_BYTES, workers=1)
    train, held_out = (documents_in(tmp_path / "out" / side) for side in ("train", "validation"))
    assert sorted(train + held_out) == sorted(texts(200) + texts(40, 1) + texts(20, 2))
    assert (made.documents, made.validation_documents) == (len(train), len(held_out))
    assert 20 < len(held_out) < 90
    assert verify(tmp_path / "out/train").tokens == made.tokens
    assert not (tmp_path / "out/.unfinished").exists()


def test_a_document_that_occurs_twice_does_not_leak_into_validation(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(100))
    write_jsonl(tmp_path / "b.jsonl", texts(100)[::-1] + texts(50, 1))
    prepare([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], BYTES, tmp_path / "out", 0.3, workers=1)
    train, held_out = (documents_in(tmp_path / "out" / side) for side in ("train", "validation"))
    assert len(train) + len(held_out) == 250
    assert not set(train) & set(held_out)


def test_the_number_of_workers_does_not_change_a_byte(inputs, tmp_path):
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        made = prepare([inputs], BYTES, out, 0.2, workers=workers, piece_bytes=PIECE_BYTES)
        assert made.pieces > 4
    assert content_of(tmp_path / "out1") == content_of(tmp_path / "out2")


def test_pieces_of_any_size_hold_the_same_documents(inputs, tmp_path):
    found = []
    for piece_bytes in (1500, 5001, 10**9):
        out = tmp_path / f"out{piece_bytes}"
        prepare([inputs], BYTES, out, 0.2, workers=1, piece_bytes=piece_bytes)
        found.append((documents_in(out / "train"), documents_in(out / "validation")))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("limit", [1, 7, 100, 1001])
def test_a_file_cut_anywhere_gives_each_document_once(inputs, limit):
    for name in ("many.jsonl", "rows.parquet"):
        (whole,) = parts_of([inputs / name])
        parts = whole.split(limit)
        assert len(parts) > 1 and sum(part.bytes for part in parts) == whole.bytes
        assert list(read_documents(parts)) == list(read_documents([whole]))


SLOWLY = """
import sys, time
from titanlite.data import open_tokenizer
from titanlite.data.prepare import prepare
from titanlite.data.text import parts_of, read_documents

if __name__ == "__main__":
    inputs, out, workers = sys.argv[1:]
    prepare([inputs], open_tokenizer("bytes"), out, 0.2, workers=int(workers), piece_bytes=4000,
            progress=lambda done, of: time.sleep(0.3 if done else 0))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_kill_the_same_command_ends_with_the_same_bytes(inputs, tmp_path, workers):
    (tmp_path / "slowly.py").write_text(SLOWLY)
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, str(tmp_path / "slowly.py"), str(inputs), str(out), str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, start_new_session=True)
    until(lambda: len(list(out.glob(".unfinished/*.json"))) >= 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    until(lambda: not group_lives(killed.pid))  # workers end with their parent
    with pytest.raises(DataError):
        open_corpus(out / "train")
    (out / ".unfinished/train/000001.bin.77.tmp").write_bytes(b"half a shard")
    damaged = out / ".unfinished/train/000000.bin"  # as after a power cut
    damaged.write_bytes(bytes(damaged.stat().st_size))

    again = prepare([inputs], BYTES, out, 0.2, workers=1, piece_bytes=PIECE_BYTES)
    fresh = prepare([inputs], BYTES, whole, 0.2, workers=1, piece_bytes=PIECE_BYTES)
    assert 1 <= again.reused_pieces < again.pieces and fresh.reused_pieces == 0
    assert content_of(out) == content_of(whole)


def test_a_piece_of_an_older_version_of_the_input_is_not_used_again(tmp_path):
    for name, content in (("a", "old a"), ("b", "old b"), ("c", "\udcff")):
        (tmp_path / f"{name}.txt").write_text(content, errors="surrogateescape")
    inputs = [tmp_path / f"{name}.txt" for name in "abc"]
    with pytest.raises(DataError, match="c.txt, line 1"):  # with two pieces finished
        prepare(inputs, BYTES, tmp_path / "out", 0.0, workers=1, piece_bytes=1)
    (tmp_path / "a.txt").write_text("new a")
    (tmp_path / "c.txt").write_text("mended")
    made = prepare(inputs, BYTES, tmp_path / "out", 0.0, workers=1, piece_bytes=1)
    assert documents_in(tmp_path / "out/train") == ["new a", "old b", "mended"]
    assert made.reused_pieces == 1


def until(true, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_last_renames_is_finished_by_the_next_run(inputs, tmp_path, renames):
    out, whole = tmp_path / "out", tmp_path / "whole"
    prepare([inputs], BYTES, whole, 0.2, workers=1)
    prepare([inputs], BYTES, out, 0.2, workers=1)
    (out / ".unfinished").mkdir()  # back to where the killed run had come
    for name in ("train", "prepared.json")[renames - 1 :]:
        os.rename(out / name, out / ".unfinished" / name)
    made = prepare([inputs], BYTES, out, 0.2, workers=1)
    assert made.reused_pieces == made.pieces
    assert content_of(out) == content_of(whole)


def test_a_second_run_does_nothing_and_another_job_does_not_overwrite(inputs, tmp_path):
    out = tmp_path / "out"
    prepare([inputs], BYTES, out, 0.2, workers=1)
    before = content_of(out)
    again = prepare([inputs], BYTES, out, 0.2, workers=1)
    assert again.encoded_bytes == 0 and again.reused_pieces == again.pieces
    with pytest.raises(DataError, match="there already"):
        prepare([inputs], BYTES, out, 0.3, workers=1)
    (inputs / "more.txt").write_text("one more")
    with pytest.raises(DataError, match="there already"):
        prepare([inputs], BYTES, out, 0.2, workers=1)
    assert content_of(out) == before


def test_with_bos_every_document_begins_with_it_and_is_one_to_a_document_mask(inputs, tmp_path):
    out, plain = tmp_path / "out", tmp_path / "plain"
    options = {"piece_bytes": PIECE_BYTES, "workers": 1}
    prepare([inputs], BYTES, out, 0.2, bos=True, **options)
    prepare([inputs], BYTES, plain, 0.2, **options)
    for side in ("train", "validation"):
        assert documents_in(out / side) == documents_in(plain / side)
        corpus = open_corpus(out / side)
        ids = torch.from_numpy(corpus.read(0, corpus.tokens))
        first = document_positions(ids[None], BYTES.eos_id)[0] == 0
        assert torch.equal(first, ids == BYTES.bos_id) and first.sum() == corpus.documents
        assert corpus.manifest.bos and not open_corpus(plain / side).manifest.bos
    with pytest.raises(DataError, match="made of other inputs"):
        prepare([inputs], BYTES, out, 0.2, **options)
    without = open_tokenizer(hugging_face(tmp_path))  # its only special token is the end
    with pytest.raises(DataError, match="has no BOS of its own"):
        prepare([inputs], without, tmp_path / "other", bos=True)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "a.jsonl, line 3.*not JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 2000, "a.jsonl, line 1: nested too deeply"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 7}\n', 'a.jsonl, line 2.*no "text" that is a string'),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "a.jsonl, line 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "a.jsonl, line 2: the byte 0xff"),
        ("a.txt", b"one\ntwo\nthr\xe9e\n", "a.txt, line 3: the byte 0xe9 is not UTF-8"),
        ("a.parquet", b"PAR1 no", "a.parquet: is not a .parquet"),
        ("a.txt", b"", "hold no text"),
        ("a.md", b"text", "no files of text"),
    ],
)
def test_a_corrupt_input_is_named_with_its_line(tmp_path, name, content, said):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(content)
    for piece_bytes in (3, 10**6):  # lines are counted from the top of the file in any piece
        with pytest.raises(DataError, match=said):
            prepare([folder], BYTES, tmp_path / "out", 0.0, workers=1, piece_bytes=piece_bytes)
    assert not (tmp_path / "out/train").exists()


def test_an_error_in_a_worker_reaches_the_user_as_it_is(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", texts(50))
    with open(tmp_path / "a.jsonl", "ab") as file:
        file.write(b"\n{broken")
    with pytest.raises(DataError, match="a.jsonl, line 51") as refusal:
        prepare([tmp_path / "a.jsonl"], BYTES, tmp_path / "out", workers=2, piece_bytes=1000)
    assert refusal.value.fix


def test_a_parquet_without_text_says_what_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match='no column "text", only body, n'):
        prepare([tmp_path], BYTES, tmp_path / "out")


def test_a_share_that_leaves_a_side_empty_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(DataError, match="leaves none for validation"):
        prepare([tmp_path], BYTES, tmp_path / "out", 0.01)
    assert not (tmp_path / "out/train").exists()
    prepare([tmp_path], BYTES, tmp_path / "out", 0.0)
    assert documents_in(tmp_path / "out/train") == ["one document"]
    assert not (tmp_path / "out/validation").exists()


def test_a_named_file_and_a_pattern_take_any_suffix_each_file_once(tmp_path):
    for name in ("a.md", "b.rst", "c.txt"):
        (tmp_path / name).write_text(name)
    inputs = [tmp_path / "b.rst", str(tmp_path / "*.*"), tmp_path]
    prepare(inputs, BYTES, tmp_path / "out", 0.0)
    assert documents_in(tmp_path / "out/train") == ["b.rst", "a.md", "c.txt"]
    with pytest.raises(DataError, match="matches none"):
        prepare([tmp_path / "*.xyz"], BYTES, tmp_path / "other")


def run(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_scripts_make_a_corpus_of_this_python(tmp_path):
    collected = run("scripts/collect_python.py", "--out", tmp_path / "python.jsonl")
    assert collected.returncode == 0, collected.stderr
    documents = [json.loads(line) for line in open(tmp_path / "python.jsonl", encoding="utf-8")]
    paths = [document["path"] for document in documents]
    assert "json/decoder.py" in paths and paths == sorted(paths, key=Path)
    assert not any({"test", "tests", "site-packages"} & set(Path(path).parts) for path in paths)
    assert Path(json.__file__).read_text() in [document["text"] for document in documents]

    write_jsonl(tmp_path / "some.jsonl", [document["text"] for document in documents[:60]])
    command = ["scripts/prepare_data.py", tmp_path / "some.jsonl", "--tokenizer", "bytes"]
    command += ["--out", tmp_path / "out", "--validation-share", "0.3"]
    first, second = run(*command), run(*command)
    assert first.returncode == second.returncode == 0, first.stderr
    assert "MB/s" in first.stdout and "from an earlier run" in second.stdout
    bad = run("scripts/prepare_data.py", tmp_path / "nothing", *command[2:])
    assert bad.returncode == 2 and "no such file" in bad.stderr and "Traceback" not in bad.stderr
