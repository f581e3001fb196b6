"""The table of a step: counts, and the times that they predict."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.corpus import write_corpus
from benchmarks.gpu_bytes.steps import Step, trace_step
from benchmarks.gpu_bytes.work import Matmul, Work
from titanlite.job import Job, read_job
from titanlite_planner.hardware import parse_gpus
from titanlite_planner.time.efficiency import find_efficiency
from titanlite_planner.time.kernels import BACKWARD_ATTENTION, KERNEL_S, KernelTimes
from titanlite_planner.workload import MatmulPrecision

CAPABILITIES = {"A100": "8.0", "H100": "9.0", "B200": "10.0"}
CLOCK_HZ = {"A100": 1.41e9, "H100": 1.7e9, "B200": 1.8e9}  # under load; assumed, not measured
COPY = 0.83  # of the bandwidth of memory; measured on one H100 (gpu_check.md), taken for the others
ISSUE = 0.65  # of the cycles in which a scheduler could issue an instruction; assumed
SCHEDULERS = 4  # of a multiprocessor
LARGE = 1024  # a matmul with all sides of this size or more fills the multiprocessors
RANDOM_IDS = 258


@dataclass(frozen=True)
class Times:
    """Predicted milliseconds of a part of a step."""

    by_bytes: float  # of all kernels but matmuls and attention
    by_instructions: float  # of the compiled ones of them
    matmuls: float
    attention: float

    @property
    def total(self) -> float:
        return max(self.by_bytes, self.by_instructions) + self.matmuls + self.attention


def settings_of_trace(folder: Path, settings: list[str]) -> list[str]:
    """The settings of a job, with random data, three steps, and without what is not of a step."""
    (folder / "out").mkdir()
    corpus = write_corpus(folder / "corpus", RANDOM_IDS, documents=100)
    fixed = {
        "job.device": "cuda",
        "job.dump_folder": folder / "out",
        "data.tokenizer": "none",
        "data.sources": f'[{{ name = "random", path = "{corpus / "train"}" }}]',
        "data.validation": "[]",
        "validation.enable": "false",
        "checkpoint.enable": "false",
        "metrics.enable_tensorboard": "false",
        "metrics.log_freq": "1000",
        "training.steps": "3",
    }
    return [*settings, *(f"--{key}={value}" for key, value in fixed.items())]


def predict(work: Work, kernels: KernelTimes) -> Times:
    """The times that the counts of a part predict."""
    gpu = kernels.gpu
    warps_per_second = gpu.multiprocessors * SCHEDULERS * CLOCK_HZ[gpu.name] * ISSUE
    matmuls = sum(_matmul_seconds(m, kernels) * count for m, count in work.matmuls.items())
    attention = 0.0
    for call, count in work.attention.items():
        rate = kernels.attention_rate("flash2" if call.kernel == "flash" else "native", "bfloat16")
        # the planner's factor includes that a backward has 2.5 times the FLOPs
        slower = BACKWARD_ATTENTION / 2.5 if call.is_backward else 1.0
        attention += count * call.flops / rate * slower
    return Times(
        1e3 * (work.bytes / (COPY * gpu.memory_gb_per_s * 1e9) + KERNEL_S * work.kernels),
        1e3 * work.instructions / warps_per_second,
        1e3 * matmuls,
        1e3 * attention,
    )


def _matmul_seconds(matmul: Matmul, kernels: KernelTimes) -> float:
    name = str(matmul.dtype).removeprefix("torch.")
    precision: MatmulPrecision = "bfloat16"
    if name == "float32":
        precision = "float32"
    elif name.startswith("float8"):
        precision = "float8"
    return kernels.matmul(matmul.m, matmul.k, matmul.n, precision)


def print_step(
    gpu: str, ranks: int, json_file: str | None, settings: list[str], folder: Path
) -> int:
    """Trace the steady step of a job for a GPU, print its table, and write its counts.

    `folder`: an empty one, for the data of the job.
    """
    arguments = settings_of_trace(folder, settings)
    job = read_job(arguments, ranks, here=False)
    capability = CAPABILITIES[gpu] if job.config.compiles else ""
    if capability:
        from benchmarks.gpu_bytes.target import prepare_triton  # needs Triton

        prepare_triton(capability)
    step = trace_step(arguments, ranks, capability)
    if json_file:
        Path(json_file).write_text(json.dumps(counts(step), indent=1) + "\n")
    kernels = KernelTimes(parse_gpus(f"{ranks}x{gpu}").gpu, find_efficiency(gpu))
    print("\n".join(table(step, kernels)))
    print("\n".join(summary(step, job, kernels)))
    return 0


def counts(step: Step) -> dict[str, Any]:
    """The counts of a step, which do not depend on the speed of a GPU."""
    numbers = ("kernels", "read", "written", "minimum", "instructions", "flops")
    parts = {
        name: {number: getattr(work, number) for number in numbers}
        for name, work in sorted(step.parts.items())
    }
    return {"parts": parts, "saved_bytes": step.saved_bytes, "waits": step.waits}


def table(step: Step, kernels: KernelTimes) -> list[str]:
    """A line for each part, and the sum."""
    titles = ("part", "kernels", "GB", "minimum", "G instr.", "TFLOP")
    times = ("ms bytes", "instr.", "matmuls", "attention", "ms")
    lines = [f"{titles[0]:20s}" + "".join(f"{title:>10s}" for title in (*titles[1:], *times))]
    whole = Work()
    for name, work in sorted(step.parts.items()):
        whole.add(work)
        lines.append(_line(name, work, predict(work, kernels)))
    predicted = [predict(work, kernels) for work in step.parts.values()]
    total = Times(*(sum(column) for column in zip(*map(_columns, predicted), strict=True)))
    lines.append(_line("step", whole, total, sum(part.total for part in predicted)))
    return lines


def _columns(times: Times) -> tuple[float, float, float, float]:
    return times.by_bytes, times.by_instructions, times.matmuls, times.attention


def _line(name: str, work: Work, times: Times, total: float | None = None) -> str:
    counts = (
        f"{work.kernels:10,d}{work.bytes / 1e9:10.2f}{work.minimum / 1e9:10.2f}"
        f"{work.instructions / 1e9:10.2f}{work.flops / 1e12:10.2f}"
    )
    columns = (*_columns(times), times.total if total is None else total)
    return f"{name:20s}{counts}" + "".join(f"{value:10.1f}" for value in columns)


def summary(step: Step, job: Job, kernels: KernelTimes) -> list[str]:
    """What the whole step says about the job, and its predicted speed."""
    tokens = job.global_batch * job.config.training.seq_len
    rank_tokens = tokens // job.degrees.batch
    seconds = sum(predict(work, kernels).total for work in step.parts.values()) / 1e3
    flops = sum(m.flops * n for work in step.parts.values() for m, n in work.matmuls.items())
    large = sum(
        m.flops * n
        for work in step.parts.values()
        for m, n in work.matmuls.items()
        if min(m.m, m.k, m.n) >= LARGE
    )
    speed = tokens / job.degrees.ranks / seconds
    mfu = speed * job.flops_per_token / kernels.gpu.peak_flops("bfloat16")
    return [
        f"saved by compiled forwards: {step.saved_bytes / rank_tokens:,.0f} bytes a token",
        f"matmul FLOPs with every side of {LARGE} or more: {large / max(flops, 1):.1%}",
        f"the host waits for: {', '.join(step.waits) or 'nothing'}",
        f"predicted: {1e3 * seconds:,.0f} ms a step, {speed:,.0f} tokens/s a GPU, MFU {mfu:.1%}"
        " (causal attention); communication of several ranks is not part of it",
    ]
