"""[data.mixture]: weights by size, and weights that change during a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from titanlite.data.mixture import MixtureSegment, Phase, temper
from titanlite.data.sample_source import StoredSamples, TextSamples
from titanlite.errors import DataError
from titanlite.settings import Positive, Range, raise_together

MANY_EPOCHS = 4.0
# Up to four epochs of a source are nearly as good as new text; 16 and more have little effect:
# Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264


@dataclass(frozen=True)
class PhaseConfig:
    """An entry of data.mixture.phases: the weights from a token of the run on."""

    first_token: Positive  # position in the run, in tokens
    weights: dict[str, float]  # new weights by source; a source that is not named keeps its weight
    ramp_tokens: Annotated[int, Range(0)] = 0
    # tokens from first_token on in which the shares of the samples change linearly; 0: at once


@dataclass(frozen=True)
class MixtureConfig:
    """[data.mixture] How the sources are mixed, beyond their weights."""

    temperature: Annotated[float, Range(0.1, also=(0.0,))] = 0.0
    # multiply each weight by tokens^(1/temperature) of its source: at 1 by its size, and the larger
    # the temperature, the less the sizes count; 0: the weights as they are
    phases: list[PhaseConfig] = field(default_factory=list)
    # later weights, in the order of first_token; list the phases that are over, too


def plan_phases(
    config: MixtureConfig, sources: Sequence[StoredSamples | TextSamples], seq_len: int
) -> tuple[Sequence[float], list[Phase]]:
    """The weights at the start, and the phases by position; raises all problems together."""
    problems = list(_check(config, sources))
    raise_together(problems)
    weights = {source.name: source.config.weight for source in sources}
    phases = [Phase(0, list(weights.values()))]
    for phase in config.phases:
        weights |= phase.weights
        # the first samples that begin at these tokens or later
        start, end = (
            -(-token // seq_len)
            for token in (phase.first_token, phase.first_token + phase.ramp_tokens)
        )
        phases.append(Phase(start, list(weights.values()), end - start))
    if config.temperature:
        sizes = [source.tokens or 1 for source in sources]
        phases = [
            phase._replace(weights=temper(phase.weights, sizes, config.temperature))
            for phase in phases
        ]
    return phases[0].weights, phases[1:]


def _check(
    config: MixtureConfig, sources: Sequence[StoredSamples | TextSamples]
) -> Iterator[DataError]:
    names = [source.name for source in sources]
    last = ramp_end = 0
    for phase in config.phases:
        where = f"data.mixture.phases: first_token = {phase.first_token}"
        if phase.first_token <= last:
            yield DataError(f"{where}: is not after {last}, the phase before.", fix="Sort them.")
        elif phase.first_token < ramp_end:
            yield DataError(
                f"{where}: the weights of the phase before change until token {ramp_end}.",
                fix=f"Use a first_token of at least {ramp_end}, or fewer ramp_tokens.",
            )
        last, ramp_end = phase.first_token, phase.first_token + phase.ramp_tokens
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
                fix="Prepare it (titanlite prepare), or set weights instead.",
            )


def describe_segments(names: Sequence[str], segments: Sequence[MixtureSegment]) -> dict[str, Any]:
    """The segments after the first as checkpoints record them: position -> weights above 0.

    A source that is not read at all in a segment is not in its table, so that one can be added.
    """
    return {
        str(segment.start): {n: w for n, w in zip(names, segment.weights, strict=True) if w}
        for segment in segments[1:]
    }


def describe_changes(
    names: Sequence[str], segments: Sequence[MixtureSegment], seq_len: int, end: int
) -> list[str]:
    """A line for each change of the weights before position `end`; one for a gradual change."""
    changes, rest = [], list(segments[1:])
    while rest and rest[0].start < end:
        first = rest.pop(0)
        when, weights = f"from token {first.start * seq_len:,} on", first.weights
        if first.target is not None:
            weights = list(first.target)
            while rest and rest[0].target is first.target:
                rest.pop(0)
            when += f", gradually until token {rest[0].start * seq_len:,}" if rest else ""
            if rest and rest[0].weights == weights:
                rest.pop(0)
        total = sum(weights)
        shares = (f"{n} {w / total:.2%}" for n, w in zip(names, weights, strict=True) if w)
        changes.append(f"{when}: {', '.join(shares)}")
    return changes


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
