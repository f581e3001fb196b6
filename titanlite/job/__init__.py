"""The composed, checked configuration, and the builders of a run's components."""

from __future__ import annotations

from titanlite.job.build import RunServices, open_run, open_services
from titanlite.job.checks import check_config
from titanlite.job.config import JOB_PROPERTIES, MOVED, JobConfig
from titanlite.job.job import Job, read_job, resolve_compute_dtype

__all__ = [
    "JOB_PROPERTIES",
    "MOVED",
    "Job",
    "JobConfig",
    "RunServices",
    "check_config",
    "open_run",
    "open_services",
    "read_job",
    "resolve_compute_dtype",
]
