"""How fast it is: python scripts/benchmark.py [--case NAME …] [--rounds N] [--out FILE.md] [--peer]

Every figure is the median over rounds; what is compared takes turns, because machines drift. The
cases are in benchmarks/cases; `--case all-gpu` measures one GPU in less than eight minutes, and
`python -m benchmarks.roofline` prints what no program could be faster than.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the cases are no part of what is installed

from benchmarks.cases import CASES, CPU_CASES
from benchmarks.cases.case_context import Given
from benchmarks.cases.gpu import GPU_CASES, gpu_table, measure_gpu, replaceable
from benchmarks.corpus import write_corpus
from benchmarks.machine import describe
from benchmarks.table_rows import Missed, Row, facts, number, table, write
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
        help=f"any of {', '.join(names)}; those of a CPU if none is named",
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--out", type=Path, help="write the table here too (.md; .json beside it)")
    parser.add_argument("--peer", action="store_true", help="against transformers' Trainer too")
    args = parser.parse_args()
    on_gpu = [name for name in args.case if name not in CASES]
    if on_gpu and len(on_gpu) < len(args.case):
        parser.error("all-gpu and gpu-… have a table of their own: name them or the others.")
    if on_gpu:
        chosen = list(GPU_CASES) if "all-gpu" in on_gpu else on_gpu
        out = args.out or (ROOT / "benchmarks" / "gpu.md" if "all-gpu" in on_gpu else None)
        rows = measure_gpu(chosen)
        if args.out is None and out and not replaceable(out, rows):
            print(f"{out} has figures and this machine none: left as it is", file=sys.stderr)
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
        given = Given(write_corpus(Path(folder), vocabulary), args.rounds, args.peer)
        for case in args.case:
            try:
                for row in CASES[case](given):
                    print(f"{row.what}: {number(row.median)} {row.unit}", file=sys.stderr)
                    rows.append(row)
            except Missed as why:
                print(f"{case}: {why}", file=sys.stderr, flush=True)
                rows.append(Row(case, "", missed=str(why)))
    return rows


def _model() -> dict[str, str]:
    spec = FAMILIES["llama3"]
    parameters = spec.count_parameters(spec.flavors["quickstart"])
    words = f"quickstart, {parameters:,} parameters, 16 sequences of 256"
    return {"model": f"{words}, where a case says nothing else"}


if __name__ == "__main__":
    main()
