"""A ladder: the TOMLs of small runs to fit a scaling law to."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.errors import ConfigError
from titanlite.job import Job
from titanlite.models import ModelSizes
from titanlite.optim.lr_schedule import DEFAULT_WARMUP_STEPS
from titanlite.settings import raise_together
from titanlite_lab.scaling.laws import FLOPS_PER_PARAMETER
from titanlite_lab.scaling.runs import count_parameters_by_kind

MIN_STEPS = 20  # of a run: with less, its batch is too large for its tokens
MAX_WARMUP = 0.1  # of a run's schedule
WIDTHS = ("hidden_dim", "expert_hidden_dim", "q_lora_rank", "kv_lora_rank")  # in proportion to dim


@dataclass(frozen=True)
class LadderSize:
    """Width and depth of a model; without a depth, in proportion to the width."""

    dim: int
    n_layers: int | None = None


@dataclass(frozen=True)
class LadderGrid:
    """Sizes, and for each the token counts: by exactly one of the last three."""

    sizes: Sequence[LadderSize]
    count: str = "all"  # what N counts in the next two
    tokens_per_parameter: Sequence[float] = ()
    flops: Sequence[float] = ()  # 6 N D
    tokens: Sequence[float] = ()

    def tokens_of(self, parameters: float) -> list[float]:
        """Token counts of a size."""
        by_flops = [flops / (FLOPS_PER_PARAMETER * parameters) for flops in self.flops]
        by_ratio = [ratio * parameters for ratio in self.tokens_per_parameter]
        return [*by_flops, *by_ratio, *self.tokens]


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder."""

    sizes: ModelSizes
    counts: Mapping[str, int]
    steps: int
    tokens: int
    flops: float  # of all matmuls and attention, not 6 N D

    @property
    def name(self) -> str:
        return f"dim{self.sizes.dim}-layers{self.sizes.n_layers}-steps{self.steps}"


def plan_ladder(job: Job, grid: LadderGrid) -> list[LadderRun]:
    """The runs of a grid, smallest first; raises all problems of the grid and of the job."""
    problems = list(_check_base(job))
    step_tokens = job.global_batch * job.config.training.seq_len
    runs = {}
    for size in grid.sizes:
        sizes, refused = _scale_sizes(job, size)
        problems += refused
        counts = count_parameters_by_kind(job.spec, sizes)
        for wanted in grid.tokens_of(counts[grid.count]):
            steps = round(wanted / step_tokens)
            if steps < MIN_STEPS:
                problems.append(_too_short(job, sizes, wanted, steps))
            tokens = steps * step_tokens
            per_token = job.spec.flops_per_token(sizes, job.config.training.seq_len)
            run = LadderRun(sizes, counts, steps, tokens, per_token * tokens)
            runs[run.name] = run
    raise_together(problems)
    return sorted(runs.values(), key=lambda run: run.flops)


def _check_base(job: Job) -> Iterator[ConfigError]:
    training, schedule = job.config.training, job.config.lr_scheduler
    if training.global_batch_size < 1:
        yield ConfigError(
            f"training.global_batch_size = {training.global_batch_size}: depends on the number of"
            " ranks; the runs of a ladder must have the same.",
            fix="Set it in the TOML.",
        )
    if training.batch_size_ramp:
        yield ConfigError(
            "training.batch_size_ramp: the runs of a ladder differ in length.", fix="Remove it."
        )
    for key in ("total_steps", "total_tokens"):
        if getattr(schedule, key) is not None:
            yield ConfigError(
                f"lr_scheduler.{key} = {getattr(schedule, key)}: each run of a ladder must end its"
                " schedule with its last step.",
                fix="Remove it.",
            )


def _scale_sizes(job: Job, size: LadderSize) -> tuple[ModelSizes, list[ConfigError]]:
    """The job's model with another width: heads of the same width, the other ratios kept."""
    base, known = job.sizes, {field.name for field in dataclasses.fields(job.sizes)}
    problems = []
    each = base.dim // math.gcd(base.dim, base.n_heads)  # as wide as a whole number of heads
    if size.dim % each:
        problems.append(
            ConfigError(
                f"--sizes {size.dim}: is not a multiple of {each}: the model has {base.n_heads}"
                f" heads for a dim of {base.dim}.",
                fix=f"Give multiples of {each}, or change model.n_heads.",
            )
        )
    heads = max(1, base.n_heads * size.dim // base.dim)
    wanted = max(1, heads * base.n_kv_heads // base.n_heads)
    scaled = {
        "dim": size.dim,
        "n_layers": size.n_layers or max(1, round(base.n_layers * size.dim / base.dim)),
        "n_heads": heads,
        "n_kv_heads": max(n for n in range(1, wanted + 1) if heads % n == 0),
    }
    for name in WIDTHS:
        if width := getattr(base, name, 0):  # 0: the model has none
            scaled[name] = max(8, 8 * round(width * size.dim / base.dim / 8))
    sizes = dataclasses.replace(base, **{k: v for k, v in scaled.items() if k in known})
    if not problems:
        problems += job.spec.find_size_problems(sizes)
    return sizes, problems


def _too_short(job: Job, sizes: ModelSizes, tokens: float, steps: int) -> ConfigError:
    training = job.config.training
    return ConfigError(
        f"dim {sizes.dim}: {tokens:,.0f} tokens are {steps} steps of {training.global_batch_size} x"
        f" {training.seq_len}; a run needs at least {MIN_STEPS}.",
        fix="Give more tokens, or set a smaller training.global_batch_size.",
    )


def write_ladder(job: Job, runs: Sequence[LadderRun], base: Path, folder: Path) -> list[Path]:
    """Write FOLDER/NAME.toml for each run, which writes to FOLDER/NAME; returns their paths.

    Raises ConfigError if the folder cannot be written, or has other TOMLs.
    """
    paths = [folder / f"{run.name}.toml" for run in runs]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if other := sorted(set(folder.glob("*.toml")) - set(paths)):
            raise ConfigError(
                f"{folder}: has {other[0].name}, which is not of this ladder.",
                fix="Give an empty folder.",
            )
        for run, path in zip(runs, paths, strict=True):
            path.write_text(_toml_of(job, run, base, folder), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}).", fix="Give another --out."
        ) from None
    return paths


def _toml_of(job: Job, run: LadderRun, base: Path, folder: Path) -> str:
    include = os.path.relpath(base, folder)  # of the including file
    schedule = job.config.lr_scheduler
    if schedule.warmup_tokens is not None:
        warmup = f"warmup_tokens = {min(schedule.warmup_tokens, int(MAX_WARMUP * run.tokens))}"
    else:
        steps = DEFAULT_WARMUP_STEPS if schedule.warmup_steps is None else schedule.warmup_steps
        warmup = f"warmup_steps = {min(steps, max(1, int(MAX_WARMUP * run.steps)))}"
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", *WIDTHS)
    known = {field.name for field in dataclasses.fields(run.sizes)}
    sizes = [f"{name} = {getattr(run.sizes, name)}" for name in names if name in known]
    counts = ", ".join(f"{count:,} ({kind})" for kind, count in run.counts.items())
    return "\n".join([
        f"# {counts} parameters, {run.tokens:,} tokens, {run.flops:.3g} FLOPs",
        f"include = [{json.dumps(include)}]", "",
        "[job]", f"dump_folder = {json.dumps(str(folder / run.name))}", "",
        "[model]", *sizes, "",
        "[training]", f"steps = {run.steps}", "",
        "[lr_scheduler]", warmup, "",
    ])  # fmt: skip
