"""Plot the losses and learning rate of a run: python -m titanlite_lab loss RUN_FOLDER"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.metrics import METRICS_FILE
from titanlite_lab.loss_curve import draw_loss


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "run", metavar="RUN_FOLDER", type=Path, help="a job.dump_folder, with its metrics.jsonl"
    )
    parser.add_argument("--out", type=Path, help="the plot (default: RUN_FOLDER/loss.png)")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.run / "loss.png"
    try:
        draw_loss(arguments.run / METRICS_FILE, out)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(out)
    return EXIT_DONE
