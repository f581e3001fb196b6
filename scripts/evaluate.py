"""Evaluate a checkpoint on downstream tasks: python scripts/evaluate.py outputs/my_run"""

from __future__ import annotations

import sys
from pathlib import Path

import checkout  # noqa: F401

# lm-eval imports a package called evaluate, which this file would hide.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

from titanlite_lab.evaluation.command import run_command

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
