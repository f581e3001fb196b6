"""No file, however it is changed, makes a reader crash, hang, exhaust memory or act outside.

`scripts/test.sh --fuzz MINUTES` spends so long on all readers; the suite reads a few files with each.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.checkpoint.test_untrusted import make_old
from tests.conftest import ROOT
from tests.distributed.ranks import _forkserver
from tests.faults.launch import Launched
from tests.fuzz.child import NUMBER, fuzz, prepare_case
from tests.fuzz.readers import READERS, TEXT
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.data.bpe import train_bpe
from titanlite.storage import StorageFolder

CASES = 40  # of each reader in the suite
SILENT_SECONDS = (
    300  # in which a child must reach its next file; CPU_SECONDS ends one that computes
)


@pytest.fixture(scope="session")
def seeds(corpus, tmp_path_factory) -> Path:
    """A valid file or folder for each reader, made by the programs that make them for users."""
    folder = tmp_path_factory.mktemp("seeds")
    run = folder / "run.toml"
    run.write_text(RUN.format(folder=folder, corpus=corpus))
    with Launched(1, folder / "out", "--job.config_file", str(run)) as launched:
        assert launched.wait() == [0], launched.said
    shutil.copytree(folder / "out" / "checkpoint" / "step-1", folder / "step")
    shutil.copytree(folder / "step", folder / "old")
    make_old(folder / "old")
    shutil.copytree(folder / "out" / "checkpoint" / "step-1-hf", folder / "hf")
    shutil.copy(folder / "out" / "metrics.jsonl", folder)
    to_hugging_face(
        StorageFolder(folder / "step"), StorageFolder(folder / "sharded"), max_shard_bytes=20_000
    )
    shutil.copytree(corpus / "train", folder / "corpus")
    shutil.copytree(corpus / "train", folder / "foreign")
    (folder / "foreign" / "manifest.json").unlink()
    texts = [path.read_text("utf-8") for path in (ROOT / "titanlite").glob("*.py")]
    train_bpe(texts, 600, folder / "tokenizer.model")
    shutil.copy(folder / "hf" / "tokenizer.json", folder)
    lines = [json.dumps({"text": text}) for text in (TEXT, *texts)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "text.parquet")
    return folder


RUN = """
[job]
dump_folder = "{folder}/out"
device = "cpu"
[model]
dim = 16
n_layers = 2
n_heads = 2
n_kv_heads = 1
hidden_dim = 32
vocab_size = 258
[data]
tokenizer = "bytes"
sources = [{{ name = "code", path = "{corpus}/train", weight = 1.0 }}]
[training]
seq_len = 16
global_batch_size = 1
local_batch_size = 1
steps = 1
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = true
last_save_in_hf = true
"""


@pytest.mark.parametrize("name", READERS)
def test_no_changed_file_crashes_hangs_or_acts_outside(name, seeds, tmp_path, request):
    minutes = request.config.getoption("--fuzz")
    last = CASES if not minutes else 2**62
    until = time.time() + (60 * minutes / len(READERS) if minutes else 3600)
    read, failures = run_cases(name, seeds, tmp_path, last, until)
    print(f"{name}: {read} files, {len(failures)} failures")
    for case, text in failures[:20]:
        print(f"--- {name}, case {case}: {text}\n")
        keep_case(name, seeds, case)
    assert not failures, (
        f"{len(failures)} of {read} files: first case {failures[0][0]}: {failures[0][1]}"
    )
    assert read


def run_cases(name, seeds, folder, last, until) -> tuple[int, list[tuple[int, str]]]:
    """Files read, and (case, what went wrong); a child that ends is followed by another."""
    context, progress, first, failures = _forkserver(), folder / "progress", 0, []
    while first < last and time.time() < until and len(failures) < 200:
        progress.write_bytes(NUMBER.pack(first))
        here, there = context.Pipe()
        work = folder / "work"
        work.mkdir(exist_ok=True)
        given = (there, sys.path, name, str(seeds), str(work), first, last, until, str(progress))
        child = context.Process(target=fuzz, args=given, daemon=True)
        child.start()
        there.close()
        answer = wait_for(child, here, progress)
        if isinstance(answer, tuple):
            return first + answer[0], failures + answer[1]
        case = NUMBER.unpack(progress.read_bytes())[0]
        failures.append((case, answer))
        first = case + 1
    return first, failures


def wait_for(child, connection, progress) -> tuple | str:
    """What a child sends, or how it ended without a word."""
    before, changed = b"", time.time()
    while not connection.poll(1):
        now = progress.read_bytes()
        if now != before:
            before, changed = now, time.time()
        elif time.time() - changed > SILENT_SECONDS:
            child.kill()
            child.join()
            return f"no progress in {SILENT_SECONDS} s"
    try:
        return connection.recv()
    except EOFError:
        child.join()
        return f"the process ended with {child.exitcode} (-27: it computed for too long)"


def keep_case(name, seeds, case) -> None:
    """Leave the file of a failure where a person can look at it."""
    folder = Path("build/fuzz") / f"{name}-{case}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prepare_case(READERS[name], seeds, folder, case)
