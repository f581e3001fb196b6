"""Draw the loss of a run: python scripts/draw_loss.py RUN_FOLDER [--out FILE.png]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.metrics import METRICS_FILE
from titanlite.plots.loss_curve import draw_loss


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a job.dump_folder, with its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="the picture; RUN_FOLDER/loss.png if not given")
    asked = parser.parse_args(argv)
    png = asked.out or asked.run / "loss.png"
    try:
        draw_loss(asked.run / METRICS_FILE, png)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(png)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
