"""Partition a model into pipeline stages: module names and costs in, module names per stage out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.errors import ConfigError

_DEGREE_KEY = "pipeline_parallel_degree"
_FIRST_KEY = "pipeline_parallel_first_stage_less_layers"
_LAST_KEY = "pipeline_parallel_last_stage_less_layers"
_PER_STAGE_KEY = "pipeline_parallel_layers_per_stage"
_NAMES_KEY = "module_fqns_per_model_part"


def requested_stages(config: ParallelismConfig, blocks: int, default: int) -> tuple[int, str]:
    """(number of stages, the key that determines it), `default` if none; raises ConfigError."""
    if config.module_fqns_per_model_part:
        return len(config.module_fqns_per_model_part), _NAMES_KEY
    stages, key = default, _DEGREE_KEY
    if (per_stage := config.pipeline_parallel_layers_per_stage) is not None:
        virtual_blocks = blocks + sum(_less_layers(config))
        stages, key = -(-virtual_blocks // per_stage), _PER_STAGE_KEY
    if stages > blocks:
        raise ConfigError(
            f"parallelism.{key} = {getattr(config, key)}: makes {stages} stages of {blocks} blocks"
            " (model.n_layers).",
            fix=f"Use {blocks} stages or fewer, or list the modules of each stage in"
            f" parallelism.{_NAMES_KEY}.",
        )
    return stages, key


def partition_model(
    config: ParallelismConfig, costs: Mapping[str, float], block_path: str, stages: int
) -> list[list[str]]:
    """Module names of each stage, in order; `costs` has every module. Raises ConfigError."""
    if config.module_fqns_per_model_part:
        _check_names(config.module_fqns_per_model_part, list(costs))
        return config.module_fqns_per_model_part
    if all(getattr(config, key) is None for key in (_FIRST_KEY, _LAST_KEY, _PER_STAGE_KEY)):
        return balance_stages(costs, stages)
    blocks = [name for name in costs if name.startswith(f"{block_path}.")]
    return _partition_by_count(config, list(costs), blocks, stages)


def balance_stages(costs: Mapping[str, float], stages: int) -> list[list[str]]:
    """Partition modules into contiguous, non-empty stages of balanced cost.

    Minimizes the cost of the most expensive stage, and then the sum of the squared costs.
    """
    names, prefix_sums = list(costs), [0.0, *accumulate(costs.values())]
    limit = _min_max_stage_cost(prefix_sums, stages)

    @cache
    def best_partition(start: int, stages_left: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squared costs, end of each stage) of the best partition from `start` on."""
        if stages_left == 1:
            cost = prefix_sums[-1] - prefix_sums[start]
            return (cost**2 if cost <= limit else float("inf")), (len(names),)
        best: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for end in range(start + 1, len(names) - stages_left + 2):
            cost = prefix_sums[end] - prefix_sums[start]
            if cost > limit:
                break
            rest, ends = best_partition(end, stages_left - 1)
            best = min(best, (cost**2 + rest, (end, *ends)))
        return best

    ends = best_partition(0, stages)[1]
    return [names[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def _min_max_stage_cost(prefix_sums: Sequence[float], stages: int) -> float:
    """Minimum over all partitions into `stages` stages of the cost of the most expensive stage."""
    count = len(prefix_sums) - 1
    # minimum[start]: for the modules from `start` on; begins with one stage, then adds stages
    minimum = [prefix_sums[-1] - prefix_sums[start] for start in range(count)]
    for stages_left in range(2, stages + 1):
        after, minimum = minimum, []
        for start in range(count):
            best, before = float("inf"), prefix_sums[start]
            for end in range(start + 1, count - stages_left + 2):
                cost = prefix_sums[end] - before
                if cost >= best:
                    break  # it only grows
                best = min(best, max(cost, after[end]))
            minimum.append(best)
    return minimum[0]


def _partition_by_count(
    config: ParallelismConfig, names: list[str], blocks: list[str], stages: int
) -> list[list[str]]:
    """Partition by number of blocks; `less_layers` keys shrink the first and last stage."""
    first, last = _less_layers(config)
    per_stage, remainder = divmod(len(blocks) + first + last, stages)
    if config.pipeline_parallel_layers_per_stage is not None:
        per_stage, remainder = config.pipeline_parallel_layers_per_stage, 0
    counts = [per_stage + (stage < remainder) for stage in range(stages)]
    counts[0] -= first
    counts[-1] = len(blocks) - sum(counts[:-1])
    if min(counts) < 0:
        raise ConfigError(
            f"parallelism.{_FIRST_KEY} = {first} and {_LAST_KEY} = {last}: leave {counts[0]} blocks"
            f" for the first and {counts[-1]} for the last of {stages} stages.",
            fix="Use smaller numbers, or remove all keys that count layers, to balance by cost.",
        )
    first_block = names.index(blocks[0])
    edges = [0, *(first_block + end for end in accumulate(counts[:-1])), len(names)]
    return [names[a:b] for a, b in pairwise(edges)]


def _less_layers(config: ParallelismConfig) -> tuple[int, int]:
    """By how many blocks the first and the last stage are smaller."""
    return getattr(config, _FIRST_KEY) or 0, getattr(config, _LAST_KEY) or 0


def _check_names(stages: list[list[str]], names: list[str]) -> None:
    """Raise ConfigError unless the stages list every module of `names` once, in order."""
    listed = [name for stage in stages for name in stage]
    unknown = next((name for name in listed if name not in names), None)
    missing = [name for name in names if name not in listed]
    if unknown is not None:
        close = difflib.get_close_matches(unknown, names, 1)
        problem = f'"{unknown}" is not a module of the model.'
        fix = f'Did you mean "{close[0]}"?' if close else f"Modules: {', '.join(names)}."
    elif missing:
        problem, fix = f"no stage has {', '.join(missing)}.", "List every module once."
    elif not all(stages):
        problem, fix = "a stage is empty.", "Give each stage a module, or remove the empty stage."
    elif listed != names:
        problem = "modules are listed twice, or not in execution order."
        fix = f"The order is {', '.join(names)}."
    else:
        return
    raise ConfigError(f"parallelism.{_NAMES_KEY}: {problem}", fix)
