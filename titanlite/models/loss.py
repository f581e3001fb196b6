"""The output layer fused with its cross-entropy, which computes the logits of one chunk at a time.

The vocabulary is large, so the logits of a whole micro-batch are often the largest tensor of a
step. Their gradient depends only on themselves and the labels, so the forward pass computes it,
too, chunk by chunk, and saves for backward the gradients of the hidden states and of the weights.
No matmul is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.settings import NotNegative, Range


@dataclass(frozen=True)
class LossConfig:
    """[loss] Cross-entropy: summed over tokens, divided by the valid tokens of the global batch."""

    chunk_tokens: NotNegative = 4096  # tokens per chunk of logits; 0: a whole micro-batch
    z_loss: Annotated[float, Range(0)] = 0.0
    # weight of the squared log-sum-exp of the logits, which keeps logits small; 1e-4 is usual;
    # logged as z_loss, and not part of the logged loss


class Vocabulary:
    """How the softmax is computed from the logits of this process: here, the whole vocabulary.

    Tensor parallel replaces it by subclasses that reduce over the ranks.
    """

    first_id = 0  # token id of the first local logit

    def __init__(self) -> None:
        # or its compiled version
        self.softmax_terms: Callable[..., tuple[Tensor, Tensor]] = softmax_terms

    def compile(self, **options: Any) -> None:
        """Compile the element-wise part of the softmax; `options` are torch.compile's."""
        self.softmax_terms = torch.compile(self.softmax_terms, **options)

    def local_tensors(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The local tensors of the hidden states and the output weights."""
        return x, weight

    def log_sum_exp(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(largest logit, log-sum-exp of all logits, logit of the label), each [N].

        Overwrites the local fp32 logits [N, V'] with exp(logit - largest). The last result is 0
        where the label is ignored.
        """
        max_logit = self.reduce_max(logits.amax(-1))
        # Stacked outside of the compiled function: inside of it, torch 2.11's compiler reads the
        # label's logit after the in-place exp_ and reports a wrong loss.
        terms = torch.stack(self.softmax_terms(logits, max_logit, labels - self.first_id))
        exp_sum, label_logit = self.reduce_sum(terms)
        return max_logit, max_logit + exp_sum.log(), label_logit

    def reduce_max(self, local: Tensor) -> Tensor:
        """The element-wise maximum over the ranks that shard the vocabulary."""
        return local

    def reduce_sum(self, local: Tensor) -> Tensor:
        """The sum over the ranks that shard the vocabulary."""
        return local


class OutputLayer(nn.Linear):
    """Hidden states [B, T, D] to logits [B, T, V], or, with labels, to their summed loss."""

    def __init__(self, dim: int, vocab_size: int):
        super().__init__(dim, vocab_size, bias=False)
        self.config, self.vocabulary = LossConfig(), Vocabulary()
        self.logits_grad: Callable[..., Tensor] = logits_grad  # or its compiled version
        self.last_z_loss: Tensor | None = None  # z-loss part of the last loss, 0-d in fp32
        self._observer: Callable[[Tensor], None] | None = None

    def observe_token_losses(self, observer: Callable[[Tensor], None] | None) -> None:
        """Call `observer` in every forward with labels and gradients; None: no longer.

        Its argument is the cross-entropy of each token, [B, T] in fp32.
        """
        self._observer = observer

    def compile_loss(self, **options: Any) -> None:
        """Compile the element-wise parts of the loss, which then read and write the logits fewer
        times; `options` are torch.compile's."""
        self.logits_grad = torch.compile(self.logits_grad, **options)
        self.vocabulary.compile(**options)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """With `labels` [B, T]: the loss summed over tokens, in nats, 0-d in fp32.

        z-loss is included only where gradients are enabled, so a validation loss has none.
        """
        if labels is None:
            return super().forward(x)
        x, weight = self.vocabulary.local_tensors(x, self.weight)
        with_grad = torch.is_grad_enabled()
        loss, self.last_z_loss, token_losses = _OutputLoss.apply(
            x.flatten(0, 1), weight, labels.flatten(), self, with_grad
        )
        if with_grad and self._observer is not None:
            self._observer(token_losses.view(labels.shape))
        return loss


class _OutputLoss(torch.autograd.Function):
    """(summed loss, its z-loss part, cross-entropy of each token [N]) of hidden states [N, D],
    weights [V', D] and labels [N]."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, output: OutputLayer, with_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        z_weight = output.config.z_loss if with_grad else 0.0
        chunk = output.config.chunk_tokens or max(1, len(x))
        total, z_total = (torch.zeros((), device=x.device) for _ in range(2))
        token_losses = torch.empty(len(x), device=x.device)
        x_grad = torch.empty_like(x) if with_grad else None
        weight_grad: Tensor | None = None
        for rows in (slice(start, start + chunk) for start in range(0, len(x), chunk)):
            losses, z_loss, grad = _chunk_loss(
                x[rows], weight, labels[rows], output, z_weight, with_grad
            )
            token_losses[rows] = losses
            total, z_total = total + losses.sum() + z_loss, z_total + z_loss
            if x_grad is None or grad is None:
                continue
            torch.mm(grad, weight, out=x_grad[rows])
            if chunk >= len(x):
                weight_grad = _weight_grad(grad, x)
            else:  # accumulate in fp32: rounding after every chunk would add an error
                if weight_grad is None:
                    weight_grad = torch.zeros_like(weight, dtype=torch.float32)
                weight_grad += _weight_grad(grad, x[rows])
            del grad  # free it before the next chunk's logits are allocated
        if with_grad:
            ctx.save_for_backward(x_grad, weight_grad)
            ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(z_total, token_losses)
        return total, z_total, token_losses

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        x_grad, weight_grad = (_scaled(saved, grad, ctx.dtype) for saved in ctx.saved_tensors)
        return x_grad, weight_grad, None, None, None


def _scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # `factor` must not be 0-d, or it would be rounded to the dtype of `saved`. Not in place: a
    # backward that is split into two halves calls this twice.
    return torch.mul(saved, factor.view(1, 1), out=torch.empty_like(saved, dtype=dtype))


def _weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, the gradient [V', D] of the weights; computed in fp32 for float16 inputs.

    The sum over tokens is not yet divided by the number of tokens, and the loss scale is not
    applied: in float16, 32,768 tokens with one channel of value 4 would overflow at any loss scale.
    """
    if grad.dtype != torch.float16:
        return grad.mT @ x
    if grad.is_cuda:
        return torch.mm(grad.mT, x, out_dtype=torch.float32)
    return grad.mT.float() @ x.float()  # on a CPU, float16 matmuls are slower than float32 ones


def _chunk_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    output: OutputLayer,
    z_weight: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The losses of one chunk, and their gradient with respect to the logits.

    (cross-entropy of each token [N], summed z-loss, gradient of the sum of all).
    One fp32 buffer holds the logits, then their exponentials, then their gradient.
    """
    vocabulary, logits = output.vocabulary, F.linear(x, weight).float()
    max_logit, lse, label_logit = vocabulary.log_sum_exp(logits, labels)
    valid = labels >= 0
    losses = torch.where(valid, lse - label_logit, 0.0)
    z_loss = torch.where(valid, z_weight * lse.square(), 0.0).sum()
    if not with_grad:
        return losses, z_loss, None
    factor = torch.where(valid, (max_logit - lse).exp() * (1 + 2 * z_weight * lse), 0.0)
    grad = output.logits_grad(logits, factor, labels - vocabulary.first_id)
    return losses, z_loss, grad.to(weight.dtype)


def softmax_terms(logits: Tensor, max_logit: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of exp(logit - max_logit), and the logit at index `label`; [N] each.

    Overwrites logits [N, V] with the exponentials. The logit is 0 where `label` is not a local id.
    """
    is_local, index = _local_index(label, logits)
    label_logit = torch.where(is_local, logits.gather(-1, index).squeeze(-1), 0.0)
    logits.sub_(max_logit.unsqueeze(-1)).exp_()
    return logits.sum(-1), label_logit


def logits_grad(exponentials: Tensor, factor: Tensor, label: Tensor) -> Tensor:
    """The gradient of the summed loss with respect to the logits, computed in place.

    exponentials [N, V] times `factor` [N] are the softmax (with the z-loss term); `factor` is 0 for
    ignored labels, which are not local ids, so their rows are all 0.
    """
    is_local, index = _local_index(label, exponentials)
    exponentials.mul_(factor.unsqueeze(-1))
    return exponentials.scatter_add_(-1, index, -is_local.to(exponentials.dtype).unsqueeze(-1))


def _local_index(label: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each label [N] is an index into logits [N, V], and an always valid index [N, 1]."""
    is_local = (label >= 0) & (label < logits.shape[-1])
    return is_local, label.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)


def valid_tokens(labels: Tensor) -> Tensor:
    """Number of labels that are not ignored, 0-d integer; does not synchronise the host."""
    return (labels >= 0).sum()
