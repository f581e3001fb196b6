"""Reinforcement learning from rewards of the model's own completions (GRPO, arXiv 2402.03300).

A sample is a prompt. Its sequence holds all completions of the prompt as documents, each after a
copy of the prompt; labels are the completions' ids. So the position in the data, packing and every
layout are those of training on text. A label's weight is the advantage of its completion: its
reward relative to those of its group. The loss is the mean over all completion tokens of the global
batch.

Completions are generated when a step begins, with its weights, so the ratio of the probabilities of
the updated and the sampling model is exactly 1, unless `steps_per_rollout` asks for several steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.labels import DOCUMENT_END, SAME_DOCUMENT
from titanlite.settings import NotNegative, OneOf, Positive, Range
from titanlite.training.engine import Engine
from titanlite.training.spmd_engine import SetPhase
from titanlite.training.step import StepInputs, WeighedLabels
from titanlite_post.generation import Generation
from titanlite_post.rewards import REWARDS


@dataclass(frozen=True)
class GRPOSection:
    """[grpo] Train on prompts by rewards of the model's own completions."""

    reward: Annotated[str, OneOf(lambda: REWARDS)] = "exact_match"
    # name of a function of titanlite_post/rewards.py, or of a module of `--job.import`
    group_size: Annotated[int, Range(2)] = 8  # completions of a prompt, in one sequence
    max_new_tokens: Positive = 128  # of a completion
    template: str | None = None
    # of prompts with `messages`: llama3, chatml, or the path of a tokenizer_config.json or .jinja
    bos: bool = False  # begin prompts without a template with the tokenizer's BOS
    advantage: Literal["std", "mean"] = "std"
    # reward minus the mean of its group, divided by the group's standard deviation or not
    steps_per_rollout: Positive = 1  # steps on the completions that are generated together
    clip: Annotated[float, Range(0)] = 0.2
    # with several steps: no gradient from ratios that the step has already moved by more than this
    kl_weight: Annotated[float, Range(0)] = 0.0
    # weight of the divergence from the initial weights, which then stay in memory, too
    generation_batch: NotNegative = 0  # completions of a rank that are generated together; 0: all
    gather_weights: bool = True  # FSDP gathers the weights once for a batch, not for each token
    reward_processes: Positive = 2  # of each data-parallel rank
    reward_timeout_seconds: Annotated[float, Range(0.01)] = 10.0  # for one completion
    failed_reward: Literal["stop", "skip"] = "stop"
    # if a reward function raises, hangs or returns NaN: end the run, or leave the completion out
    server: str | None = None
    # URL of a vLLM server that generates, such as "http://host:8000"; none: the model itself
    server_correction: Annotated[float, Range(1, also=(0,))] = 2.0
    # with a server: the advantage of a token is multiplied by the ratio of its probabilities by the
    # trainer and by the server, at most by this; 0: by none


class Generator(Protocol):
    """Continues prompts; see `ShardedGenerator.generate`."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        max_new_tokens: int,
        progress: Callable[[], None],
    ) -> list[Generation]: ...


class Completions(NamedTuple):
    """The completions of one prompt."""

    prompt: list[int]
    ids: list[list[int]]
    sampled: list[list[float]]  # log-probabilities by the generator
    rewards: list[float | None]  # None: left out
    old: list[list[float]] | None = None  # log-probabilities by the trainer, see `RolloutData`

    def spans(self) -> Iterator[tuple[int, int]]:
        """(first, end) of the labels of each completion in the sequence of the group."""
        end = 0
        for ids in self.ids:
            first = end + len(self.prompt) - 1
            yield first, first + len(ids)
            end = first + len(ids) + 1


def advantages(rewards: Sequence[float | None], by_std: bool) -> list[float]:
    """Of each completion of a group; 0 for those that are left out, and if all are equal."""
    known = torch.tensor([reward for reward in rewards if reward is not None], dtype=torch.float64)
    if not len(known):
        return [0.0] * len(rewards)
    scale = float(known.std(correction=0)) if by_std else 1.0
    mean, scale = float(known.mean()), scale if scale > 1e-8 else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


class GroupTensors(NamedTuple):
    """The sequence of a group, [T] each; fp32 but for the first two, and 0 where no label is."""

    inputs: Tensor
    labels: Tensor
    advantages: Tensor
    sampled: Tensor
    old: Tensor


def place_group(group: Completions, seq_len: int, by_std: bool) -> GroupTensors:
    """The completions of a prompt as the documents of a packed sequence."""
    inputs, labels = torch.zeros(seq_len, dtype=torch.int64), torch.full((seq_len,), SAME_DOCUMENT)
    out = GroupTensors(inputs, labels, *(torch.zeros(seq_len) for _ in range(3)))
    of_group = advantages(group.rewards, by_std)
    for number, (first, end) in enumerate(group.spans()):
        ids = torch.tensor(group.ids[number])
        start = first + 1 - len(group.prompt)
        inputs[start : first + 1], inputs[first + 1 : end + 1] = torch.tensor(group.prompt), ids
        labels[end] = DOCUMENT_END
        if group.rewards[number] is None:
            continue
        labels[first:end] = ids
        out.advantages[first:end] = of_group[number]
        out.sampled[first:end] = torch.tensor(group.sampled[number])
        if group.old is not None:
            out.old[first:end] = torch.tensor(group.old[number])
    return out


@dataclass(frozen=True)
class RolloutData:
    """What the objective needs of this rank's batch beside the advantages, [B, T] each, in fp32."""

    sampled: Tensor  # log-probabilities by the generator
    old: Tensor | None  # by the trainer, with the weights that generated; None: those of this step
    reference: Tensor | None  # by the initial weights; None: kl_weight = 0


class RewardObjective:
    """The mean of -ratio * advantage over the labels of a global batch, with clipping and KL."""

    def __init__(
        self,
        section: GRPOSection,
        engine: Engine,
        mesh: Mesh,
        data: Callable[[], RolloutData | None],
        measures: Callable[[], bool],
    ):
        """`data`: of the batch of the step; `measures`: whether to measure what is only logged,
        which it must with a server."""
        self._section, self._engine, self._mesh = section, engine, mesh
        self._data, self._measures = data, measures
        self.means: Tensor | None = None
        # [4]: of the last step, over the labels of the global batch: loss, KL to the reference,
        # clipped ones, |difference of the log-probabilities of trainer and generator|

    def __call__(self, inputs: StepInputs, set_phase: SetPhase) -> WeighedLabels:
        data, labels, advantage = self._data(), inputs.batch.labels, inputs.batch.weights
        assert data is not None and advantage is not None
        valid = labels >= 0
        off_policy = data.old is not None or data.reference is not None
        if off_policy or self._measures():
            set_phase("log-probabilities")
            log_probs = -self._engine.token_losses(inputs.batch)
        else:
            log_probs = data.sampled
        if self._section.server and self._section.server_correction:
            # truncated importance sampling: the sampling distribution is the server's
            behind = log_probs if data.old is None else data.old
            ratio = (behind - data.sampled).exp().clamp(max=self._section.server_correction)
            advantage = advantage * ratio
        weights, loss, kl, clipped = advantage, -advantage, torch.zeros_like(advantage), ~valid
        if data.old is not None:
            ratio = (log_probs - data.old).exp()
            bound = self._section.clip
            too_low = (advantage < 0) & (ratio < 1 - bound)
            clipped = torch.where(advantage > 0, ratio > 1 + bound, too_low)
            weights = torch.where(clipped, 0.0, ratio * advantage)
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - bound, 1 + bound) * advantage)
        if data.reference is not None:  # the estimator of http://joschu.net/blog/kl-approx.html
            difference = data.reference - log_probs
            kl = difference.exp() - 1 - difference
            weights = weights - self._section.kl_weight * (1 - difference.exp())
            loss = loss + self._section.kl_weight * kl
        gap = (log_probs - data.sampled).abs()
        columns = torch.stack((loss, kl, clipped.float(), gap))
        sums = torch.where(valid, columns, 0.0).sum((1, 2))
        self.means = all_reduce_sum(self._mesh.batch, sums) / inputs.valid
        return WeighedLabels(torch.where(valid, weights, 0.0), inputs.valid, self.means[0])
