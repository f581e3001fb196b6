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
from tests.distributed.ranks import _forkserver
from tests.faults.launch import LaunchedRun
from tests.fuzz.child import CASE_NUMBER, CaseRange, prepare_case, read_cases
from tests.fuzz.readers import READERS, TEXT
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.storage import StorageFolder
from titanlite_corpus.bpe import train_bpe
from titanlite_corpus.tests.chats import CHATML
from titanlite_corpus.tests.test_web_and_datasets import PAGE, warc_record
from titanlite_lab.commands import scaling_laws
from titanlite_lab.tests.test_report import start, step_line, write_run

CASES = 20  # of each reader in the suite
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
    shutil.copytree(folder / "out" / "checkpoint" / "step-1-hf", folder / "hf")
    write_records(folder)
    pages = [PAGE.format(number, "ä").encode() for number in range(9)]
    records = [
        warc_record("response", n, "text/html; charset=utf-8", p) for n, p in enumerate(pages)
    ]
    (folder / "pages.warc").write_bytes(b"".join(records))
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "schedule.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
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


def write_records(folder: Path) -> None:
    """What a long run records, and the files of the planner and of scaling laws."""
    steps = [step_line(s, 1000 + 2.5 * s, samples=s, z_loss=1e-4) for s in range(1, 31)]
    later = [step_line(step, 1100 + 2.5 * step) for step in range(25, 31)]
    events = [{"step": 26, "time": 1070.0, **event} for event in EVENTS]
    write_run(folder / "run", steps, events, later, [start(1000), start(1090, from_step=24)])
    shutil.copy(folder / "out" / "config.toml", folder / "run")
    scaling_laws.main(
        ["fit", str(SCALING_TABLE), "--bootstraps", "5", "--out", str(folder / "law.json")]
    )
    shutil.copy(SCALING_TABLE, folder / "scaling.csv")
    shown = (ROOT / "docs" / "explanation" / "planner.md").read_text("utf-8")
    (folder / "hardware.toml").write_text(shown.split("```toml\n")[-1].partition("```")[0])
    rows = (ROOT / "benchmarks" / "published_runs.csv").read_text("utf-8").splitlines()
    (folder / "rows.csv").write_text("\n".join([rows[0], *rows[40::60]]))
    sample = {"position": 3, "source": "code", "path": "corpus", "epoch": 0, "sample": 1}
    sample |= {"first_token": 48, "tokens": [1, 2], "ignored_labels": 1, "text": TEXT}
    document = {"shard": "code.bin", "document": 7, "first_token": 40, "tokens": 60}
    dump = {"step": 1, "position": 3, "samples": [sample | {"documents": [document] * 5}]}
    (folder / "step-1.json").write_text(json.dumps(dump))


SCALING_TABLE = ROOT / "extras/titanlite_lab/tests/data/gadre_c4.csv"
EVENTS = (
    {"event": "validation", "name": "all", "loss": 3.5, "perplexity": 33.0, "bits_per_byte": 1.2},
    {"event": "checkpoint_saved", "path": "step-24", "seconds": 1.0, "blocked_seconds": 0.1},
    {"event": "checkpoint_failed", "problem": "full", "failures": 1, "blocked_seconds": 0.1},
    {"event": "spike", "reason": "loss", "loss": 9.0, "grad_norm": None, "parameter": "wq"},
    {"event": "rolled_back", "from_step": 30, "reason": "loss", "path": "step-24"},
    {"event": "hardware_fault", "rank": 1, "host": "node-3"},
    {"event": "replica_mismatch", "ranks": [0, 2], "hosts": ["a", "b"], "parameter": "wq"},
    {"event": "straggler", "rank": 1, "host": "node-3", "slower": 0.3},
    {"event": "settings_changed", "changed": "optimizer.lr 0.1 -> 0.2"},
    {"event": "diverged", "reason": "inf", "loss": None, "grad_norm": 1.0},
    {"event": "stopped", "reason": "SIGTERM"},
)

RECIPE = """
out = "out"
tokenizer = "bytes"
[[sources]]
name = "a"
inputs = ["a.txt"]
[read]
on_error = "skip"
[filter]
rules = ["c4", "gopher_quality", "personal_data"]
[deduplicate]
"""
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
