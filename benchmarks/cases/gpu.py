"""One GPU: 1B, 3B and 8B, eager, compiled and in Float8, in less than eight minutes.

Estimated time: 5 runs for each of 5 combinations of model and sequence length. A run takes 5 s for
the CUDA context and the parameters, 10 s (bf16) or 15 s (Float8) to compile with an empty cache,
and 9 s for 3 equal measurements, of which the first is not counted: 14 + 24 + 24 + 29 + 29 s
per combination, 600 s in total. Imports overlap with the previous run. The most important runs come
first; runs that do not fit into the budget are reported as not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.corpus import write_corpus
from benchmarks.gpu_plans import (
    FAMILY,
    LOSS_CHUNK_TOKENS,
    SHAPES,
    USABLE_SHARE,
    Plan,
    estimate_peak,
    plans,
    share_of_peak,
)
from benchmarks.processes import as_arguments, failure_reason, python_path, step_lines
from benchmarks.table_rows import NotMeasured, grid, number
from titanlite.metrics.gpu_peaks import peak_flops
from titanlite.metrics.hardware import measure_matmul_flops

BUDGET_SECONDS = 470  # a run starts only if it is expected to end within this time
RUN_SECONDS, MAX_RUN_SECONDS = 35, 120  # usual and maximum duration of a run
READING_SECONDS = 2.5  # time between two lines of metrics.jsonl
FLOAT8 = {
    "model.converters": '["quantize.linear.float8"]',
    "compile.enable": "true",
}
ACCUMULATED = (
    "bf16 compiled, 8 micro-batches"  # each of 8 GPUs has an eighth of the optimizer's work
)
MODES = {
    "bf16 eager": {},
    "bf16 compiled": {"compile.enable": "true"},
    ACCUMULATED: {"compile.enable": "true"},
    "Float8 tensorwise compiled": {**FLOAT8, "quantize.linear.float8.recipe_name": "tensorwise"},
    "Float8 rowwise compiled": {**FLOAT8, "quantize.linear.float8.recipe_name": "rowwise"},
}
GPU_CASES = {f"gpu-{flavor}-{seq_len}": (flavor, seq_len) for flavor, seq_len in SHAPES}
TARGETS = {  # on one H200
    ("8B", 8192, "bf16 compiled"): ">= 60 % MFU, full attention",
    ("8B", 8192, "Float8 tensorwise compiled"): ">= 1.35 x bf16 compiled",
    ("1B", 2048, "bf16 compiled"): ">= 65,000 tokens/s",
    ("1B", 8192, "bf16 compiled"): ">= 42,000 tokens/s",
    ("3B", 2048, "bf16 compiled"): ">= 33,000 tokens/s",
}
PUBLISHED = {  # published figures per GPU; not measured here
    ("8B", 8192, "bf16 eager"): "5,762 tokens/s, 33.7 % [1]",
    ("8B", 8192, "bf16 compiled"): "6,667 tokens/s, 39.0 % [1]; 7B at 2,048: 10,643, 46.4 % [2]",
    ("8B", 8192, "Float8 tensorwise compiled"): "8,532 tokens/s [1]",
    ("1B", 2048, "bf16 compiled"): "45,455 tokens/s [2]",
    ("1B", 8192, "bf16 compiled"): "29,157 tokens/s [2]",
    ("3B", 2048, "bf16 compiled"): "24,142 tokens/s [2]",
    ("3B", 8192, "bf16 compiled"): "16,578 tokens/s [2]",
}
NOTES = f"""
MFU counts the model's FLOPs without recomputation, against the published dense bf16 peak, in Float8
rows too: "causal" counts half of the attention, "full" all of it, as [1] and [2] do. The share of
the measured peak is causal; that peak is the best of many bf16 matmuls of 8,192 x 8,192 in the same
run. Every run is train.py with `loss.chunk_tokens = {LOSS_CHUNK_TOKENS}`; tokens/s include
everything between the ends of two steps. "compile s" is how much later than in the eager run the
first step ended, with an empty cache. The models of the published figures differ slightly:

- [1] torchtitan, Llama 3.1 8B at 8,192 on 8 H100 (96 GB HBM2e, 500 W), selective recomputation:
  <https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md>;
  its MFU follows from its tokens/s, full attention and 989.5 TFLOP/s.
- [2] llm-foundry, MPT 1B, 3B and 7B, with a smaller vocabulary, on 8 or 16 H100 80GB:
  <https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md>.
"""


@dataclass(frozen=True)
class GpuRow:
    """One run; figures that were not measured are None, and `missed` says why."""

    flavor: str
    seq_len: int
    mode: str
    plan: str = ""  # state precision and recomputation
    micro_batch: int | None = None
    tokens_per_second: float | None = None
    mfu_causal: float | None = None
    mfu_full: float | None = None
    share_of_measured_peak: float | None = None
    times_bf16_compiled: float | None = None
    peak_memory_gib: float | None = None
    first_step_seconds: float | None = None  # from the start of the run, after imports
    compile_seconds: float | None = None
    data_share: float | None = None
    missed: str = ""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 8 if self.mode == ACCUMULATED else 1

    @property
    def key(self) -> tuple[str, int, str]:
        return self.flavor, self.seq_len, self.mode


def measure_gpu(cases: Sequence[str]) -> list[GpuRow]:
    """A row for every mode of every case; without a GPU, every row is not measured."""
    shapes = [GPU_CASES[name] for name in cases]
    empty = [GpuRow(flavor, length, mode) for flavor, length in shapes for mode in MODES]
    if not torch.cuda.is_available():
        return [replace(blank, missed="no CUDA device") for blank in empty]
    end, rows = time.monotonic() + BUDGET_SECONDS, []
    device = torch.device("cuda")
    measured_peak = measure_matmul_flops(torch.bfloat16, device, seconds=1.0)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        runner = _Runner(Path(folder))
        try:
            for blank in empty:
                if time.monotonic() + RUN_SECONDS > end:
                    rows.append(replace(blank, missed=f"beyond the budget of {BUDGET_SECONDS} s"))
                    continue
                row = _measure(runner, blank, measured_peak, end)
                print(f"{row.key}: {row.missed or number(row.tokens_per_second)}", file=sys.stderr)
                rows.append(row)
        finally:
            runner.close()
    return add_ratios(rows)


def _measure(runner: _Runner, blank: GpuRow, measured_peak: float, end: float) -> GpuRow:
    """Measure the first plan that does not run out of memory; the plans are the best first."""
    sizes, length = FAMILY.flavors[blank.flavor], blank.seq_len
    properties = torch.cuda.get_device_properties(0)
    published = peak_flops(properties.name, torch.bfloat16)
    usable = USABLE_SHARE * properties.total_memory
    peak = partial(estimate_peak, blank.flavor, length)
    for plan in plans(length, usable, "compiled" in blank.mode, peak):
        if time.monotonic() + RUN_SECONDS > end:
            return replace(blank, missed=f"beyond the budget of {BUDGET_SECONDS} s")
        description = f"{plan.state.name}; {plan.recompute.name}"
        try:
            launched, steps = runner.run(blank, plan, published or measured_peak)
        except _OutOfMemory:
            continue
        except NotMeasured as reason:
            missed = str(reason)
            return replace(blank, plan=description, micro_batch=plan.micro_batch, missed=missed)
        speed, counted = speed_of(steps), steps[2:]
        waited = sum(step["data_seconds"] for step in counted)
        return replace(
            blank,
            plan=description,
            micro_batch=plan.micro_batch,
            tokens_per_second=speed,
            mfu_causal=share_of_peak(speed, sizes, length, published),
            mfu_full=share_of_peak(speed, sizes, length, published, full_attention=True),
            share_of_measured_peak=share_of_peak(speed, sizes, length, measured_peak),
            peak_memory_gib=max(step["peak_memory_gib"] for step in steps),
            first_step_seconds=steps[0]["time"] - launched,
            data_share=waited / (waited + sum(step["step_seconds"] for step in counted)),
        )
    return replace(blank, missed="no plan fits this GPU")


def speed_of(steps: Sequence[dict]) -> float:
    """Tokens/s from the second line, at which the warmup ends, to the last line."""
    first, last = steps[1], steps[-1]
    return (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])


def add_ratios(rows: Sequence[GpuRow]) -> list[GpuRow]:
    """The rows with their ratios to other rows of the same model and sequence length."""
    by_key = {row.key: row for row in rows}

    def with_ratios(row: GpuRow) -> GpuRow:
        eager = by_key.get((row.flavor, row.seq_len, "bf16 eager"))
        compiled = by_key.get((row.flavor, row.seq_len, "bf16 compiled"))
        if row.tokens_per_second is None:
            return row
        if compiled and compiled.tokens_per_second:
            ratio = row.tokens_per_second / compiled.tokens_per_second
            row = replace(row, times_bf16_compiled=ratio)
        if "compiled" in row.mode and eager and eager.first_step_seconds:
            delay = row.first_step_seconds - eager.first_step_seconds
            row = replace(row, compile_seconds=delay)
        return row

    return [with_ratios(row) for row in rows]


def settings_of_run(
    blank: GpuRow, plan: Plan, out: Path, corpus: Path, log_freq: int
) -> dict[str, object]:
    """Settings of one run that writes a line of metrics.jsonl every `log_freq` steps."""
    return {
        "job.dump_folder": out,
        "job.device": "cuda",
        "model.flavor": blank.flavor,
        "data.sources": f'[{{ name = "text", path = "{corpus}/train" }}]',
        "training.seq_len": blank.seq_len,
        "training.steps": 3 * log_freq,
        "training.global_batch_size": blank.micro_batches * plan.micro_batch,
        "metrics.log_freq": log_freq,
        "loss.chunk_tokens": LOSS_CHUNK_TOKENS,
        **plan.settings,
        **MODES[blank.mode],
    }


# --- processes -----------------------------------------------------------------------------------


class _OutOfMemory(Exception):
    """A run needs more memory than the GPU has."""


class _Runner:
    """Runs train.py in one process per run; the next process imports meanwhile."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        vocabulary = FAMILY.flavors["8B"].vocab_size  # the same in all three flavors
        self.corpus = write_corpus(folder / "corpus", vocabulary)
        self._start_next()

    def _start_next(self) -> None:
        self.count += 1
        self.errors = self.folder / f"{self.count}.err"
        cache = str(self.folder / "compiled")  # empty, so that compilation is measured
        with open(self.errors, "w", encoding="utf-8") as errors:
            self.waiting = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.preloaded_train"],
                env={**os.environ, "PYTHONPATH": python_path(), "TORCHINDUCTOR_CACHE_DIR": cache},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )

    def run(self, blank: GpuRow, plan: Plan, peak: float) -> tuple[float, list[dict]]:
        """Run one plan; returns its start, in seconds since 1970, and its step lines."""
        out, sizes = self.folder / f"run-{self.count}", FAMILY.flavors[blank.flavor]
        flops = plan.micro_batch * blank.seq_len * FAMILY.flops_per_token(sizes, blank.seq_len)
        flops *= 1 + plan.recompute.recomputed / 3
        flops *= blank.micro_batches
        log_freq = min(20, max(2, round(READING_SECONDS / (2 * flops / peak))))  # at half the peak
        settings = settings_of_run(blank, plan, out, self.corpus, log_freq)
        process, errors = self.waiting, self.errors
        self._start_next()
        launched = time.time()
        try:
            process.communicate(json.dumps(as_arguments(settings)) + "\n", timeout=MAX_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise NotMeasured(f"not finished after {MAX_RUN_SECONDS} s") from None
        output = errors.read_text(encoding="utf-8", errors="replace")
        if process.returncode:
            if "out of memory" in output.lower():
                raise _OutOfMemory
            raise NotMeasured(failure_reason(output) or f"exit code {process.returncode}")
        return launched, step_lines(out)

    def close(self) -> None:
        self.waiting.kill()
        self.waiting.communicate()


# --- the table -----------------------------------------------------------------------------------


def gpu_table(rows: Sequence[GpuRow]) -> str:
    """A Markdown table: one line per run, with targets and published figures."""
    header = (
        "model",
        "tokens",
        "run",
        "state and recomputation",
        "micro-batch",
        "tokens/s",
        "MFU, causal",
        "MFU, full",
        "of measured peak",
        "x bf16 compiled",
        "peak GiB",
        "first step s",
        "compile s",
        "waiting for data",
        "target",
        "published",
    )
    lines = [
        (
            row.flavor,
            f"{row.seq_len:,}",
            row.mode,
            row.missed or row.plan,
            number(row.micro_batch),
            number(row.tokens_per_second),
            _percent(row.mfu_causal),
            _percent(row.mfu_full),
            _percent(row.share_of_measured_peak),
            number(row.times_bf16_compiled),
            number(row.peak_memory_gib),
            number(row.first_step_seconds),
            number(row.compile_seconds) if "compiled" in row.mode else "",
            _percent(row.data_share),
            TARGETS.get(row.key, ""),
            PUBLISHED.get(row.key, ""),
        )
        for row in rows
    ]
    return grid(header, lines, "lrllrrrrrrrrrrll") + NOTES


def _percent(share: float | None) -> str:
    return number(share) if share is None else f"{share:.1%}"


def has_figures(rows: Sequence[GpuRow]) -> bool:
    """Whether anything was measured."""
    return any(row.tokens_per_second for row in rows)
