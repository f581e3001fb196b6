"""Downstream tasks on a checkpoint, through lm-eval."""

from titanlite_lab.evaluation.command import run_evaluation as main

__all__ = ["main"]
