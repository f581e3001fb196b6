"""What follows from a job before, or without, running it."""

from __future__ import annotations

from titanlite.planning.memory import explain_out_of_memory

__all__ = [
    "explain_out_of_memory",
]
