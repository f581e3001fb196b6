"""The [elastic] section, and the layout for the ranks that are present."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from titanlite.distributed.mesh import DIMENSIONS, ParallelismConfig, resolve_degrees
from titanlite.elastic.rows import rank_rows
from titanlite.errors import ConfigError, UserError
from titanlite.settings import Positive

Checked = tuple[Any, list[UserError]]  # (job, []), or (None, its problems)


@dataclass(frozen=True)
class ElasticLayout:
    """An entry of elastic.layouts; other keys are as in [parallelism] and [training]."""

    ranks: Positive
    data_parallel_replicate_degree: Positive | None = None
    data_parallel_shard_degree: Positive | None = None
    context_parallel_degree: Positive | None = None
    tensor_parallel_degree: Positive | None = None
    pipeline_parallel_degree: Positive | None = None
    expert_parallel_degree: Positive | None = None
    expert_tensor_parallel_degree: Positive | None = None
    local_batch_size: Positive | None = None

    def apply(self, section: Any) -> Any:
        """A section with the keys that this entry sets."""
        given = {f.name: getattr(self, f.name, None) for f in fields(section)}
        return replace(section, **{key: v for key, v in given.items() if v is not None})


@dataclass(frozen=True)
class ElasticConfig:
    """[elastic] Start on any number of ranks, with the same batches and losses."""

    enable: bool = False
    # choose a layout for the ranks that are present; those that it cannot use wait as spares, and
    # idle sequences complete a batch that the ranks cannot divide
    layouts: list[ElasticLayout] = field(default_factory=list)
    # tables of `ranks`, degrees and local_batch_size: the one of most ranks, of those present, is
    # used; unset: the degrees of [parallelism], and as many data-parallel ranks as possible
    lost_after_seconds: Positive = 10  # a machine without heartbeats for so long is lost

    @property
    def silent_limit(self) -> float:
        """Seconds without heartbeats after which a rank is lost, if the timeouts are longer."""
        return self.lost_after_seconds if self.enable else math.inf


def check_elastic_job(config: Any, ranks: int, check: Callable[[Any, int], Checked]) -> Checked:
    """`check` every layout of elastic.layouts; the job on the one for `ranks` ranks."""
    section, training, listed = config.parallelism, config.training, config.elastic.layouts
    if training.global_batch_size == -1:
        problem = "elastic.enable = true: training.global_batch_size = -1 depends on the layout."
        return None, [ConfigError(problem, fix="Set training.global_batch_size to a number.")]
    layouts = sorted(listed, key=lambda layout: -layout.ranks)
    layouts = layouts or _find_layouts(section, training.global_batch_size)
    if (least := layouts[-1].ranks) > ranks:
        problem = f"elastic.enable = true: {ranks} ranks are too few; the least is {least}."
        fix = f"Start {least} ranks or more, or set elastic.layouts."
        return None, [ConfigError(problem, fix=fix)]
    chosen = next(layout for layout in layouts if layout.ranks <= ranks)
    others = [layout for layout in listed if layout is not chosen]
    for layout in [*others, chosen]:  # the job is that of the last one
        sections = {"parallelism": layout.apply(section), "training": layout.apply(training)}
        job, problems = check(replace(config, **sections), layout.ranks)
        if problems:
            where = f"elastic.layouts of {layout.ranks} ranks: " if listed else ""
            return None, [ConfigError(f"{where}{p.message}", fix=p.fix) for p in problems]
    cost = _describe_cost(config, layouts, chosen.ranks, ranks)
    return replace(job, configured=config, cost=cost), []


def _find_layouts(section: ParallelismConfig, batch: int) -> list[ElasticLayout]:
    """The layouts with the degrees of `section`, the largest first.

    None has more data-parallel ranks than a batch has sequences. If none is valid, an invalid one.
    """
    unit, found = math.prod(getattr(section, d.key) for d in DIMENSIONS if d.name != "shard"), []
    for shard in range(batch // section.data_parallel_replicate_degree, 0, -1):
        with suppress(ConfigError):
            resolve_degrees(section, shard * unit)
            found.append(ElasticLayout(shard * unit))
    return found or [ElasticLayout(unit)]


def _describe_cost(config: Any, layouts: list[ElasticLayout], used: int, ranks: int) -> str:
    """The spares among `ranks`, the idle sequences, and the nearest numbers of ranks without."""
    idle, batch = {}, config.training.global_batch_size
    for layout in layouts:
        data_ranks = resolve_degrees(layout.apply(config.parallelism), layout.ranks).batch
        rows = rank_rows(batch, data_ranks, layout.apply(config.training).local_batch_size)
        idle[layout.ranks] = 1 - batch / (rows * data_ranks)
    text = f"{used} of {ranks} ranks work, {ranks - used} wait as spares;"
    text += f" {idle[used]:.1%} of the sequences are idle"
    near = [n for n in idle if n >= ranks and not idle[n]][-1:]
    near += [n for n in idle if n < ranks and not idle[n]][:1]
    if ranks in near:
        return text
    return f"{text}; on {' or '.join(map(str, near)) or 'no number of'} ranks nothing is idle"
