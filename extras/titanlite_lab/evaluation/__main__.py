"""Evaluate a checkpoint in a process of its own: python -m titanlite_lab.evaluation"""

from __future__ import annotations

import sys

from titanlite_lab.evaluation.command import run_command

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
