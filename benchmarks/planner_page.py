"""Tables of docs/explanation/planner.md: errors against published runs, and known training runs.

python -m benchmarks.planner_page            # print them
python -m benchmarks.planner_page --write    # write them into the page
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite_planner.accuracy.published_rows import published_models
from titanlite_planner.accuracy.row_errors import error_table, model_flops, summarise_errors
from titanlite_planner.accuracy.rows import Prediction, predict_rows, read_rows
from titanlite_planner.hardware import find_cluster
from titanlite_planner.model_shape import ModelShape
from titanlite_planner.plan.cost import estimate_cost
from titanlite_planner.time.step import estimate_step
from titanlite_planner.workload import Layout, Numerics, Overlap, Workload

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "planner.md"
ERRORS = ROOT / "extras/titanlite_planner/accuracy/published_errors.toml"
RUNS = ROOT / "benchmarks" / "published_runs.csv"


@dataclass(frozen=True)
class KnownRun:
    """A training run whose figures were published."""

    name: str
    workload: Workload
    machine: str
    tokens: float
    published: tuple[str, ...]  # bubble, FLOPs, TFLOP/s a GPU, days, GPU-hours, t CO₂


def _shape(name: str) -> ModelShape:
    sizes = dict(published_models()[name.lower()])
    head_dim = sizes.pop("head_dim", None) or sizes["dim"] // sizes["n_heads"]
    return ModelShape(name, head_dim=head_dim, **sizes)


def known_runs() -> list[KnownRun]:
    """The runs whose figures guides of this field print."""
    gpt3 = Workload(
        _shape("GPT3-175B"),
        Layout(
            tensor=8, pipeline=8, replicate=16, sequence_parallel=False, sharded="nothing",
            schedule="Interleaved1F1B", stages_per_rank=2, micro_batch=1, n_microbatches=96,
        ),
        2048, recompute="full", compiled=False, fused_attention=False, overlap=Overlap(data=False),
    )  # fmt: skip
    llama2 = Workload(
        _shape("LLAMA2-7B"), Layout(shard=256, micro_batch=4), 4096,
        compiled=False, attention_kernel="flash1",
    )  # fmt: skip
    llama3 = Workload(
        _shape("LLAMA3.1_405B"),
        Layout(
            tensor=8, pipeline=16, shard=128, sharded="gradients", schedule="Interleaved1F1B",
            stages_per_rank=8, micro_batch=1, n_microbatches=16, reshard_after_forward=False,
        ),
        8192, numerics=Numerics(), overlap=Overlap(pipeline=True),
    )  # fmt: skip
    return [
        KnownRun("GPT-3 175B, 1,024 A100, 300 B tokens", gpt3, "dgx-a100", 300e9,
                 ("3.6 %", "3.14e23", "140, of hardware FLOPs", "34", "836 k", "")),
        KnownRun("LLaMA-2 7B, A100, 2 T tokens", llama2, "dgx-a100", 2e12,
                 ("", "8.4e22", "", "", "184 k", "31.2")),
        KnownRun("Llama 3 405B, 16,384 H100, 15.6 T tokens", llama3,
                 "dgx-h100", 15.6e12, ("", "3.8e25", "400", "54 (a part)", "30.84 M", "8,930")),
    ]  # fmt: skip


def known_table() -> str:
    """Estimates beside published figures, as Markdown."""
    lines = [
        "| run | | bubble | FLOPs | TFLOP/s a GPU | days | GPU-hours | at list price |"
        " MWh | t CO₂ |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in known_runs():
        cluster = find_cluster(run.machine, run.workload.layout.gpus)
        step = estimate_step(run.workload, cluster)
        cost = estimate_cost(run.workload, cluster, step, run.tokens)
        layout = run.workload.layout
        bubble = (layout.pipeline - 1) / layout.stages_per_rank / layout.n_microbatches
        flops = model_flops(run.workload) * cost.steps
        rate = model_flops(run.workload) / layout.gpus / step.total / 1e12
        dollars = f"{cost.dollars / 1e6:.2f} M$" if cost.dollars else ""
        lines += [
            f"| {run.name} | estimated | {bubble:.1%} | {flops:.2e} | {rate:.0f} | {cost.days:.0f}"
            f" | {_short(cost.gpu_hours)} | {dollars} | {(cost.kwh or 0) / 1000:,.0f}"
            f" | {cost.co2_tonnes or 0:,.0f} |",
            f"| | published | {' | '.join(run.published[:-1])} | | | {run.published[-1]} |",
        ]
    return "\n".join(lines)


def errors_toml(predictions: Sequence[Prediction]) -> str:
    """The errors by kind of model and GPU type that a plan prints, as TOML."""
    found = summarise_errors(predictions).items()
    lines = [
        f'"{name}" = {{ rows = {each.rows}, median = {each.median:.3f},'
        f" within_20 = {each.within_20:.2f} }}"
        for name, each in found
        if name.count(",") == 1
    ]
    head = "# Errors of step times by kind of run and GPU type: benchmarks.planner_page --write"
    return "\n".join([head, *lines]) + "\n"


def _short(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value / 1e3:.0f} k"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    tables = {
        "errors": error_table(predict_rows(read_rows(RUNS))),
        "known": known_table(),
    }
    if arguments.write:
        ERRORS.write_text(errors_toml(predict_rows(read_rows(RUNS))), encoding="utf-8")
    else:
        print("\n\n".join(tables.values()))
        return
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
        text, found = re.subn(
            pattern, lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.DOTALL
        )
        assert found == 1, name
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
