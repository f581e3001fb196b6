"""What a job will need, computed before it runs."""

from __future__ import annotations

from titanlite.planning.memory import advise_on_memory

__all__ = ["advise_on_memory"]
