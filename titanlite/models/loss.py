"""The output layer and its cross-entropy in one: logits are held for a few tokens at a time.

A vocabulary is large, so whole logits are often the largest tensor of a step. Their gradient needs
nothing but themselves and the label, so both are computed chunk by chunk in the forward pass, and
what is kept for backward is as large as the hidden states and the weights. No product is computed
twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.settings import NotNegative, Range

IGNORED = -100  # a label that is not learned from


@dataclass(frozen=True)
class LossConfig:
    """[loss] Cross-entropy, a sum over tokens divided by those of the whole global batch."""

    chunk_tokens: NotNegative = 4096  # tokens whose logits are held at once; 0: a micro-batch's
    z_loss: Annotated[float, Range(0)] = 0.0
    # weight of the squared logarithm of the softmax's sum, which keeps logits small; 1e-4 is usual


class Vocabulary(Protocol):
    """Which logits this process has, and what it needs to know of the others."""

    first: int  # the id that its first logit is of

    def own(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The plain tensors of this process behind hidden states and output weights."""

    def normalise(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(log of the sum of exp over all logits, logit of the label), [N] each.

        From this process's logits [N, V'] in fp32; what it gives for IGNORED is not looked at.
        """


class WholeVocabulary:
    """All logits are here."""

    first = 0

    def own(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x, weight

    def normalise(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        at = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return logits.logsumexp(-1), at


class Output(nn.Linear):
    """Hidden states [B, T, D] to logits [B, T, V], or with labels to their loss."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.loss, self.vocabulary = LossConfig(), WholeVocabulary()
        self.slope: Callable[..., Tensor] = slope  # or a compiled one

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """With `labels` [B, T]: the summed loss in nats, 0-d in fp32; z-loss only while learning."""
        if labels is None:
            return super().forward(x)
        x, weight = self.vocabulary.own(x, self.weight)
        return _OutputLoss.apply(
            x.flatten(0, 1), weight, labels.flatten(), self, torch.is_grad_enabled()
        )


class _OutputLoss(torch.autograd.Function):
    """The summed loss of hidden states [N, D] by weights [V', D] at labels [N]."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, output: Output, learn: bool
    ) -> Tensor:
        vocabulary, z_loss = output.vocabulary, output.loss.z_loss if learn else 0.0
        size = output.loss.chunk_tokens or max(1, len(x))
        total = torch.zeros((), device=x.device)
        dx = torch.empty_like(x) if learn else None
        dw: Tensor | None = None
        for rows in (slice(start, start + size) for start in range(0, len(x), size)):
            logits = F.linear(x[rows], weight).float()
            lse, at = vocabulary.normalise(logits, labels[rows])
            valid = labels[rows] != IGNORED
            total += torch.where(valid, lse - at + z_loss * lse.square(), 0.0).sum()
            if not learn:
                continue
            dz = output.slope(logits, lse, labels[rows], vocabulary.first, z_loss).to(weight.dtype)
            torch.mm(dz, weight, out=dx[rows])
            if size >= len(x):
                dw = dz.mT @ x
            else:  # in fp32: rounding between chunks would be an error of its own
                dw = torch.zeros_like(weight, dtype=torch.float32) if dw is None else dw
                dw += dz.mT @ x[rows]
        if learn:
            ctx.save_for_backward(dx, dw)
            ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        dx, dw = (_scaled(kept, gradient, ctx.dtype) for kept in ctx.saved_tensors)
        return dx, dw, None, None, None


def _scaled(kept: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # Not 0-d, or the factor would be rounded to the type of `kept`; not in place, because a
    # backward that is split in two comes by twice.
    return torch.mul(kept, factor.view(1, 1), out=torch.empty_like(kept, dtype=dtype))


def slope(logits: Tensor, lse: Tensor, labels: Tensor, first: int, z_loss: float) -> Tensor:
    """The gradient of the summed loss by this process's logits [N, V'] in fp32; overwrites them."""
    valid = labels != IGNORED
    share = logits.sub_(lse.unsqueeze(-1)).exp_()
    if z_loss:
        share.mul_((1 + 2 * z_loss * lse).unsqueeze(-1))
    share.mul_(valid.unsqueeze(-1))
    place = labels - first
    here = (place >= 0) & (place < logits.shape[-1])
    index = place.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    return share.scatter_add_(-1, index, -here.to(share.dtype).unsqueeze(-1))


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels are learned from, as a 0-d integer tensor: no host synchronisation."""
    return (labels != IGNORED).sum()
