"""A look at runs: python -m titanlite_lab COMMAND."""

from __future__ import annotations

import sys

from titanlite_lab.dispatch import run_command

COMMANDS = {
    "report": "one HTML page about one or several runs",
    "compare": "the metrics of two runs, step by step; exit code 0 if they agree",
    "loss": "a picture of the loss of a run",
    "evaluate": "downstream tasks on a checkpoint or a Hugging Face folder, through lm-eval",
    "scaling-laws": "fit, optimum, bias, ladder",
    "parity": "write, compare: evidence that another trainer computes what titanlite computes",
    "check-mup": "the slopes of the activations over the width; exit code 0 if they are flat",
    "drill": "faults in a run of yours; its end must equal an undisturbed run, bit by bit",
}

if __name__ == "__main__":
    sys.exit(run_command("titanlite_lab", COMMANDS, sys.argv[1:]))
