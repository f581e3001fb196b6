"""Memory, time, layouts and cost estimated without a GPU; dry run; scaling laws; check of muP."""

from __future__ import annotations

from titanlite.planning.dry_run_report import report_dry_run
from titanlite.planning.memory_advice import advise_on_memory

__all__ = ["advise_on_memory", "report_dry_run"]
