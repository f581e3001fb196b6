"""Attention over a part of the keys, with what is needed to merge parts: the sum of the scores.

SDPA hides that sum (`lse`, the logarithm of it), so its kernels are called by the names they have
below SDPA. They are not part of torch's documented interface; the signatures are the same in torch
2.11 to 2.15.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class FlashKernel(Protocol):
    """q [B, H, T, K] over k, v [B, Hkv, S, K], H a multiple of Hkv; `causal` needs T = S."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """(out [B, H, T, K], lse [B, H, T] in fp32)."""

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v where `out` and `lse` may be those over more keys than these."""


def flash_kernel_for(q: Tensor) -> FlashKernel:
    """The fastest kernel that this device has for this type."""
    if q.device.type == "cpu":
        return CpuFlash()
    half, width = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    recent = torch.cuda.get_device_capability(q.device) >= (8, 0)  # Ampere
    return CudaFlash() if half and recent and width % 8 == 0 and width <= 256 else EagerAttention()


class CudaFlash:
    """FlashAttention; it serves grouped queries by itself."""

    def forward(self, q, k, v, causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse

    def backward(self, gradient, q, k, v, out, lse, causal):
        lengths = (None, None, q.shape[2], k.shape[2])  # no packed sequences
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's generator
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, *lengths, 0.0, causal, unused, unused
        )


class CpuFlash:
    """The blocked kernel of SDPA on a CPU; its backward wants as many key heads as query heads."""

    def forward(self, q, k, v, causal):
        k, v = (repeat_kv_heads(part, q) for part in (k, v))
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)

    def backward(self, gradient, q, k, v, out, lse, causal):
        every_k, every_v = (repeat_kv_heads(part, q) for part in (k, v))
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, every_k, every_v, out, lse, 0.0, causal
        )
        return dq, _summed(dk, k), _summed(dv, v)


class EagerAttention:
    """Matrix products and a softmax, for what no kernel takes (fp32 on CUDA)."""

    def forward(self, q, k, v, causal):
        scores = self._scores(q, repeat_kv_heads(k, q), causal)
        lse = scores.logsumexp(-1)
        return ((scores - lse.unsqueeze(-1)).exp() @ repeat_kv_heads(v, q).float()).to(q.dtype), lse

    def backward(self, gradient, q, k, v, out, lse, causal):
        every_k, every_v = (repeat_kv_heads(part, q).float() for part in (k, v))
        g = gradient.float()
        share = (self._scores(q, every_k, causal) - lse.unsqueeze(-1)).exp()
        inner = (g * out).sum(-1, keepdim=True)
        ds = share * (g @ every_v.mT - inner) / math.sqrt(q.shape[-1])
        dk, dv = ds.mT @ q.float(), share.mT @ g
        return ((ds @ every_k).to(q.dtype), _summed(dk, k).to(k.dtype), _summed(dv, v).to(v.dtype))

    def _scores(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores


def repeat_kv_heads(part: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, Hkv, S, K], each head as often as query heads share it: [B, H, S, K]."""
    times = q.shape[1] // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, dim=1)


def _summed(gradient: Tensor, part: Tensor) -> Tensor:
    """The gradient [B, H, S, K] of repeated heads, back at those of `part`."""
    if gradient.shape[1] == part.shape[1]:
        return gradient
    return gradient.unflatten(1, (part.shape[1], -1)).sum(2)
