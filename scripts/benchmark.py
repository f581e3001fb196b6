"""Measure speed: python scripts/benchmark.py [--case NAME …] [--rounds N] [--out FILE.md] [--peer]

Every figure is the median over rounds. What is compared runs in alternation, because the speed of
machines drifts. The cases are in benchmarks/cases; `--case all-gpu` measures one GPU in less than
eight minutes; `python -m benchmarks.roofline` prints the roofline of those cases.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed with the package

from benchmarks.cases import CASES, CPU_CASES
from benchmarks.cases.case_context import CaseContext
from benchmarks.cases.gpu import GPU_CASES, gpu_table, has_figures, measure_gpu
from benchmarks.corpus import write_corpus
from benchmarks.machine import describe
from benchmarks.table_rows import NotMeasured, Row, facts, number, table, write
from titanlite.models import FAMILIES


def main() -> None:
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
    parser.add_argument("--rounds", type=int, default=3, help="number of measurements per case")
    parser.add_argument(
        "--out", type=Path, help="also write the table to this .md file, and a .json"
    )
    parser.add_argument(
        "--peer", action="store_true", help="also compare with transformers' Trainer"
    )
    args = parser.parse_args()
    gpu_cases = [name for name in args.case if name not in CASES]
    if gpu_cases and len(gpu_cases) < len(args.case):
        parser.error("all-gpu and gpu-… write another table: use them without other cases.")
    if gpu_cases:
        chosen = list(GPU_CASES) if "all-gpu" in gpu_cases else gpu_cases
        out = args.out or (ROOT / "benchmarks" / "gpu.md" if "all-gpu" in gpu_cases else None)
        rows = measure_gpu(chosen)
        if args.out is None and out and not has_figures(rows):
            print(f"nothing was measured: {out} is not written", file=sys.stderr)
            out = None
        markdown, about = gpu_table(rows), describe(sys.argv[1:])
    else:
        rows = _measure(args)
        markdown, about, out = table(rows), describe(sys.argv[1:]) | _model(), args.out
    if out:
        write(out, about, markdown, rows)
    print(facts(about) + markdown)


def _measure(args) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = FAMILIES["llama3"].flavors["quickstart"].vocab_size
        context = CaseContext(write_corpus(Path(folder), vocabulary), args.rounds, args.peer)
        for case in args.case:
            try:
                for row in CASES[case](context):
                    print(f"{row.what}: {number(row.median)} {row.unit}", file=sys.stderr)
                    rows.append(row)
            except NotMeasured as why:
                print(f"{case}: {why}", file=sys.stderr, flush=True)
                rows.append(Row(case, "", missed=str(why)))
    return rows


def _model() -> dict[str, str]:
    spec = FAMILIES["llama3"]
    parameters = spec.count_parameters(spec.flavors["quickstart"])
    model = f"quickstart, {parameters:,} parameters, 16 sequences of 256"
    return {"model": f"{model}, unless a case names another"}


if __name__ == "__main__":
    main()
