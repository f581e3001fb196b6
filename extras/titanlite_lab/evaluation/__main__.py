"""Evaluate a checkpoint in a process of its own: python -m titanlite_lab.evaluation"""

from __future__ import annotations

import sys

from titanlite_lab.evaluation.command import run_evaluation

if __name__ == "__main__":
    sys.exit(run_evaluation(sys.argv[1:]))
