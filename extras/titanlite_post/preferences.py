"""Losses of pairs of answers (DPO, IPO, SimPO), as weights of labels; see `StepSettings.objective`.

An answer's log-probability is the sum of those of its labels. A step first measures them without
gradients. The derivatives of the loss with respect to them are the weights of the labels in the
forward and backward that follow, so every layout, packing and accumulation that trains on text
trains on pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.settings import Range
from titanlite.training.engine import Engine
from titanlite.training.spmd_engine import SetPhase
from titanlite.training.step import StepInputs, WeighedLabels
from titanlite_post.pairs import pair_segments


@dataclass(frozen=True)
class DPOSection:
    """[dpo] Train on pairs of answers, of which one is preferred."""

    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    # "dpo" (arXiv 2305.18290); "ipo" (2310.12036), with means over tokens, as its authors use it;
    # "simpo" (2405.14734), which needs no reference
    beta: Annotated[float, Range(1e-6)] = 0.1
    # how strongly the preference counts against staying near the reference; SimPO: 2.0 to 2.5
    margin: Annotated[float, Range(0)] = 0.0  # SimPO: what the chosen answer has to be better by
    reference: str | None = None
    # file of the reference's log-probabilities, which a run writes once and other runs of the same
    # initial weights and data may read; default: reference.npz in job.dump_folder


@dataclass(frozen=True)
class Answers:
    """The answers of a batch: [B, P, 2] in fp32 each, the chosen one first."""

    log_probs: Tensor
    tokens: Tensor  # labels of each; 0: there is no such pair
    reference: Tensor  # log-probabilities of the reference


def pair_margins(section: DPOSection, answers: Answers) -> Tensor:
    """By how much the chosen answer of each pair is better, [B, P]; `pair_losses` are of these.

    The difference of the log-ratios to the reference; of their means over tokens in IPO and SimPO.
    """
    log_ratios = answers.log_probs - answers.reference
    if section.loss != "dpo":
        log_ratios = log_ratios / answers.tokens.clamp(min=1)
    return log_ratios[..., 0] - log_ratios[..., 1]


def pair_losses(section: DPOSection, margins: Tensor) -> Tensor:
    """The loss of each pair, [B, P]."""
    if section.loss == "ipo":
        return (margins - 1 / (2 * section.beta)).square()
    margin = section.margin if section.loss == "simpo" else 0.0
    return -F.logsigmoid(section.beta * margins - margin)


def sum_answers(token_losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities, tokens, index), of cross-entropies and labels [B, T].

    The first two are those of `Answers`, with room for T // 2 pairs. index [B, T]: the answer of
    each label in the last two dimensions of them, flattened; their number where it is ignored.
    """
    answers = labels.shape[1] // 2 * 2
    segments = pair_segments(labels, labels)
    index = torch.where(segments >= 0, segments, answers)
    sums = token_losses.new_zeros(2, len(labels), answers + 1)
    sums[0].scatter_add_(1, index, -token_losses)
    sums[1].scatter_add_(1, index, torch.ones_like(token_losses))
    log_probs, tokens = sums[..., :-1].unflatten(-1, (-1, 2))
    return log_probs, tokens, index


class PreferenceObjective:
    """The mean loss of the pairs of a global batch."""

    def __init__(
        self,
        section: DPOSection,
        engine: Engine,
        mesh: Mesh,
        reference_of: Callable[[int, int], Tensor] | None,
    ):
        """`reference_of(position, sequences)`: `Answers.reference` [sequences, P', 2], on the host;
        None: all are 0."""
        self._section, self._engine, self._mesh = section, engine, mesh
        self._reference_of = reference_of
        self.sums: Tensor | None = None  # [5]: of the last step, over the pairs of the global batch
        # pairs, loss, pairs with a positive margin, log-ratios of the chosen and rejected answers

    def __call__(self, inputs: StepInputs, set_phase: SetPhase) -> WeighedLabels:
        set_phase("log-probabilities")
        labels = inputs.batch.labels
        losses = self._engine.token_losses(inputs.batch)
        log_probs, tokens, index = sum_answers(losses, labels)
        reference = torch.zeros_like(log_probs)
        if self._reference_of is not None:
            known = self._reference_of(inputs.own.first, inputs.own.sequences)
            reference[: len(known), : known.shape[1]] = known.to(log_probs.device)
        log_probs.requires_grad_()
        answers = Answers(log_probs, tokens, reference)
        is_pair = (tokens > 0).all(-1)
        margins = pair_margins(self._section, answers)
        total = torch.where(is_pair, pair_losses(self._section, margins), 0.0).sum()
        (grad,) = torch.autograd.grad(total, log_probs)
        ratios = torch.where(is_pair.unsqueeze(-1), log_probs - reference, 0.0).flatten(0, 1)
        better = (is_pair & (margins > 0)).sum()
        measured = torch.stack((is_pair.sum(), total, better, *ratios.sum(0))).detach()
        self.sums = all_reduce_sum(self._mesh.batch, measured)
        pairs = self.sums[0].clamp(min=1)
        weights = F.pad(-grad.flatten(1), (0, 1)).gather(1, index)
        return WeighedLabels(weights, pairs, self.sums[1] / pairs)
