"""The planner: python -m titanlite_planner COMMAND."""

from __future__ import annotations

import sys

from titanlite_lab.dispatch import run_command

COMMANDS = {
    "plan": "the fastest layout of a model on a cluster, with memory, time and cost",
    "dry-run": "one step of every kind of rank on fake tensors: memory, FLOPs, collectives",
    "memory": "the estimated peak of a job, and what other settings would save",
    "draw": "the mesh of a TOML, and the schedule of its pipeline, computed or measured",
}

if __name__ == "__main__":
    sys.exit(run_command("titanlite_planner", COMMANDS, sys.argv[1:]))
