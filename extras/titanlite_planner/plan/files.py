"""The files of a plan: the best layout as a job's TOML, and the best layouts as JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.errors import ConfigError
from titanlite.job import JobConfig
from titanlite.runtime.out_of_memory import GIB
from titanlite.settings import to_toml
from titanlite_planner.plan.alternatives import Alternative
from titanlite_planner.plan.report import describe_choice, memory_parts, plan_cost
from titanlite_planner.plan.request import PlanRequest
from titanlite_planner.plan.search import PlannedLayout

TOML_NAME, JSON_NAME = "run.toml", "plan.json"


def write_plan(request: PlanRequest, layouts: Sequence[Alternative], folder: Path) -> list[Path]:
    """Write run.toml and plan.json to `folder`; raises ConfigError if that is not possible."""
    records = [{"best": labels, **_record(request, step)} for step, labels in layouts]
    files = {
        folder / TOML_NAME: planned_toml(request, layouts[0].step, folder / TOML_NAME),
        folder / JSON_NAME: json.dumps(records, indent=1) + "\n",
    }
    return write_text_files(files)


def write_text_files(files: Mapping[Path, str]) -> list[Path]:
    """Write each text to its path; raises ConfigError if that is not possible."""
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be written ({error.strerror}).", fix="Give another --out."
            ) from None
    return list(files)


def planned_toml(request: PlanRequest, step: PlannedLayout, path: Path) -> str:
    """The job as a TOML for train.py: the settings that differ from the defaults."""
    cluster, degrees = request.cluster, step.choice.frame.degrees
    comments = [
        f"Planned by titanlite plan for {cluster.gpus} x {cluster.gpu.name}: {degrees}",
        describe_choice(step.choice),
        f"estimated: {step.time.total:.3g} s a step, {step.memory.total / GIB:.1f} GiB on the"
        " worst rank",
        f"check it: titanlite train --job.config_file {shlex.quote(str(path))} --job.check true"
        f" --job.check_ranks {cluster.gpus}",
    ]
    section = dataclasses.replace(
        step.job.config.job, config_file=None, print_config=False, check=False, check_ranks=None
    )
    config = dataclasses.replace(step.job.config, job=section)
    default = JobConfig()
    # the local batch is a part of the layout: it is written when it is the default, too
    training = dataclasses.replace(default.training, local_batch_size=-1)
    text = to_toml(config, omit=dataclasses.replace(default, training=training))
    return "\n".join([*(f"# {line}" for line in comments), "", text])


def _record(request: PlanRequest, step: PlannedLayout) -> dict[str, Any]:
    choice = step.choice
    return {
        "degrees": dataclasses.asdict(choice.frame.degrees),
        "micro_batch": choice.frame.micro_batch,
        "n_microbatches": choice.frame.n_microbatches,
        "precision": choice.frame.precision,
        "schedule": choice.schedule,
        "stages_per_rank": choice.stages_per_rank,
        **dataclasses.asdict(choice.options),
        "step_s": step.time.total,
        "time_s": step.time.parts,
        "peak_gib": step.memory.total / GIB,
        "memory_gib": {name: part / GIB for name, part in memory_parts(step.memory).items()},
        "cost": dataclasses.asdict(plan_cost(request, step)),
    }
