"""Steps and seconds of each optimizer until the loss that AdamW ends with.

python -m benchmarks.steps_to_loss TEXT [--sweep AdamW=4e-3 Muon=4e-3,8e-3 …] [--steps 400]
python -m benchmarks.steps_to_loss --job train_configs/quickstart.toml [--sweep …]

TEXT is a text file, or several: tiny Shakespeare, for example. The model is a small Llama on bytes,
so that the vocabulary needs no training. With --job, it is that job instead, whose corpus must be
prepared. Each optimizer is trained with every learning rate of its sweep and takes the one with the
lowest validation loss at the end. All runs see the same samples in the same order, from the same
initial weights, with the same schedule: a warmup of a tenth, then a cosine to a tenth of the rate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.table_rows import grid, number, write_table

ROOT = Path(__file__).parents[1]
REFERENCE = "AdamW"
DOCUMENT_CHARACTERS = 2000
SWEEPS: dict[str, tuple[float, ...]] = {  # learning rates of each optimizer
    "AdamW": (2e-3, 4e-3, 8e-3),
    "Adam": (2e-3, 4e-3, 8e-3),
    "SGD": (0.03, 0.1, 0.3),
    "Lion": (4e-4, 8e-4, 1.6e-3),
    "Adafactor": (1.6e-2, 4e-2, 1e-1),  # relative to the RMS of each parameter
    "Muon": (4e-3, 8e-3, 1.6e-2),
    "SOAP": (4e-3, 8e-3, 1.6e-2),
}
NO_DECAY = ["--optimizer.weight_decay", "0"]  # Adam and SGD would add it to the gradients
OPTIONS = {"Adam": NO_DECAY, "SGD": ["--optimizer.momentum", "0.9", *NO_DECAY]}  # else: defaults
JOB = """
[model]
dim = 128
n_layers = 4
n_heads = 4
n_kv_heads = 4
hidden_dim = 352
vocab_size = 258
rope_theta = 10000.0
[training]
seq_len = 128
local_batch_size = 16
mixed_precision_param = "float32"
[activation_checkpoint]
mode = "none"
[validation]
enable = true
seq_len = 128
local_batch_size = 16
"""
SCHEDULE = ["--lr_scheduler.decay_type", "cosine", "--lr_scheduler.min_lr_factor", "0.1"]
SCHEDULE += ["--lr_scheduler.decay_ratio", "1"]


@dataclass(frozen=True)
class OptimizerRun:
    """One run: the validation loss over steps and seconds of training."""

    optimizer: str
    lr: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    seconds: tuple[float, ...]  # of computing, without validation, at each of `steps`

    def reach(self, loss: float) -> tuple[float, float] | None:
        """(steps, seconds) until `loss`, interpolated between two validations; None: never."""
        for index, reached in enumerate(self.losses):
            if reached > loss:
                continue
            if index == 0 or reached == self.losses[index - 1]:
                return self.steps[index], self.seconds[index]
            before = self.losses[index - 1]
            part = (before - loss) / (before - reached)
            steps, seconds = (
                values[index - 1] + part * (values[index] - values[index - 1])
                for values in (self.steps, self.seconds)
            )
            return steps, seconds
        return None


def prepare(texts: Sequence[Path], folder: Path) -> Path:
    """Write the corpus of `texts`, and a job that trains on it; returns the job's TOML."""
    folder.mkdir()
    with (folder / "documents.jsonl").open("w") as documents:  # a .txt would be one document
        for text in (path.read_text("utf-8") for path in texts):
            for start in range(0, len(text), DOCUMENT_CHARACTERS):
                part = text[start : start + DOCUMENT_CHARACTERS]
                documents.write(json.dumps({"text": part}) + "\n")
    command = [sys.executable, "scripts/prepare_data.py", str(folder / "documents.jsonl")]
    command += ["--tokenizer", "bytes", "--validation-share", "0.03", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    sources = [f'{{ name = "text", path = "{folder / side}" }}' for side in ("train", "validation")]
    data = f'[data]\ntokenizer = "bytes"\nsources = [{sources[0]}]\nvalidation = [{sources[1]}]\n'
    job = folder / "job.toml"
    job.write_text(JOB + data)
    return job


def train(optimizer: str, lr: float, steps: int, job: Path, out: Path) -> OptimizerRun:
    """Train once, in a process of its own."""
    command = [sys.executable, "train.py", "--job.config_file", str(job), "--job.device", "cpu"]
    command += ["--job.dump_folder", str(out), "--optimizer.name", optimizer]
    command += ["--optimizer.lr", str(lr), "--training.steps", str(steps)]
    command += ["--lr_scheduler.warmup_steps", str(steps // 10), *SCHEDULE]
    command += ["--metrics.log_freq", "1", "--checkpoint.enable", "false"]
    command += ["--validation.freq", str(max(1, steps // 40)), *OPTIONS.get(optimizer, [])]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True)
    return read_optimizer_run(optimizer, lr, out / "metrics.jsonl")


def read_optimizer_run(optimizer: str, lr: float, metrics: Path) -> OptimizerRun:
    """The validations of a run that logged every step."""
    steps, losses, seconds, spent = [], [], [], 0.0
    for record in map(json.loads, metrics.read_text().splitlines()):
        if "event" not in record:
            spent += record["step_seconds"] + record["data_seconds"]
        elif record["event"] == "validation" and record["loss"] is not None:
            steps.append(record["step"])
            losses.append(record["loss"])
            seconds.append(spent)
    return OptimizerRun(optimizer, lr, tuple(steps), tuple(losses), tuple(seconds))


def best_of(runs: Sequence[OptimizerRun]) -> OptimizerRun:
    """The run with the lowest last validation loss."""
    return min(runs, key=lambda run: run.losses[-1] if run.losses else float("inf"))


def table_of(runs: Sequence[OptimizerRun]) -> str:
    """A Markdown table of the best run of each optimizer, against AdamW."""
    by_name = {name: [r for r in runs if r.optimizer == name] for name in SWEEPS}
    best = {name: best_of(own) for name, own in by_name.items() if own}
    reference = best[REFERENCE]
    target = reference.losses[-1]
    lines = []
    for name, run in best.items():
        reached = run.reach(target)
        steps, seconds = reached or (None, None)
        ratio = number(steps / reference.steps[-1]) if steps else "-"
        slower = number(run.seconds[-1] / reference.seconds[-1])
        shown = [number(steps) if steps else "not reached", ratio]
        shown += [number(seconds) if seconds else "-", slower]
        lines.append([name, f"{run.lr:g}", f"{run.losses[-1]:.3f}", *shown])
    header = ["optimizer", "best learning rate", "final validation loss"]
    header += [f"steps to {target:.3f}", "of AdamW's", "seconds to it", "time a step, of AdamW's"]
    return grid(header, lines, "lrrrrrr")


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """An optimizer and its learning rates, from "Muon=4e-3,8e-3"."""
    name, _, rates = text.partition("=")
    if name not in SWEEPS:
        raise argparse.ArgumentTypeError(f"{name}: not one of {', '.join(SWEEPS)}")
    return name, tuple(map(float, rates.split(",")))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", metavar="TEXT", type=Path, nargs="*")
    parser.add_argument("--job", type=Path, metavar="FILE.toml")
    parser.add_argument("--sweep", nargs="+", type=parse_sweep, metavar="OPTIMIZER=RATE,…")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("steps_to_loss.md"))
    arguments = parser.parse_args(argv)
    sweeps = dict(arguments.sweep or SWEEPS)
    if REFERENCE not in sweeps:
        parser.error(f"--sweep: {REFERENCE} is missing, which all others are compared with")
    if bool(arguments.texts) == bool(arguments.job):
        parser.error("give TEXT or --job")
    runs = []
    with tempfile.TemporaryDirectory(prefix="steps_to_loss") as temporary:
        job = arguments.job or prepare(arguments.texts, Path(temporary) / "corpus")
        for name, rates in sweeps.items():
            for lr in rates:
                out = Path(temporary) / f"{name}-{lr:g}"
                out.mkdir()
                runs.append(train(name, lr, arguments.steps, job, out))
                print(f"{name} lr {lr:g}: validation loss {runs[-1].losses[-1]:.4f}", flush=True)
    shown = ", ".join(f"{name} {' '.join(f'{lr:g}' for lr in sweeps[name])}" for name in sweeps)
    entries = {**describe("-m benchmarks.steps_to_loss", argv), "learning rates": shown}
    write_table(arguments.out, entries, "\n" + table_of(runs), runs)
    print(arguments.out.read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
