"""The command `titanlite`: one name for every command of the trainer and of the packages beside it.

It imports none of them before a command is chosen, so that `titanlite --help` is instant.
"""

from __future__ import annotations

import sys

import titanlite
from titanlite.errors import EXIT_DONE
from titanlite_corpus.__main__ import COMMANDS as CORPUS
from titanlite_lab.__main__ import COMMANDS as LAB
from titanlite_lab.dispatch import run_command
from titanlite_planner.__main__ import COMMANDS as PLANNER
from titanlite_post.__main__ import COMMANDS as POST

TABLES = {  # package -> its commands
    "titanlite_cli": {
        "train": "train on one process; on several: torchrun … -m titanlite.train",
        "tokenizer": "train a byte-level BPE tokenizer",
        "generate": "text from a checkpoint; answers with a chat template",
        "checkpoint": "list, verify, remove, average; to and from Hugging Face",
    },
    "titanlite_corpus": CORPUS,
    "titanlite_planner": PLANNER,
    "titanlite_lab": LAB,
    "titanlite_post": POST,
}


def main() -> int:
    """Run `titanlite` with the arguments of this process; returns the exit code."""
    return run_titanlite(sys.argv[1:])


def run_titanlite(argv: list[str]) -> int:
    """Run the command that `argv` begins with; returns the exit code."""
    if argv == ["--version"]:
        print(titanlite.__version__)
        return EXIT_DONE
    commands = {name: text for table in TABLES.values() for name, text in table.items()}
    package = next((p for p, table in TABLES.items() if argv and argv[0] in table), "titanlite_cli")
    return run_command(package, commands, argv, program="titanlite")
