"""The gated delta rule by the Triton kernels of fla-core, an optional package for GPUs
(https://github.com/fla-org/flash-linear-attention), with the state in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.errors import ConfigError
from titanlite.kernels.delta_rule import CHUNK, DeltaRule
from titanlite.kernels.documents import index_documents


def try_fla_kernels(sizes: Any, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError unless fla-core computes what `DeltaRule` does on the device.

    `sizes`: of a model, whose heads `ranks` share.
    """
    try:
        if torch.are_deterministic_algorithms_enabled():
            raise ValueError("it chooses kernels by measured times; debug.deterministic = true.")
        _compare_with_torch(sizes, ranks, dtype, device)
    except Exception as error:  # any: it is not installed, or does not support the device
        raise ConfigError(
            f'attention.linear_backend = "fla": not in {dtype} on this {device.type}: {error}',
            fix="""Install it by pip install 'titanlite[fla]', or use "torch".""",
        ) from error


def _compare_with_torch(sizes: Any, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if results of random inputs differ by over 8 roundings of their norm."""
    generator = torch.Generator(device).manual_seed(0)  # the default one stays as on other ranks

    def draw(heads: int, *width: int) -> Tensor:
        return torch.randn(2, 200, heads // ranks, *width, device=device, generator=generator)

    heads, bound = sizes.linear_value_heads, 8 * torch.finfo(dtype).eps
    q, k = (F.normalize(draw(sizes.linear_key_heads, sizes.linear_key_dim), dim=-1) for _ in "qk")
    v, grad = (draw(heads, sizes.linear_value_dim).to(dtype) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v, -draw(heads).abs(), 2 * draw(heads).sigmoid())]
    documents = index_documents((torch.arange(200) % 70).expand(2, -1)).to(device)
    for index in (None, documents):
        exact = DeltaRule(0)(*inputs, index)
        out = apply_fla_kernels(None, *inputs, index, None)
        wanted = [exact, *torch.autograd.grad(exact, inputs, grad.to(exact.dtype))]
        results = [out, *torch.autograd.grad(out, inputs, grad)]
        pairs = zip(results, wanted, strict=True)
        errors = [(result.double() - tensor).norm() / tensor.norm() for result, tensor in pairs]
        if not (error := torch.stack(errors).max().item()) <= bound:  # also NaN
            raise ValueError(f"results differ from torch's by {error:.1e}, over {bound:.1e}.")


def apply_fla_kernels(rule: DeltaRule | None, *arguments: Any) -> Tensor:
    """`DeltaRule.forward` with its `arguments`; returns the dtype of v."""
    q, k, v, log_decay, beta, documents, cache = arguments
    assert cache is None, "generation does not use these kernels"
    inputs = [x.contiguous() for x in (q.to(v.dtype), k.to(v.dtype), v, log_decay, beta)]
    if documents is None:
        return _apply(inputs, [])
    inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
    return _apply(inputs, [documents.on_device, documents.on_host]).view_as(v)


def _call_fla(inputs: list[Tensor], documents: list[Tensor]) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.utils import prepare_chunk_indices

    options: dict[str, Any] = {"scale": 1.0}
    if documents:
        boundaries, on_host = documents
        chunks = prepare_chunk_indices(on_host, CHUNK)  # fla-core would wait for the device
        if boundaries.is_cuda:
            pinned = chunks.pin_memory()
            chunks = boundaries.new_empty(chunks.shape).copy_(pinned, non_blocking=True)
        options |= {"cu_seqlens": boundaries, "chunk_indices": chunks}
    return chunk_gated_delta_rule(*inputs, **options)[0]


# Custom operators, since torch.compile cannot trace the kernels. The backward computes the outputs
# again: fla-core documents only an autograd function, whose two parts cannot be called apart.

_apply = torch.library.custom_op("titanlite::fla_delta_rule", _call_fla, mutates_args=())


@torch.library.custom_op("titanlite::fla_delta_rule_backward", mutates_args=())
def _backward(grad: Tensor, inputs: list[Tensor], documents: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = _call_fla(inputs, documents)
    return list(torch.autograd.grad(out, inputs, grad))


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _autograd(ctx, grad: Tensor):
    inputs, documents = list(ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
    return _backward(grad.contiguous(), inputs, documents), [None] * len(documents)


_apply.register_fake(lambda inputs, documents: torch.empty_like(inputs[2]))
_backward.register_fake(lambda grad, inputs, documents: [torch.empty_like(x) for x in inputs])
_apply.register_autograd(_autograd, setup_context=_save_inputs)
