"""The output layer and its cross-entropy in one: logits are held for a few tokens at a time.

A vocabulary is large, so whole logits are often the largest tensor of a step. Their gradient needs
nothing but themselves and the label, so both are computed chunk by chunk in the forward pass, and
what is kept for backward is as large as the hidden states and the weights. No product is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.labels import IGNORE_INDEX
from titanlite.settings import NotNegative, Range


@dataclass(frozen=True)
class LossConfig:
    """[loss] Cross-entropy, a sum over tokens divided by those of the whole global batch."""

    chunk_tokens: NotNegative = 4096  # tokens whose logits are held at once; 0: a micro-batch's
    z_loss: Annotated[float, Range(0)] = 0.0
    # weight of the squared logarithm of the softmax's sum, which keeps logits small; 1e-4 is usual;
    # reported by itself, as z_loss beside loss


class Vocabulary:
    """Which logits this process has; here all of them, and nobody else to ask."""

    first = 0  # the id that its first logit is of

    def __init__(self):
        self.exponentials = exponentials  # or a compiled one

    def own(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The plain tensors of this process behind hidden states and output weights."""
        return x, weight

    def normalise(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(largest logit, log of the sum of exp over all logits, logit of the label), [N] each.

        From this process's logits [N, V'] in fp32, of which exp(logit - largest) is left. What it
        gives for IGNORED is not looked at.
        """
        largest = self.largest(logits.amax(-1))
        total, at = self.sum(self.exponentials(logits, largest, labels - self.first))
        return largest, largest + total.log(), at

    def largest(self, own: Tensor) -> Tensor:
        """The largest of all, of what each process has."""
        return own

    def sum(self, own: Tensor) -> Tensor:
        """The sum of what each process has."""
        return own


class OutputLayer(nn.Linear):
    """Hidden states [B, T, D] to logits [B, T, V], or with labels to their loss."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.loss, self.vocabulary = LossConfig(), Vocabulary()
        self.slope: Callable[..., Tensor] = slope  # or a compiled one
        self.z_loss: Tensor | None = None  # how much of the last loss was z-loss, 0-d in fp32

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """With `labels` [B, T]: the summed loss in nats, 0-d in fp32; z-loss only while learning."""
        if labels is None:
            return super().forward(x)
        x, weight = self.vocabulary.own(x, self.weight)
        loss, self.z_loss = _OutputLoss.apply(
            x.flatten(0, 1), weight, labels.flatten(), self, torch.is_grad_enabled()
        )
        return loss


class _OutputLoss(torch.autograd.Function):
    """(summed loss, what of it is z-loss) of hidden states [N, D] by weights [V', D] at labels [N]."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, output: OutputLayer, learn: bool
    ) -> tuple[Tensor, Tensor]:
        z_loss = output.loss.z_loss if learn else 0.0
        size = output.loss.chunk_tokens or max(1, len(x))
        total, z_total = (torch.zeros((), device=x.device) for _ in range(2))
        dx = torch.empty_like(x) if learn else None
        dw: Tensor | None = None
        for rows in (slice(start, start + size) for start in range(0, len(x), size)):
            loss, z, dz = _of_chunk(x[rows], weight, labels[rows], output, z_loss, learn)
            total, z_total = total + loss + z, z_total + z
            if not learn:
                continue
            torch.mm(dz, weight, out=dx[rows])
            if size >= len(x):
                dw = _sum_of_products(dz, x)
            else:  # in fp32: rounding between chunks would be an error of its own
                dw = torch.zeros_like(weight, dtype=torch.float32) if dw is None else dw
                dw += _sum_of_products(dz, x[rows])
            del dz  # before the next logits come
        if learn:
            ctx.save_for_backward(dx, dw)
            ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(z_total)
        return total, z_total

    @staticmethod
    def backward(ctx, gradient: Tensor, _):
        dx, dw = (_scaled(kept, gradient, ctx.dtype) for kept in ctx.saved_tensors)
        return dx, dw, None, None, None


def _scaled(kept: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Not 0-d, or the factor would be rounded to the type of `kept`; not in place, because a
    # backward that is split in two comes by twice.
    return torch.mul(kept, factor.view(1, 1), out=torch.empty_like(kept, dtype=dtype))


def _sum_of_products(dz: Tensor, x: Tensor) -> Tensor:
    """dz^T x, the gradient [V', D] of the weights; of float16 in fp32.

    It is a sum over tokens that neither the number of tokens nor a loss scale has divided yet: in
    float16, 32,768 tokens with a channel of 4 would overflow, whatever the scale.
    """
    if dz.dtype != torch.float16:
        return dz.mT @ x
    if dz.is_cuda:
        return torch.mm(dz.mT, x, out_dtype=torch.float32)
    return dz.mT.float() @ x.float()  # on a CPU products of float16 are the slower ones


def _of_chunk(
    x: Tensor, weight: Tensor, labels: Tensor, output: OutputLayer, z_loss: float, learn: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cross-entropy and z-loss of a few tokens, and the gradient of their sum by the logits.

    All logits are in one buffer in fp32.
    """
    vocabulary, logits = output.vocabulary, F.linear(x, weight).float()
    largest, lse, at = vocabulary.normalise(logits, labels)
    valid = labels != IGNORE_INDEX
    loss = torch.where(valid, lse - at, 0.0).sum()
    z = torch.where(valid, z_loss * lse.square(), 0.0).sum()
    if not learn:
        return loss, z, None
    factor = torch.where(valid, (largest - lse).exp() * (1 + 2 * z_loss * lse), 0.0)
    return loss, z, output.slope(logits, factor, labels - vocabulary.first).to(weight.dtype)


def exponentials(logits: Tensor, largest: Tensor, place: Tensor) -> Tensor:
    """[2, N]: the sum of exp(logit - largest), which is left of logits [N, V], and the logit at
    `place`, or 0 where that is not among them."""
    here, index = _within(place, logits)
    at = torch.where(here, logits.gather(-1, index).squeeze(-1), 0.0)
    logits.sub_(largest.unsqueeze(-1)).exp_()
    return torch.stack((logits.sum(-1), at))


def slope(shares: Tensor, factor: Tensor, place: Tensor) -> Tensor:
    """The gradient by the logits of the summed loss, in place: shares [N, V] times `factor` [N] are
    those of a softmax, all zero where nothing is learned."""
    here, index = _within(place, shares)
    shares.mul_(factor.unsqueeze(-1))
    return shares.scatter_add_(-1, index, -here.to(shares.dtype).unsqueeze(-1))


def _within(place: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each place [N] is one of the logits [N, V], and an index [N, 1] that always is."""
    here = (place >= 0) & (place < logits.shape[-1])
    return here, place.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels are learned from, as a 0-d integer tensor: no host synchronisation."""
    return (labels != IGNORE_INDEX).sum()
