"""[data.mixture]: weights by size, and weights that change during a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from titanlite.data.mixture import MixtureSegment, Phase, temper
from titanlite.errors import DataError, UserErrors
from titanlite.settings import Positive, Range

MANY_EPOCHS = 4.0
# Up to four epochs of a source are nearly as good as new text; 16 and more have little effect:
# Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264


@dataclass(frozen=True)
class PhaseConfig:
    """An entry of data.mixture.phases: the weights from a token of the run on."""

    first_token: Positive  # position in the run, in tokens
    weights: dict[str, float]  # new weights by source; a source that is not named keeps its weight


@dataclass(frozen=True)
class MixtureConfig:
    """[data.mixture] How the sources are mixed, beyond their weights."""

    temperature: Annotated[float, Range(0)] = 0.0
    # multiply each weight by tokens^(1/temperature) of its source: 1: in proportion to the sizes;
    # the larger, the more equal; 0: the weights as they are
    phases: list[PhaseConfig] = field(default_factory=list)
    # later weights, in the order of first_token; list the phases that are over, too


@dataclass(frozen=True)
class SourceSize:
    """What the weights of a source depend on."""

    name: str
    weight: float
    tokens: int | None  # None: unknown


def plan_phases(
    config: MixtureConfig, sources: Sequence[SourceSize], seq_len: int
) -> tuple[Sequence[float], list[Phase]]:
    """The weights at the start, and the phases by position; raises all problems together."""
    problems = list(_check(config, sources))
    if problems:
        raise problems[0] if len(problems) == 1 else UserErrors(problems)
    weights = {source.name: source.weight for source in sources}
    phases = [Phase(0, list(weights.values()))]
    for phase in config.phases:
        weights |= phase.weights
        # the first sample that begins at this token or later
        phases.append(Phase(-(-phase.first_token // seq_len), list(weights.values())))
    if config.temperature:
        sizes = [source.tokens or 1 for source in sources]
        phases = [Phase(s, temper(w, sizes, config.temperature)) for s, w in phases]
    return phases[0].weights, phases[1:]


def _check(config: MixtureConfig, sources: Sequence[SourceSize]) -> Iterator[DataError]:
    names = [source.name for source in sources]
    last = 0
    for phase in config.phases:
        where = f"data.mixture.phases: first_token = {phase.first_token}"
        if phase.first_token <= last:
            yield DataError(f"{where}: is not after {last}, the phase before.", fix="Sort them.")
        last = phase.first_token
        for name in phase.weights.keys() - set(names):
            yield DataError(
                f'{where}: weights names "{name}", which is not a source.',
                fix=f"Sources: {', '.join(names)}.",
            )
    for source in sources:
        if config.temperature and source.tokens is None:
            yield DataError(
                f"data.mixture.temperature = {config.temperature:g}: the size of the source"
                f' "{source.name}" is unknown.',
                fix="Prepare it (scripts/prepare_data.py), or set weights instead.",
            )


def describe_segments(names: Sequence[str], segments: Sequence[MixtureSegment]) -> dict[str, Any]:
    """The segments after the first as checkpoints record them: position -> weights above 0.

    A source that is not read at all in a segment is not in its table, so that one can be added.
    """
    return {
        str(segment.start): {n: w for n, w in zip(names, segment.weights, strict=True) if w}
        for segment in segments[1:]
    }


@dataclass(frozen=True)
class SourceShare:
    """How much of a source some positions of a run have."""

    name: str
    samples: int
    tokens: int
    epochs: float | None  # None: the size of the source is unknown

    def __str__(self) -> str:
        epochs = "" if self.epochs is None else f", {self.epochs:.3g} epochs"
        return f"{self.tokens:,} tokens{epochs}"


def describe_mixture(shares: Sequence[SourceShare]) -> list[str]:
    """A line for each source: its part of the samples, its tokens and its epochs."""
    total = max(1, sum(share.samples for share in shares))
    width = max(len(share.name) for share in shares)
    return [
        f"{share.name:<{width}}  {share.samples / total:6.2%} of the samples: {share}"
        for share in shares
    ]


def repeated_sources(shares: Sequence[SourceShare]) -> list[str]:
    """A warning for each source that is read in more than MANY_EPOCHS epochs."""
    return [
        f'the run reads "{share.name}" in {share.epochs:.3g} epochs; after {MANY_EPOCHS:g}, more'
        " epochs of the same text help less than new text"
        for share in shares
        if share.epochs is not None and share.epochs > MANY_EPOCHS
    ]
