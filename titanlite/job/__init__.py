"""The composed, checked configuration, and the builders of a run's components."""

from __future__ import annotations

from titanlite.job.build import Extend, RunParts, keep_run, open_run, open_services
from titanlite.job.config import JobConfig
from titanlite.job.job import Job
from titanlite.job.read import read_job
from titanlite.job.start import log_start
from titanlite.job.torchtitan_keys import MOVED

__all__ = [
    "MOVED",
    "Extend",
    "Job",
    "JobConfig",
    "RunParts",
    "keep_run",
    "log_start",
    "open_run",
    "open_services",
    "read_job",
]
