"""Train on prompts by rewards: torchrun … -m titanlite_post grpo --job.config_file a.toml"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from titanlite.checkpoint import find_initial
from titanlite.data import SAMPLE_FORMATS
from titanlite.distributed.time_limit import exit_process
from titanlite.errors import ConfigError, UserError
from titanlite.job import JobConfig, RunParts
from titanlite.job.build import build_model, build_run_engine
from titanlite.job.start import load_base
from titanlite.train import main as train
from titanlite.training.engine import Engine
from titanlite.training.periodic import PeriodicAction, StepInfo, every_logged_step
from titanlite.training.run import Run
from titanlite_post.checks import (
    check_prediction_layers,
    find_weighed_problems,
)
from titanlite_post.generation import ShardedGenerator
from titanlite_post.grpo import Generator, GRPOSection, RewardObjective
from titanlite_post.prompts import PROMPTS, PromptEncoder, open_prompts
from titanlite_post.rewards import RewardProcesses
from titanlite_post.rollout import Rollouts, RolloutTools, check_prompts
from titanlite_post.server import ServerGenerator

USAGE = __doc__


@dataclass(frozen=True)
class GRPOConfig(JobConfig):
    """All sections of a TOML of `grpo`."""

    HELP = USAGE
    grpo: GRPOSection = field(default_factory=GRPOSection)

    def find_problems(self) -> Iterator[UserError]:
        yield from find_weighed_problems(self, "the completions of a prompt")
        if self.elastic.enable:
            yield ConfigError(
                "elastic.enable = true: grpo needs equal batches on all ranks.", fix="Remove it."
            )
        if self.guard.spike != "off":
            yield ConfigError(
                f'guard.spike = "{self.guard.spike}": the loss of grpo has both signs,'
                " and no value of it is a spike.",
                fix='Set guard.spike = "off"; guard.nonfinite works.',
            )
        limit, timeout = self.comm.train_timeout_seconds, self.grpo.reward_timeout_seconds
        if 2 * timeout > limit:
            yield ConfigError(
                f"grpo.reward_timeout_seconds = {timeout:g}: is more than half of"
                f" comm.train_timeout_seconds = {limit}, in which a rank must answer the others.",
                fix="Lower it, or raise comm.train_timeout_seconds.",
            )
        if self.grpo.server and not self.grpo.server.startswith(("http://", "https://")):
            yield ConfigError(
                f'grpo.server = "{self.grpo.server}": is not the URL of a server.',
                fix='Write it as "http://host:8000".',
            )
        if self.grpo.server and self.lora.rank:
            yield ConfigError(
                f"lora.rank = {self.lora.rank}: adapters are not sent to grpo.server.",
                fix="Remove grpo.server: the model then generates with its adapters.",
            )


def main(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries rely on it
    SAMPLE_FORMATS[PROMPTS] = open_prompts
    exit_process(train(argv, GRPOConfig, train_on_rewards))


def train_on_rewards(run: Run, parts: RunParts) -> Run:
    """The run with batches of completions, and the loss of their rewards."""
    config, rank = parts.job.config, parts.rank
    assert isinstance(config, GRPOConfig)
    section = config.grpo
    check_prediction_layers(parts.job.sizes)
    assert parts.stream.tokenizer is not None, "format prompts needs one"
    prompts = PromptEncoder(parts.stream.tokenizer, section.template, section.bos)
    check_prompts(section, parts.stream, prompts, rank.rank, rank.world_size)
    generator = build_generator(run, parts, section, prompts)
    rewards = RewardProcesses(
        section.reward, section.reward_processes, section.reward_timeout_seconds
    )
    reference = build_reference(run, parts) if section.kl_weight else None
    rollouts = Rollouts(RolloutTools(section, generator, prompts, rewards, reference), run, parts)
    objective = RewardObjective(
        section,
        run.engine,
        parts.layout.mesh,
        lambda: rollouts.data,
        lambda: section.server is not None or rollouts.is_logged(run.state.step + 1),
    )
    settings = dataclasses.replace(run.step_settings, objective=objective)
    return dataclasses.replace(
        run,
        open_batches=rollouts.batches,
        step_settings=settings,
        actions=(*run.actions, log_rollouts(run, rollouts, objective, config)),
    )


def build_generator(
    run: Run, parts: RunParts, section: GRPOSection, prompts: PromptEncoder
) -> Generator:
    """The run's own model, or the server of grpo.server."""
    if section.server is not None:
        return ServerGenerator(section.server, run, parts, prompts.ends)
    return ShardedGenerator(
        parts.sharded,
        parts.layout,
        run.device,
        seed=parts.job.config.debug.seed,
        ends=prompts.ends,
        vocab_size=prompts.tokenizer.vocab_size,
        gather_weights=section.gather_weights,
    )


def build_reference(run: Run, parts: RunParts) -> Engine:
    """A second model with the initial weights of the run."""
    job = parts.job
    sharded = build_model(job, parts.layout, parts.rank)  # with the weights that debug.seed draws
    if job.config.lora.rank:
        load_base(job, run.checkpointer, sharded.model, parts.stream)
    elif found := find_initial(job.config.checkpoint, run.checkpointer.group):
        required = job.properties_to_check(parts.stream)
        run.checkpointer.load(found, sharded.model, (), required)
    return build_run_engine(dataclasses.replace(parts, sharded=sharded))


def log_rollouts(
    run: Run, rollouts: Rollouts, objective: RewardObjective, config: GRPOConfig
) -> PeriodicAction:
    """Write the event `rollout` with each step line; with a server, whose log-probabilities may be
    wrong, of each step."""

    def write(info: StepInfo) -> None:
        assert objective.means is not None
        fields = rollout_fields(config.grpo, rollouts.statistics, objective.means.tolist())
        run.sinks.event(info.step, "rollout", **fields)

    freq = 1 if config.grpo.server else config.metrics.log_freq
    return PeriodicAction("log", every_logged_step(freq), write, needs_accepted=True)


def rollout_fields(
    section: GRPOSection, statistics: dict[str, float], means: list[float]
) -> dict[str, float]:
    """The fields of the event, without those that are 0 by the settings.

    `means`: see `RewardObjective.means`.
    """
    _, kl, clipped, gap = means
    fields = {**statistics, "kl": kl, "clipped": clipped, "sampler_gap": gap}
    is_measured = {
        "failed_rewards": section.failed_reward == "skip",
        "kl": section.kl_weight > 0,
        "clipped": section.steps_per_rollout > 1,
    }
    return {name: value for name, value in fields.items() if is_measured.get(name, True)}
