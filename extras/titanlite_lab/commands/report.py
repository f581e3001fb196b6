"""Write a report of one or several runs: python -m titanlite_lab report RUN… --out report.html

One HTML page without network: loss with its events, validation, learning rate, norms, throughput,
where the time went, checkpoints, differences of the configurations, and advice with the figure that
each follows from. Works while a run is training, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error, printable
from titanlite_lab.report.advice import advise
from titanlite_lab.report.run import write_report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="a job.dump_folder")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the first RUN)")
    arguments = parser.parse_args(argv)
    out = arguments.out or arguments.runs[0] / "report.html"
    try:
        runs = write_report(arguments.runs, out)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    for run in runs:
        for advice in advise(run):
            print(printable(f"{run.name}: {advice.title}: {advice.figure}. {advice.action}"))
    print(out)
    return EXIT_DONE
