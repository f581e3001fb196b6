"""Find the fastest layout of a model on a cluster; see --help."""

import sys

import checkout  # noqa: F401
from titanlite_lab.dispatch import run_command
from titanlite_planner.__main__ import COMMANDS

if __name__ == "__main__":
    sys.exit(run_command("titanlite_planner", COMMANDS, ["plan", *sys.argv[1:]]))
