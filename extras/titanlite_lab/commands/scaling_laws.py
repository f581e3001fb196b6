"""Scaling laws: python -m titanlite_lab scaling-laws COMMAND …

fit SOURCE       fit a law to a table (CSV) or to a folder of runs, with its errors and picture
optimum BUDGET   the model size and the tokens for FLOPs, GPU-hours, money, or a loss
bias             what isoFLOP parabolas (Chinchilla's approach 2) find on exact losses of a law
ladder TOML      write the TOMLs of small runs to fit
"""

from __future__ import annotations

import argparse
import sys

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite_lab.scaling.commands.bias import add_bias_arguments, run_bias
from titanlite_lab.scaling.commands.fit import add_fit_arguments, run_fit
from titanlite_lab.scaling.commands.ladder import add_ladder_arguments, run_ladder
from titanlite_lab.scaling.commands.optimum import add_optimum_arguments, run_optimum


def main(argv: list[str]) -> int:
    arguments = _parse(argv)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add_arguments, run in (
        ("fit", add_fit_arguments, run_fit),
        ("optimum", add_optimum_arguments, run_optimum),
        ("bias", add_bias_arguments, run_bias),
        ("ladder", add_ladder_arguments, run_ladder),
    ):
        command = commands.add_parser(name)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser.parse_args(argv)
