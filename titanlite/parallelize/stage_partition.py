"""Where a model is cut into pipeline stages. Pure: names and costs in, names of each stage out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.errors import ConfigError

_FIRST = "pipeline_parallel_first_stage_less_layers"
_LAST = "pipeline_parallel_last_stage_less_layers"
_EACH = "pipeline_parallel_layers_per_stage"
_NAMES = "module_fqns_per_model_part"


def requested_stages(section: ParallelismConfig, blocks: int, otherwise: int) -> tuple[int, str]:
    """(how many stages the keys ask for, the key that says so); `otherwise`: none of them does."""
    if section.module_fqns_per_model_part:
        return len(section.module_fqns_per_model_part), _NAMES
    if section.pipeline_parallel_layers_per_stage is not None:
        first, last = _fewer(section)
        return -(-(blocks + first + last) // section.pipeline_parallel_layers_per_stage), _EACH
    return otherwise, "pipeline_parallel_degree"


def stage_contradictions(section: ParallelismConfig) -> Iterator[ConfigError]:
    """Modules named one by one, and blocks counted too."""
    counted = [key for key in (_FIRST, _LAST, _EACH) if getattr(section, key) is not None]
    if section.module_fqns_per_model_part and counted:
        said = " and ".join(f"parallelism.{key}" for key in counted)
        yield ConfigError(
            f"parallelism.{_NAMES}: names the modules of each stage, so {said} would be ignored.",
            fix="Leave one of them out.",
            keys=(f"parallelism.{_NAMES}", *(f"parallelism.{key}" for key in counted)),
        )


def partition_model(
    section: ParallelismConfig, costs: Mapping[str, float], block_path: str, stages: int
) -> list[list[str]]:
    """The modules of each of `stages` stages, in order; raises ConfigError.

    `costs` has every module of the model in the order in which they run, with what it costs.
    """
    if section.module_fqns_per_model_part:
        problem = next(_wrong_names(section.module_fqns_per_model_part, list(costs)), None)
        if problem is not None:
            raise problem
        return section.module_fqns_per_model_part
    blocks = [name for name in costs if name.startswith(f"{block_path}.")]
    if stages > len(blocks):
        raise ConfigError(
            f"parallelism.pipeline_parallel_degree = {section.pipeline_parallel_degree}: makes"
            f" {stages} stages of {len(blocks)} blocks (model.n_layers).",
            fix=f"Use {len(blocks)} stages or fewer, or name the modules of each in {_NAMES}.",
            keys=("parallelism.pipeline_parallel_degree", "model.n_layers", f"parallelism.{_EACH}"),
        )
    counted = (_FIRST, _LAST, _EACH)
    if all(getattr(section, key) is None for key in counted):
        return balance_stages(costs, stages)
    return _by_number(section, list(costs), blocks, stages)


def balance_stages(costs: Mapping[str, float], stages: int) -> list[list[str]]:
    """Contiguous stages, none empty, of which the dearest is as cheap as can be, the rest even."""
    names, sums = list(costs), [0.0, *accumulate(costs.values())]
    limit = _cheapest_dearest(sums, stages)

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squared costs, ends) of the best cut of what is from `start` on."""
        if left == 1:
            last = sums[-1] - sums[start]
            return (last**2 if last <= limit else float("inf")), (len(names),)
        found = (float("inf"), ())
        for end in range(start + 1, len(names) - left + 2):
            mine = sums[end] - sums[start]
            if mine > limit:
                break
            rest, ends = best(end, left - 1)
            found = min(found, (mine**2 + rest, (end, *ends)))
        return found

    ends = best(0, stages)[1]
    return [names[a:b] for a, b in zip((0, *ends), ends)]


def _cheapest_dearest(sums: Sequence[float], stages: int) -> float:
    """The least that the dearest of `stages` contiguous, non-empty stages can cost."""
    count = len(sums) - 1
    worst = [sums[-1] - sums[start] for start in range(count)]  # with one stage from `start` on
    for left in range(2, stages + 1):
        worst = [
            min(
                (
                    max(sums[end] - sums[start], worst[end])
                    for end in range(start + 1, count - left + 2)
                ),
                default=float("inf"),
            )
            for start in range(count)
        ]
    return worst[0]


def _by_number(
    section: ParallelismConfig, names: list[str], blocks: list[str], stages: int
) -> list[list[str]]:
    """Blocks shared out by number, with those at the ends counting as some blocks themselves."""
    first, last = _fewer(section)
    share, rest = divmod(len(blocks) + first + last, stages)
    if section.pipeline_parallel_layers_per_stage is not None:
        share, rest = section.pipeline_parallel_layers_per_stage, 0
    counts = [share + (number < rest) for number in range(stages)]
    counts[0] -= first
    counts[-1] = len(blocks) - sum(counts[:-1])
    if min(counts) < 0:
        raise ConfigError(
            f"parallelism.{_FIRST} = {first} and {_LAST} = {last}: leave {counts[0]} blocks for"
            f" the first and {counts[-1]} for the last of {stages} stages.",
            fix="Use smaller numbers, or leave both out to cut by cost.",
            keys=(f"parallelism.{_FIRST}", f"parallelism.{_LAST}"),
        )
    begins, ends = names.index(blocks[0]), names.index(blocks[-1]) + 1
    edges = [0, *accumulate(counts)]
    cuts = [blocks[a:b] for a, b in zip(edges, edges[1:])]
    cuts[0] = names[:begins] + cuts[0]
    cuts[-1] = cuts[-1] + names[ends:]
    return cuts


def _fewer(section: ParallelismConfig) -> tuple[int, int]:
    return getattr(section, _FIRST) or 0, getattr(section, _LAST) or 0


def _wrong_names(parts: list[list[str]], names: list[str]) -> Iterator[ConfigError]:
    def wrong(what: str, fix: str) -> ConfigError:
        return ConfigError(f"parallelism.{_NAMES}: {what}", fix, keys=(f"parallelism.{_NAMES}",))

    given = [name for part in parts for name in part]
    for name in dict.fromkeys(given):
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f'Did you mean "{near[0]}"?' if near else f"They are {', '.join(names)}."
            yield wrong(f'"{name}" is no module of the model.', hint)
    missing = [name for name in names if name not in given]
    if missing:
        yield wrong(f"no stage has {', '.join(missing)}.", "Name every module once.")
    if not all(parts):
        yield wrong("a stage is empty.", "Give each stage a module, or remove it.")
    if given != names:
        yield wrong(
            "modules are named twice, or not in the order in which they run.",
            f"The order is {', '.join(names)}.",
        )
