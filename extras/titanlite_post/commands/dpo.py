"""Train on pairs of answers: torchrun … -m titanlite_post dpo --job.config_file a.toml"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from titanlite.data import FORMATS
from titanlite.distributed.time_limit import exit_process
from titanlite.errors import ConfigError, UserError
from titanlite.job import JobConfig, RunParts
from titanlite.train import main as train
from titanlite.training.periodic import PeriodicAction, StepInfo, every_logged_step
from titanlite.training.run import Run
from titanlite_post.checks import (
    check_prediction_layers,
    find_weighed_problems,
)
from titanlite_post.pairs import PAIRS, open_pairs
from titanlite_post.preferences import DPOSection, PreferenceObjective
from titanlite_post.reference import (
    REFERENCE_FILE,
    AllPairs,
    ReferenceReader,
    obtain_reference,
)

USAGE = __doc__


@dataclass(frozen=True)
class DPOConfig(JobConfig):
    """All sections of a TOML of `dpo`."""

    HELP = USAGE
    dpo: DPOSection = field(default_factory=DPOSection)

    def find_problems(self) -> Iterator[UserError]:
        yield from find_weighed_problems(self, "the answers of a pair")
        for source in self.data.sources:
            if source.format != PAIRS:
                yield ConfigError(
                    f'data.sources, {source.name}: has format "{source.format}".',
                    fix=f'dpo trains on pairs of answers: set format = "{PAIRS}".',
                )


def main(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries rely on it
    FORMATS[PAIRS] = open_pairs
    exit_process(train(argv, DPOConfig, train_on_pairs))


def train_on_pairs(run: Run, parts: RunParts) -> Run:
    """The run with the loss of pairs in place of cross-entropy."""
    config = parts.job.config
    assert isinstance(config, DPOConfig)
    check_prediction_layers(parts.job.sizes)
    reference_of = None if config.dpo.loss == "simpo" else open_reference(run, parts, config)
    mesh = parts.layout.mesh
    objective = PreferenceObjective(config.dpo, run.engine, mesh, reference_of)
    settings = dataclasses.replace(run.step_settings, objective=objective)
    action = log_preferences(run, objective, config.metrics.log_freq)
    return dataclasses.replace(run, step_settings=settings, actions=(*run.actions, action))


def open_reference(run: Run, parts: RunParts, config: DPOConfig) -> ReferenceReader:
    """The log-probabilities of the reference, which are measured if the run begins."""
    step, file = run.state.step, config.dpo.reference
    pairs = AllPairs(
        run.engine,
        parts.stream,
        parts.layout.mesh,
        run.device,
        config.training.local_batch_size,
        lambda: run.watchdog.set_phase(step, "reference"),
    )
    own_file, given = parts.job.folder / REFERENCE_FILE, Path(file) if file else None
    return obtain_reference(pairs, run.state.model, step, own_file, given).reader(parts.stream)


def log_preferences(run: Run, objective: PreferenceObjective, freq: int) -> PeriodicAction:
    """Write the event `preferences` with each step line."""

    def write(info: StepInfo) -> None:
        assert objective.sums is not None
        pairs, _, better, chosen, rejected = objective.sums.tolist()
        fields = {
            "pairs": int(pairs),
            "accuracy": better / pairs,
            "chosen_log_ratio": chosen / pairs,
            "rejected_log_ratio": rejected / pairs,
        }
        run.sinks.event(info.step, "preferences", **fields)

    return PeriodicAction("log", every_logged_step(freq), write, needs_accepted=True)
