"""Predicted against measured step time on this machine: four sizes, on 1 and on 2 processes.

python -m benchmarks.planner_cpu [--steps 12]

The machine is measured before and after each run, with as many processes at once as the run has: a
virtual machine may be half as fast some seconds later. The prediction is the mean of both; nothing
is fitted to the runs. Run it on an idle machine: measured are wall-clock seconds of a step, the
median of the steps. With --cpu-time, seconds that a process computed: those of a run less those of
a run of two steps.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from titanlite_planner.accuracy.calibrate import read_measured_run
from titanlite_planner.hardware import measure_cpu
from titanlite_planner.time.step import estimate_step
from titanlite_planner.workload import Workload

ROOT = Path(__file__).parents[1]
SIZES = {
    "quickstart": [],
    "256 x 6": ["--model.n_layers", "6"],
    "384 x 4": ["--model.dim", "384", "--model.n_heads", "6", "--model.n_kv_heads", "3",
                "--model.hidden_dim", "1024"],
    "512 x 4": ["--model.dim", "512", "--model.n_heads", "8", "--model.n_kv_heads", "4",
                "--model.hidden_dim", "1536"],
}  # fmt: skip


CORPUS = ROOT / "outputs" / "planner_cpu"


def prepare() -> None:
    """The bytes of this repository's pages as a corpus."""
    if (CORPUS / "train").exists():
        return
    pages = [page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md"))]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pages.txt").write_text("\n".join(pages), encoding="utf-8")
        command = [sys.executable, "scripts/prepare_data.py", folder, "--tokenizer", "bytes"]
        command += ["--out", str(CORPUS), "--validation-share", "0"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def train(arguments: list[str], processes: int, folder: Path, steps: int) -> float:
    """Take some steps of the quickstart's model; returns the CPU seconds of a process."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [
        "train.py", "--model.flavor", "quickstart", "--training.steps", str(steps),
        "--data.tokenizer", "bytes", "--data.sources", f'[{{name="text", path="{CORPUS}/train"}}]',
        "--job.dump_folder", str(folder), "--job.device", "cpu", "--metrics.log_freq", "1",
        "--training.local_batch_size", "8", "--training.seq_len", "256",
        "--training.mixed_precision_param", "float32", "--activation_checkpoint.mode", "none",
        *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / processes


def measure_run(
    settings: list[str], processes: int, steps: int, cpu_time: bool
) -> tuple[Workload, float]:
    """The workload of a run, and its seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        total = train(settings, processes, Path(folder), steps)
        run = read_measured_run(Path(folder))
    if not cpu_time:
        return run.workload, run.seconds
    with tempfile.TemporaryDirectory() as folder:
        total -= train(settings, processes, Path(folder), 2)
    return run.workload, total / (steps - 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    torch.set_num_threads(1)  # as the runs
    prepare()
    print("| model | processes | predicted ms | measured ms | error |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for processes in arguments.processes:
        for name in arguments.sizes:
            before = measure_cpu(processes, 1.0, clock)
            workload, seconds = measure_run(
                SIZES[name], processes, arguments.steps, arguments.cpu_time
            )
            clusters = before, measure_cpu(processes, 1.0, clock)
            predicted = sum(estimate_step(workload, cluster).total for cluster in clusters) / 2
            print(
                f"| {name} | {processes} | {predicted * 1e3:.0f} | {seconds * 1e3:.0f}"
                f" | {predicted / seconds - 1:+.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
