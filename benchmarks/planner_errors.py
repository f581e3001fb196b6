"""The error table of the planner against published runs.

python -m benchmarks.planner_errors [--rows FILE] [--out predictions.csv]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite_planner.accuracy.row_errors import error_table
from titanlite_planner.accuracy.rows import predict_rows, read_rows, write_predictions

RUNS = Path(__file__).parent / "published_runs.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=RUNS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    predictions = predict_rows(read_rows(arguments.rows))
    if arguments.out:
        write_predictions(predictions, arguments.out)
    print(error_table(predictions))


if __name__ == "__main__":
    main()
