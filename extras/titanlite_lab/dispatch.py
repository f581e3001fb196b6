"""`titanlite COMMAND …`, and `python -m PACKAGE COMMAND …` of the packages beside the trainer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import titanlite
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.extensions import load_extensions


def run_command(
    package: str, commands: Mapping[str, str], argv: list[str], program: str = ""
) -> int:
    """Run the module `package.commands.NAME` of a command; returns the exit code.

    `commands`: the name of each on the command line -> what it does. `program`: how the user calls
    them; default: python -m PACKAGE.
    """
    program = program or f"python -m {package}"
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command without a traceback
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, commands))
        print(f"usage: {program} COMMAND …\n")
        print("\n".join(f"  {name:{width}}  {text}" for name, text in commands.items()))
        return EXIT_DONE
    try:
        check_one_checkout()
        if name not in commands:
            raise UserError(f'command "{name}": must be {", ".join(commands)}.')
        rest = load_extensions(rest)
        sys.argv[0] = f"{program} {name}"  # for the usage that argparse prints
        module = import_module(f"{package}.commands.{name.replace('-', '_')}")
        return module.main(rest)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR


def check_one_checkout() -> None:
    """Raise UserError if titanlite and this package are of different checkouts."""
    ours, trainer = Path(__file__).parents[1], Path(titanlite.__file__).parents[1]
    expected = ours.parent if ours.name == "extras" else ours
    if trainer != expected:
        raise UserError(
            f"titanlite is imported from {trainer}, but {__name__.split('.')[0]} from {ours}.",
            fix=f"Install the checkout that you use: pip install -e {trainer}",
        )
