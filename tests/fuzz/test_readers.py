"""Mutated files must not make a reader crash, hang, exhaust memory, run code or touch other files.

`scripts/test.sh --fuzz MINUTES` fuzzes all readers for so long; the suite reads a few files each.
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

from conftest import ROOT
from tests.checkpoint.test_untrusted import convert_to_format_2
from tests.distributed.ranks import _forkserver
from tests.faults.launch import LaunchedRun
from tests.fuzz.child import CASE_NUMBER, CaseRange, prepare_case, read_cases
from tests.fuzz.readers import READERS, TEXT
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.data.bpe import train_bpe
from titanlite.storage import StorageFolder
from titanlite_corpus.tests.chats import CHATML

CASES = 40  # of each reader in the suite
STALL_SECONDS = 300  # limit for one file; CPU_SECONDS ends a child that computes


@pytest.fixture(scope="session")
def seeds(corpus, tmp_path_factory) -> Path:
    """A valid file or folder for each reader, written by the programs that users run."""
    folder = tmp_path_factory.mktemp("seeds")
    run = folder / "run.toml"
    run.write_text(RUN.format(folder=folder, corpus=corpus))
    with LaunchedRun(1, folder / "out", "--job.config_file", str(run)) as launched:
        assert launched.wait() == [0], launched.output
    shutil.copytree(folder / "out" / "checkpoint" / "step-1", folder / "step")
    shutil.copytree(folder / "step", folder / "old")
    convert_to_format_2(folder / "old")
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
    template = json.dumps({"chat_template": [{"name": "default", "template": CHATML}]})
    (folder / "tokenizer_config.json").write_text(template)
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
def test_no_mutated_file_crashes_a_reader_or_makes_it_act(name, seeds, tmp_path, request):
    minutes = request.config.getoption("--fuzz")
    last = CASES if not minutes else 2**62
    until = time.time() + (60 * minutes / len(READERS) if minutes else 3600)
    read, failures = run_cases(name, seeds, tmp_path, last, until)
    print(f"{name}: {read} files, {len(failures)} failures")
    for case, text in failures[:20]:
        print(f"--- {name}, case {case}: {text}\n")
        store_failed_case(name, seeds, case)
    assert not failures, (
        f"{len(failures)} of {read} files: first case {failures[0][0]}: {failures[0][1]}"
    )
    assert read


def run_cases(name, seeds, folder, last, until) -> tuple[int, list[tuple[int, str]]]:
    """Number of files read, and failures: (case, text). After a child ends, the next continues."""
    context, progress, first, failures = _forkserver(), folder / "progress", 0, []
    work = folder / "work"
    while first < last and time.time() < until and len(failures) < 200:
        progress.write_bytes(CASE_NUMBER.pack(first))
        parent_end, child_end = context.Pipe()
        work.mkdir(exist_ok=True)
        cases = CaseRange(name, seeds, work, progress, first, last, until)
        child = context.Process(target=read_cases, args=(child_end, sys.path, cases), daemon=True)
        child.start()
        child_end.close()
        result = wait_for_result(child, parent_end, progress)
        if isinstance(result, tuple):
            return first + result[0], failures + result[1]
        case = CASE_NUMBER.unpack(progress.read_bytes())[0]
        failures.append((case, result))
        first = case + 1
    return first, failures


def wait_for_result(child, connection, progress) -> tuple | str:
    """What a child sends, or how it ended without sending anything."""
    content, changed = b"", time.time()
    while not connection.poll(1):
        now = progress.read_bytes()
        if now != content:
            content, changed = now, time.time()
        elif time.time() - changed > STALL_SECONDS:
            child.kill()
            child.join()
            return f"no progress in {STALL_SECONDS} s"
    try:
        return connection.recv()
    except EOFError:
        child.join()
        return f"the process ended with {child.exitcode} (-27: it exceeded its CPU time)"


def store_failed_case(name, seeds, case) -> None:
    """Write the mutated file of a failure into build/fuzz, for debugging."""
    folder = Path("build/fuzz") / f"{name}-{case}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prepare_case(READERS[name], seeds, folder, case)
