"""Measure speed: python scripts/benchmark.py [--case NAME …] [--rounds N] [--out FILE.md] [--peer]

Every figure is the median over rounds. Compared programs run in alternation, because the speed of
machines drifts. The cases are in benchmarks/cases. `--case all-gpu` measures one GPU in less than
eight minutes, without rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import checkout  # noqa: F401
from benchmarks.cases import CASES, CPU_CASES
from benchmarks.cases.case_context import CaseContext
from benchmarks.cases.gpu import GPU_CASES, gpu_table, has_figures, measure_gpu
from benchmarks.corpus import write_corpus
from benchmarks.machine import describe
from benchmarks.table_rows import NotMeasured, Row, list_entries, number, table, write_table
from titanlite.models import FAMILIES

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    args = parse_arguments()
    gpu_cases = [name for name in args.case if name not in CASES]
    if gpu_cases:
        write_gpu_table(gpu_cases, args.out)
        return
    rows = measure_cases(args)
    print_and_write(
        args.out, describe("scripts/benchmark.py", sys.argv[1:]) | _model_entry(), table(rows), rows
    )


def parse_arguments() -> argparse.Namespace:
    """The arguments; refuses GPU cases together with other cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*CASES, "all-gpu", *GPU_CASES]
    parser.add_argument(
        "--case",
        nargs="+",
        choices=names,
        default=list(CPU_CASES),
        metavar="NAME",
        help=f"any of {', '.join(names)}; default: all CPU cases",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="number of measurements per case, except all-gpu and gpu-…",
    )
    parser.add_argument(
        "--out", type=Path, help="also write the table to this .md file, and a .json"
    )
    parser.add_argument(
        "--peer", action="store_true", help="also compare with transformers' Trainer"
    )
    args = parser.parse_args()
    if len({name in CASES for name in args.case}) > 1:
        parser.error(
            "all-gpu and gpu-… write a table with other columns: use them without other cases."
        )
    return args


def write_gpu_table(cases: list[str], out: Path | None) -> None:
    """Measure one GPU; `all-gpu` by default writes benchmarks/gpu.md, if it measured a figure."""
    all_cases = "all-gpu" in cases
    rows = measure_gpu(list(GPU_CASES) if all_cases else cases)
    if all_cases and out is None:
        default = ROOT / "benchmarks" / "gpu.md"
        if has_figures(rows):
            out = default
        else:
            print(f"nothing was measured: {default} is not written", file=sys.stderr)
    print_and_write(out, describe("scripts/benchmark.py", sys.argv[1:]), gpu_table(rows), rows)


def print_and_write(
    out: Path | None, entries: dict[str, str], markdown: str, rows: Sequence[object]
) -> None:
    """Print a table, and write it to `out` unless that is None."""
    if out:
        write_table(out, entries, markdown, rows)
    print(list_entries(entries) + markdown)


def measure_cases(args: argparse.Namespace) -> list[Row]:
    """Measure every case and print each row to stderr; a case that fails is a row, too."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = FAMILIES["llama3"].flavors["quickstart"].vocab_size
        context = CaseContext(write_corpus(Path(folder), vocabulary), args.rounds, args.peer)
        for case in args.case:
            try:
                for row in CASES[case](context):
                    print(f"{row.what}: {number(row.median)} {row.unit}", file=sys.stderr)
                    rows.append(row)
            except NotMeasured as reason:
                print(f"{case}: {reason}", file=sys.stderr, flush=True)
                rows.append(Row(case, "", missed=str(reason)))
    return rows


def _model_entry() -> dict[str, str]:
    spec = FAMILIES["llama3"]
    parameters = spec.count_parameters(spec.flavors["quickstart"])
    model = f"quickstart, {parameters:,} parameters, 16 sequences of 256"
    return {"model": f"{model}, unless a case names another"}


if __name__ == "__main__":
    main()
