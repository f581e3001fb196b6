"""Attention over a subset of the keys, with the log-sum-exp (lse) that merging subsets needs.

SDPA does not return the lse, so its kernels are called through the ATen operators below it. They
are not part of torch's documented interface; their signatures are the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten


def flash_kernel_for(
    q: Tensor, cudnn: bool = False
) -> EagerAttention | CudaFlash | CudnnAttention | CpuFlash:
    """The kernel for the device and dtype of `q` (see `EagerAttention`); `cudnn`: on a GPU."""
    if q.device.type == "cpu":
        return CpuFlash()
    is_half, head_dim = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    is_ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)  # or newer
    supported = is_half and is_ampere and head_dim % 8 == 0 and head_dim <= 256
    return (CudnnAttention() if cudnn else CudaFlash()) if supported else EagerAttention()


class EagerAttention:
    """Matmuls and a softmax in fp32, where no kernel supports the dtype, head size or GPU.

    As with every kernel, q [B, H, T, K] attends to k, v [B, Hkv, S, K]; H is a multiple of Hkv.
    `mask`: False, all keys; True, causal, which needs T = S; or a tensor [T, S] that is True where
    a query attends to a key. Each query attends to a key.
    """

    def forward(self, q, k, v, mask):
        """(out [B, H, T, K], lse [B, H, T] in fp32)."""
        scores = self._scores(q, repeat_kv_heads(k, q), mask)
        lse = scores.logsumexp(-1)
        probabilities = (scores - lse.unsqueeze(-1)).exp()
        return (probabilities @ repeat_kv_heads(v, q).float()).to(q.dtype), lse

    def backward(self, grad, q, k, v, out, lse, mask):
        """Gradients of q, k, v; `out` and `lse` may cover more keys than `k` and `v`."""
        repeated_k, repeated_v = (repeat_kv_heads(tensor, q).float() for tensor in (k, v))
        grad = grad.float()
        probabilities = (self._scores(q, repeated_k, mask) - lse.unsqueeze(-1)).exp()
        delta = (grad * out).sum(-1, keepdim=True)
        d_scores = probabilities * (grad @ repeated_v.mT - delta) / math.sqrt(q.shape[-1])
        dq = (d_scores @ repeated_k).to(q.dtype)
        dk, dv = d_scores.mT @ q.float(), probabilities.mT @ grad
        return dq, _sum_repeated_heads(dk, k).to(k.dtype), _sum_repeated_heads(dv, v).to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, mask: bool | Tensor) -> Tensor:
        scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
        if mask is True:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        return scores.masked_fill(~mask, -math.inf) if isinstance(mask, Tensor) else scores


class CudaFlash:
    """FlashAttention 2, 3 or 4 on a GPU; supports grouped queries itself, but no masks."""

    def forward(self, q, k, v, mask):
        if isinstance(mask, Tensor):
            return EagerAttention().forward(q, k, v, mask)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, mask)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, mask):
        if isinstance(mask, Tensor):
            return EagerAttention().backward(grad, q, k, v, out, lse, mask)
        lengths = (None, None, q.shape[2], k.shape[2])  # no packed sequences
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's generator
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, mask, unused, unused
        )


class CudnnAttention:
    """As `CudaFlash`, by cuDNN, which takes time to plan a call of sizes it has not seen before."""

    def forward(self, q, k, v, mask):
        if isinstance(mask, Tensor):
            return EagerAttention().forward(q, k, v, mask)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, mask)
        return out, lse.squeeze(-1)  # of [B, H, T, 1]

    def backward(self, grad, q, k, v, out, lse, mask):
        if isinstance(mask, Tensor):
            return EagerAttention().backward(grad, q, k, v, out, lse, mask)
        # Torch 2.11 finds a plan by the strides of q, k and v alone, and one that was made for
        # other strides of `out` or `grad` computes wrong gradients: those of q, always.
        strided = q.new_empty_strided
        grad, out = (
            tensor if tensor.stride() == q.stride() else strided(q.shape, q.stride()).copy_(tensor)
            for tensor in (grad, out)
        )
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's generator
        others = unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, mask
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), *others
        )


class CpuFlash:
    """SDPA's blocked CPU kernel; its backward needs as many key heads as query heads."""

    def forward(self, q, k, v, mask):
        k, v = (repeat_kv_heads(tensor, q) for tensor in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is True, attn_mask=_additive(mask, q)
        )

    def backward(self, grad, q, k, v, out, lse, mask):
        repeated_k, repeated_v = (repeat_kv_heads(tensor, q) for tensor in (k, v))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            q,
            repeated_k,
            repeated_v,
            out,
            lse,
            0.0,
            mask is True,
            attn_mask=_additive(mask, q),
        )
        return dq, _sum_repeated_heads(dk, k), _sum_repeated_heads(dv, v)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add a logit of each head, `sinks` [H], to the denominator of the softmax; changes `out`.

    A sink has no value (gpt-oss, https://arxiv.org/abs/2508.10925, section 2.2): attention to it
    adds nothing to the output. A kernel's `backward` with the results computes the gradients of q,
    k and v, because it recomputes the probabilities from the lse.
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.float().unsqueeze(-1))
    return out.mul_((lse - total).exp().unsqueeze(-1)), total


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [H] of the sinks from the results of `add_sinks`, and `grad`, that of `out`.

    That of a score is its probability times (the gradient of the probability - sum(grad * out)),
    and a sink's probability has no gradient of its own.
    """
    probability = (sinks.float().unsqueeze(-1) - lse).exp()
    return -(probability * (grad.float() * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _additive(mask: bool | Tensor, q: Tensor) -> Tensor | None:
    """What a mask adds to the scores: 0 or -inf, [1, 1, T, S] in the dtype of `q`."""
    if not isinstance(mask, Tensor):
        return None
    added = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    return added.masked_fill(~mask, -math.inf)[None, None]


def window_mask(q: Tensor, k: Tensor, offset: int, window: int) -> Tensor:
    """Where queries [B, H, T, K] attend to keys [B, H, S, K] in a sliding window: [T, S].

    `offset` is the position of the first query, counted from the first key. A query attends to the
    `window` keys that end at its own position (https://arxiv.org/abs/2310.06825, section 2).
    """
    queries = torch.arange(offset, offset + q.shape[2], device=q.device)
    distance = queries.unsqueeze(1) - torch.arange(k.shape[2], device=q.device)
    return (distance >= 0) & (distance < window)


def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None, **mask: Any) -> Tensor:
    """SDPA with grouped heads, by the kernel `backend`; None lets SDPA choose."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and backend == SDPBackend.EFFICIENT_ATTENTION:  # does not support GQA
        k, v = repeat_kv_heads(k, q), repeat_kv_heads(v, q)
        grouped = False
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **mask)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **mask)


def repeat_kv_heads(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat each head of kv [B, Hkv, S, K] for its query heads: [B, H, S, K]."""
    repeats = q.shape[1] // kv.shape[1]
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim=1)


def _sum_repeated_heads(grad: Tensor, kv: Tensor) -> Tensor:
    """The gradient of `kv` from the gradient [B, H, S, K] of its repeated heads."""
    if grad.shape[1] == kv.shape[1]:
        return grad
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2)
