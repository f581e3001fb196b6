"""How published runs of mixtures of experts exchange tokens and launch kernels.

From the performance recipes of Megatron-Bridge, at the tag of each release
(github.com/NVIDIA-NeMo/Megatron-Bridge: scripts/performance/configs, and from 0.6.0
src/megatron/bridge/perf_recipes): the token dispatcher, overlapped exchanges, CUDA graphs. Its
tables also say that tokens are forced to be balanced over the experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from titanlite_planner.workload import ExpertExchange

LATEST = (99, 12)


class MissingFact(Exception):
    """A row lacks a fact that the time or the memory depends on."""


class _Recipe(NamedTuple):
    """What the recipes of some releases, the last one included, say of some models and GPUs."""

    model: str  # a part of its name in lower case
    gpus: str  # separated by spaces
    first: tuple[int, int]
    last: tuple[int, int]
    once_per_rank: bool  # moe_flex_dispatcher_backend = "hybridep" or "deepep"
    overlapped: bool = False  # moe_a2a_overlap


# The first that matches. Before 25.11 (0.2.0) the recipes are taken to be those of 25.11.
_RECIPES = (
    _Recipe("gpt oss", "GB200", (26, 4), LATEST, True, True),
    _Recipe("gpt oss", "B200 B300", (26, 4), LATEST, True),
    _Recipe("gpt oss", "H100 B200 B300 GB200 GB300", (0, 0), LATEST, False),
    _Recipe("qwen3_30b", "B200", (0, 0), (26, 3), False),
    _Recipe("qwen3_30b", "H100", (0, 0), (26, 1), False, True),
    _Recipe("qwen3_30b", "H100", (26, 2), (26, 3), True, True),
    _Recipe("qwen3_235b", "B200", (0, 0), (26, 1), False, True),
    _Recipe("qwen3_235b", "B200", (26, 2), LATEST, False),
    _Recipe("qwen3_235b", "B300", (0, 0), (26, 3), False, True),
    _Recipe("qwen3_235b", "H100", (0, 0), LATEST, False, True),
    _Recipe("deepseek", "H100", (0, 0), (26, 1), True, True),
    _Recipe("deepseek", "B200", (0, 0), (26, 1), False),
    _Recipe("deepseek", "B200", (26, 4), LATEST, True, True),
    _Recipe("kimi", "H100 B200 B300", (0, 0), LATEST, False),
    _Recipe("", "H100 B200 B300 GB200 GB300", (0, 0), LATEST, True),
)


def published_expert_tensor(row: Mapping[str, str]) -> int:
    """Tensor ranks that each expert is sharded over; 0: all.

    Megatron-Bridge's recipes set expert_tensor_parallel_size = 1.
    """
    return 1 if row["framework"].startswith("Megatron-Bridge") else 0


def published_exchange(row: Mapping[str, str], gpu: str) -> ExpertExchange:
    """How the run of a row exchanges tokens; raises MissingFact if no recipe says it."""
    framework = row["framework"]
    if framework.startswith("NeMo AutoModel"):  # DeepEP: docs/performance-summary.mdx
        return ExpertExchange(once_per_rank=True)
    if not framework.startswith("Megatron-Bridge"):
        return ExpertExchange()
    model, release = row["model"].lower(), _release(row["source"])
    recipes = (
        found
        for found in _RECIPES
        if found.model in model
        and gpu in found.gpus.split()
        and found.first <= release <= found.last
    )
    recipe = next(recipes, None)
    if recipe is None:
        raise MissingFact(f"Megatron-Bridge has no recipe of experts for {gpu}")
    graph = _is_one_graph(model, gpu, row["precision"].lower(), release)
    return ExpertExchange(
        once_per_rank=recipe.once_per_rank or graph,
        overlapped=recipe.overlapped or graph,
        one_graph=graph,
    )


def _is_one_graph(model: str, gpu: str, precision: str, release: tuple[int, int]) -> bool:
    """Whether cuda_graph_impl is "full_iteration", and exchanges overlap, as from 0.5.0."""
    if release < (26, 6) or not precision.startswith("mxfp8") or "kimi" in model:
        return False
    return gpu in ("GB200", "GB300") or (gpu == "B300" and "qwen3_30b" in model)


def _release(source: str) -> tuple[int, int]:
    found = re.search(r"\b(\d\d)\.(\d\d)\b", source)
    return (int(found[1]), int(found[2])) if found else LATEST
