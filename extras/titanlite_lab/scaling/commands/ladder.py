"""`ladder`: write the TOMLs of small runs to fit."""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite.job import read_job
from titanlite_lab.scaling.commands.arguments import numbers, sizes
from titanlite_lab.scaling.ladder import LadderGrid, plan_ladder, write_ladder
from titanlite_lab.scaling.laws import PARAMETER_COUNTS


def add_ladder_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, metavar="TOML", help="the base job: corpus, batch, learning rate, …")
    add("--out", type=Path, required=True, help="folder of the TOMLs and of their runs")
    add("--sizes", type=sizes, required=True, help="DIM or DIMxLAYERS, comma-separated")
    tokens = parser.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--tokens-per-parameter", type=numbers, default=())
    tokens.add_argument("--flops", type=numbers, default=(), help="6 N D of each size")
    tokens.add_argument("--tokens", type=numbers, default=())
    add("--count", choices=PARAMETER_COUNTS, default="all", help="what N counts")


def run_ladder(arguments: argparse.Namespace) -> None:
    job = read_job([f"--job.config_file={arguments.config}"], 1, here=False)
    grid = LadderGrid(
        arguments.sizes,
        arguments.count,
        arguments.tokens_per_parameter,
        arguments.flops,
        arguments.tokens,
    )
    runs = plan_ladder(job, grid)
    paths = write_ladder(job, runs, arguments.config, arguments.out)
    print(f"{'dim':>6} {'layers':>6} {'N (all)':>12} {'matmul':>12} {'blocks':>12}", end="")
    print(f" {'D':>14} {'D / N':>7} {'FLOPs':>9}")
    for run in runs:
        counts = "".join(f" {run.counts[kind]:12,}" for kind in PARAMETER_COUNTS)
        print(f"{run.sizes.dim:6} {run.sizes.n_layers:6}{counts}", end="")
        ratio = run.tokens / run.counts[arguments.count]
        print(f" {run.tokens:14,} {ratio:7.3g} {run.flops:9.2g}")
    print(f"{len(paths)} runs, {sum(run.flops for run in runs):.3g} FLOPs")
    if not job.config.validation.enable:
        print("validation.enable = false: the fit will use the training loss, which is noisier")
    if job.config.mup.base is None:
        print("no [mup]: all widths use the same optimizer.lr, which is the best for one of them")
    print(f'for toml in {arguments.out}/*.toml; do python train.py --job.config_file "$toml"; done')
