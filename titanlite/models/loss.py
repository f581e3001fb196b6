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

from titanlite.models.label_sampling import draw_labels
from titanlite.models.mtp import chunks_of_depths, scale_depth_, sums_of_depths
from titanlite.settings import NotNegative, Range


@dataclass(frozen=True)
class LossConfig:
    """[loss] Cross-entropy: summed over tokens, divided by the valid tokens of the global batch."""

    chunk_tokens: NotNegative = 4096  # tokens per chunk of logits; 0: a whole micro-batch
    z_loss: Annotated[float, Range(0)] = 0.0
    # weight of the squared log-sum-exp of the logits, which keeps logits small; 1e-4 is usual;
    # logged as z_loss, and not part of the logged loss
    mtp_weight: Annotated[float, Range(0)] = 0.3
    # weight of the mean loss of the depths of multi-token prediction (model.mtp_layers), logged
    # apart; DeepSeek-V3 and GLM-4.5 used 0.3, then 0.1


class Vocabulary:
    """The softmax of the whole vocabulary; `ShardedVocabulary` is tensor-parallel."""

    first_id = 0  # token id of the first local logit

    def __init__(self) -> None:
        self.logits_in_fp32 = True  # separate operators round each result; compiled ones do not
        self.softmax_terms: Callable[..., tuple[Tensor, Tensor]] = eager_softmax_terms_
        self.logits_grad: Callable[..., None] = eager_logits_grad_

    def compile(self, **options: Any) -> None:
        """Compile the softmax and its gradient by torch.compile with `options`; logits then stay in
        the compute dtype."""
        self.logits_in_fp32 = False
        self.softmax_terms = torch.compile(compiled_softmax_terms, **options)
        self.logits_grad = torch.compile(compiled_logits_grad_, **options)

    def local_tensors(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The local tensors of the hidden states and the output weights."""
        return x, weight

    def log_sum_exp(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(largest local logit, log-sum-exp of all logits, logit of the label), each [N] in fp32.

        Prepares the logits [N, V'] for `logits_grad`. The last result is 0 for ignored labels.
        """
        # not in a compiled function: torch 2.11's may read it after in-place operations
        label_logit = select_label_logit(logits, labels - self.first_id)
        max_logit, exp_sum = self.softmax_terms(logits)
        overall_max = self.reduce_max(max_logit.clone())  # which reduces in place
        terms = torch.stack((exp_sum * (max_logit - overall_max).exp(), label_logit))
        exp_sum, label_logit = self.reduce_sum(terms)
        return max_logit, overall_max + exp_sum.log(), label_logit

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
        self.last_terms: Tensor | None = None
        # [2] in fp32, of the last loss: the cross-entropy without further depths, and the z-loss
        self.last_token_losses: Tensor | None = None  # [B, T] in fp32: cross-entropy of each label
        self.weights: Tensor | None = None  # of the labels [N], in fp32; None: 1
        self.last_depths: Tensor | None = None  # see `sums_of_depths`
        self._observer: Callable[[Tensor], None] | None = None
        self.samples = False

    def sample_labels(self, samples: bool) -> None:
        """Whether labels are `sampling_keys`, by which this layer draws labels; without z-loss."""
        self.samples = samples

    def observe_token_losses(self, observer: Callable[[Tensor], None] | None) -> None:
        """Call `observer` with the cross-entropy of each token, [B, T] in fp32, in every forward
        with labels and gradients; None: no longer."""
        self._observer = observer

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        depths: int = 0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """With `labels` [B, T]: the loss summed over tokens, in nats, 0-d in fp32.

        z-loss is included only where gradients are enabled, so not in validation. `depths` of
        multi-token prediction follow in x and labels [(1 + depths) * B, T]; their loss is weighted.
        `weights` [B, T] in fp32 multiply the cross-entropies; not with z-loss or depths.
        """
        if labels is None:
            return super().forward(x)
        self.weights = None if weights is None else weights.flatten()
        x, weight = self.vocabulary.local_tensors(x, self.weight)
        with_grad = torch.is_grad_enabled()
        loss, self.last_terms, token_losses = _OutputLoss.apply(
            x.flatten(0, 1), weight, labels.reshape(1 + depths, -1), self, with_grad
        )
        self.last_depths = sums_of_depths(token_losses, labels.reshape(1 + depths, -1))
        self.last_token_losses = token_losses.view(labels.shape)[: len(labels) // (1 + depths)]
        if with_grad and self._observer is not None:
            self._observer(self.last_token_losses)
        return loss


class _OutputLoss(torch.autograd.Function):
    """(summed loss, `OutputLayer.last_terms`, cross-entropy of each token [N]) of hidden states
    [N, D], weights [V', D] and labels [1, N]; of all depths, if labels are [1 + depths, N]."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, labels: Tensor, output: OutputLayer, with_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = chunks_of_depths(labels, output.config.chunk_tokens, output.config.mtp_weight)
        total, own, z_total = (torch.zeros((), device=x.device) for _ in range(3))
        token_losses = torch.empty(len(x), device=x.device)
        x_grad = torch.empty_like(x) if with_grad else None
        weight_grad: Tensor | None = None
        labels = labels.flatten()
        for rows, factor in parts:
            losses, z_loss, grad = _chunk_loss(x[rows], weight, labels[rows], output, with_grad)
            token_losses[rows] = losses
            if output.weights is not None:
                losses = losses * output.weights[rows]
                grad = None if grad is None else grad.mul_(output.weights[rows].unsqueeze(-1))
            loss = losses.sum()
            own = own + loss if factor is None else own
            scale_depth_(factor, loss, z_loss, grad)
            total, z_total = total + loss + z_loss, z_total + z_loss
            if x_grad is None or grad is None:
                continue
            torch.mm(grad, weight, out=x_grad[rows])
            if not ctx.needs_input_grad[1]:
                continue  # frozen
            if rows == slice(0, len(x)) and grad.dtype != torch.float16:
                weight_grad = grad.mT @ x
            else:
                weight_grad = _add_weight_grad(weight_grad, grad, x[rows])
            del grad  # free it before the next chunk's logits are allocated
        if with_grad:
            ctx.save_for_backward(x_grad, weight_grad)
            ctx.dtype = weight.dtype
        terms = torch.stack((own, z_total))
        ctx.mark_non_differentiable(terms, token_losses)
        return total, terms, token_losses

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        grads = (x if x is None else _scaled(x, grad, ctx.dtype) for x in ctx.saved_tensors)
        return *grads, None, None, None


def _scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # `factor` must not be 0-d, or it would be rounded to the dtype of `saved`. Not in place: a
    # backward that is split into two halves calls this twice.
    return torch.mul(saved, factor.view(1, 1), out=torch.empty_like(saved, dtype=dtype))


def _add_weight_grad(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """`total` plus grad^T x, the gradient [V', D] of the weights, in fp32; None: the first chunk.

    Rounding to bfloat16 after every chunk would add an error. In float16, the sum of 32,768 tokens
    with one channel of value 4, not yet divided by the tokens, would overflow at any loss scale.
    """
    if grad.is_cuda:  # the matmul adds in fp32; torch has `out_dtype` for CUDA only
        if total is None:
            return torch.mm(grad.mT, x, out_dtype=torch.float32)
        return torch.addmm(total, grad.mT, x, out_dtype=torch.float32, out=total)
    if grad.dtype == torch.float16:  # on a CPU, float16 matmuls are slower than float32 ones
        grad, x = grad.float(), x.float()
    part = grad.mT @ x
    return part.float() if total is None else total.add_(part)


def _chunk_loss(
    x: Tensor, weight: Tensor, labels: Tensor, output: OutputLayer, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The losses of one chunk, and their gradient with respect to the logits.

    (cross-entropy of each token [N], summed z-loss, gradient of the sum of all).
    One buffer holds the logits, then their gradient.
    """
    z_weight = output.config.z_loss if with_grad and not output.samples else 0.0
    vocabulary, logits = output.vocabulary, F.linear(x, weight)
    logits = logits.float() if vocabulary.logits_in_fp32 else logits
    if output.samples:
        labels = draw_labels(logits, labels, vocabulary.first_id, vocabulary.reduce_max)
    max_logit, lse, label_logit = vocabulary.log_sum_exp(logits, labels)
    valid = labels >= 0
    losses = torch.where(valid, lse - label_logit, 0.0)
    z_loss = torch.where(valid, z_weight * lse.square(), 0.0).sum()
    if not with_grad:
        return losses, z_loss, None
    factor = torch.where(valid, (max_logit - lse).exp() * (1 + 2 * z_weight * lse), 0.0)
    vocabulary.logits_grad(logits, max_logit, factor, labels - vocabulary.first_id)
    return losses, z_loss, logits.to(weight.dtype)


def eager_softmax_terms_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `compiled_softmax_terms`; overwrites the fp32 logits with the exponentials."""
    max_logit = logits.amax(-1)
    return max_logit, logits.sub_(max_logit.unsqueeze(-1)).exp_().sum(-1)


def eager_logits_grad_(logits: Tensor, max_logit: Tensor, factor: Tensor, label: Tensor) -> None:
    """The result of `compiled_logits_grad_`, from the exponentials in `logits`."""
    is_local, index = _local_index(label, logits)
    logits.mul_(factor.unsqueeze(-1))
    logits.scatter_add_(-1, index, -is_local.to(logits.dtype).unsqueeze(-1))


def compiled_softmax_terms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of the logits [N, V], and the sum of exp(logit - largest); [N] each."""
    logits = logits.float()
    max_logit = logits.amax(-1, keepdim=True)  # inductor computes both in one pass if dims are kept
    exp_sum = (logits - max_logit).exp().sum(-1, keepdim=True)
    return max_logit.squeeze(-1), exp_sum.squeeze(-1)


def compiled_logits_grad_(logits: Tensor, max_logit: Tensor, factor: Tensor, label: Tensor) -> None:
    """Overwrite the logits [N, V] with the gradient of the summed loss; each depends on its own.

    `factor` [N] times exp(logit - max_logit) is the softmax (with the z-loss term); it is 0 for
    ignored labels, which are not local ids, so their rows are all 0.
    """
    softmax = (logits.float() - max_logit.unsqueeze(-1)).exp() * factor.unsqueeze(-1)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    logits.copy_(softmax - (ids == label.unsqueeze(-1)).float())


def select_label_logit(logits: Tensor, label: Tensor) -> Tensor:
    """The logit [N] in fp32 at index `label`; 0 where `label` is not a local id."""
    is_local, index = _local_index(label, logits)
    return torch.where(is_local, logits.gather(-1, index).squeeze(-1).float(), 0.0)


def _local_index(label: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each label [N] is an index into logits [N, V], and an always valid index [N, 1]."""
    is_local = (label >= 0) & (label < logits.shape[-1])
    return is_local, label.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)


def valid_tokens(labels: Tensor) -> Tensor:
    """Number of labels that are not ignored, 0-d integer; does not synchronise the host."""
    return (labels >= 0).sum()
