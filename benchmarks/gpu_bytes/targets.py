"""What the important jobs cost on a GPU, counted, and the most that each may cost.

    PYTHONPATH=~/triton python -m benchmarks.gpu_bytes.targets            # compare with the page
    PYTHONPATH=~/triton python -m benchmarks.gpu_bytes.targets --write    # write the page

Counts are those of code compiled for an H100, so they need Triton, but no GPU. They depend on the
versions of torch and Triton, not on the machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "gpu_bytes.md"
TITLE = "| metric | counted | limit |\n| --- | ---: | ---: |\n"
SAME = 0.02  # relative difference of a count that is the same
BLOCKS = 2  # that are traced; the others of a model are equal
LLAMA_8B = 8192 * 128256  # logits of one sequence
PARAMETERS = 2 * 4096 * 128256 + BLOCKS * 218_112_000  # of that many blocks
ROWS_30B = 4096 * 2048 * BLOCKS  # tokens x dim x blocks

Counts = dict[str, Any]  # the file of `benchmarks.gpu_bytes --json`


@dataclass(frozen=True)
class Metric:
    """One number of a job."""

    name: str
    most: float
    count: Callable[[Counts], float]


def _sum(counts: Counts, part: str, *numbers: str) -> float:
    """Numbers of all parts whose name starts with `part`."""
    parts = [each for name, each in counts["parts"].items() if name.startswith(part)]
    return sum(each[number] for each in parts for number in numbers)


def _block_gb(counts: Counts) -> float:
    return _sum(counts, "blocks", "read", "written") / BLOCKS / 1e9


def _block_kernels(counts: Counts) -> float:
    return _sum(counts, "blocks", "kernels") / BLOCKS


def _update_bytes(counts: Counts) -> float:
    parts = ("FSDP", "clipping", "optimizer")
    return sum(_sum(counts, part, "read", "written") for part in parts) / PARAMETERS


def _block(name: str, most_gb: float, most_kernels: float) -> tuple[Metric, Metric]:
    return (
        Metric(f"GB a block, {name}", most_gb, _block_gb),
        Metric(f"kernels a block, {name}", most_kernels, _block_kernels),
    )


BASE = (
    f"--model.n_layers={BLOCKS} --training.global_batch_size=1 --training.dtype=bfloat16"
    " --attention.backend=cudnn"
)
DENSE = f"--job.config_file=llama3_8b {BASE}"
BLOCKS_ONLY = f"{DENSE} --compile.components=['model'] --optimizer.name=SGD"
FLOAT8 = f"{BLOCKS_ONLY} --quantize.linear.float8.recipe_name"
GATHERS = "--quantize.linear.float8.enable_fsdp_float8_all_gather=true"
EXPERTS = (
    f"--job.config_file=qwen3_30b_a3b {BASE} --training.seq_len=4096"
    " --compile.components=['model'] --optimizer.name=SGD"
    " --compile.enable=true --activation_checkpoint.mode=none"
    " --parallelism.expert_parallel_degree"
)
JOBS: dict[str, tuple[Metric, ...]] = {  # ranks and settings -> what is counted of one rank
    f"1 {DENSE} --optimizer.state_dtype=8bit": (
        *_block("bf16, few activations saved", 4.6, 14),
        Metric(
            "saved bf16 elements a token and block",
            47_700,
            lambda c: c["saved_bytes"] / 2 / BLOCKS / 8192,
        ),
        Metric(
            "bytes a logit of the loss and its weights' gradient",
            9.2,
            lambda c: _sum(c, "loss", "read", "written") / LLAMA_8B,
        ),
        Metric(
            "warp instructions x 32 a parameter, 8-bit AdamW",
            165,
            lambda c: _sum(c, "optimizer", "instructions") * 32 / PARAMETERS,
        ),
        Metric("bytes a bf16 parameter outside of matmuls, one rank", 12.5, _update_bytes),
        Metric("waits of the host in a step", 0, lambda c: len(c["waits"])),
    ),
    f"1 {DENSE} --training.dtype=float32": (
        Metric("bytes an fp32 parameter outside of matmuls, one rank", 62.0, _update_bytes),
    ),
    f"1 {BLOCKS_ONLY} --activation_checkpoint.mode=none": _block("bf16, no recomputation", 4.2, 14),
    f"1 {FLOAT8}=tensorwise {GATHERS}": _block("Float8 tensorwise, Float8 gathers", 7.1, 60),
    f"1 {FLOAT8}=rowwise": _block("Float8 rowwise", 8.7, 65),
    f"1 {FLOAT8}=rowwise_with_gw_hp": _block("Float8 rowwise_with_gw_hp", 7.0, 52),
    f"1 {EXPERTS}=1": (
        Metric(
            "kernels a layer of experts, forward",
            32,
            lambda c: _sum(c, "experts, forward", "kernels") / BLOCKS,
        ),
        Metric(
            "kernels a layer of experts, backward",
            40,
            lambda c: _sum(c, "experts, backward", "kernels") / BLOCKS,
        ),
        Metric(
            "bytes a token and dim of a layer of experts, forward",
            90,
            lambda c: _sum(c, "experts, forward", "read", "written") / ROWS_30B,
        ),
    ),
    f"8 {EXPERTS}=8 --training.global_batch_size=8": (
        Metric("waits of the host, a layer of experts", 1, lambda c: len(c["waits"]) / BLOCKS),
    ),
}


def count_metrics() -> list[tuple[Metric, float]]:
    """Every metric with its number, counted now; takes about 2 minutes a job."""
    counted = []
    for job, metrics in JOBS.items():
        ranks, *settings = job.split()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "counts.json"
            options = ["--gpu", "H100", "--ranks", ranks, "--json", str(file)]
            command = [sys.executable, "-m", "benchmarks.gpu_bytes", *options, *settings]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
            counts = json.loads(file.read_text())
        counted += [(metric, metric.count(counts)) for metric in metrics]
    return counted


def read_page() -> dict[str, tuple[float, float]]:
    """Each metric of the page: its number, and the most that it may be."""
    rows = re.findall(r"^\| (.+?) \| ([\d.,]+) \| ([\d.,]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {
        name: (float(number.replace(",", "")), float(most.replace(",", "")))
        for name, number, most in rows
    }


def main(argv: list[str]) -> int:
    counted = count_metrics()
    if "--write" in argv:
        _write_page(counted)
    page = read_page()
    changed = 0
    for metric, number in counted:
        before = page.get(metric.name, (0.0, 0.0))[0]
        differs = abs(number - before) > SAME * before
        changed += differs
        print(f"{number:12,.1f}  {metric.name}" + f"  (page: {before:,.1f})" * differs)
    return 1 if changed else 0


def _write_page(counted: list[tuple[Metric, float]]) -> None:
    head = PAGE.read_text().partition(TITLE)[0]
    rows = (f"| {metric.name} | {number:,.1f} | {metric.most:,g} |\n" for metric, number in counted)
    PAGE.write_text(head + TITLE + "".join(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
