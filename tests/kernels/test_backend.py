"""The configured attention kernel is the one that runs, and all kernels agree."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.backend import (
    CPU_KERNELS,
    KERNELS,
    AttentionConfig,
    AttentionShape,
    activate_flash_package,
    choose_kernel,
    set_attention_kernel,
)
from titanlite.kernels.backend import _KernelTrial as KernelTrial
from titanlite.kernels.flash import CpuFlash, CudnnAttention
from titanlite.models import FAMILIES, Llama3Sizes

FAMILY, CPU = FAMILIES["llama3"], torch.device("cpu")
SIZES = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
ATTENTION = AttentionShape(batch=2, n_heads=4, n_kv_heads=2, seq_len=16, head_dim=8)
FLASH, SOFTMAX = "_scaled_dot_product_flash_attention_for_cpu", "_softmax"
EXPECTED_OPS = {"flash": {FLASH}, "math": {SOFTMAX}}


class AttentionOps(TorchDispatchMode):
    """Records which attention operators run."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        self.names |= {name.replace("_safe", "")} & {FLASH, SOFTMAX}
        return function(*args, **(kwargs or {}))


def build_model(kernel: str | None):
    torch.manual_seed(0)
    model = FAMILY.build(SIZES)
    set_attention_kernel(model, FAMILY.attention_pattern, kernel, documents=False)
    return model


def gradients(kernel: str | None) -> list[torch.Tensor]:
    model = build_model(kernel)
    model(torch.arange(48).view(2, 24)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_the_configured_kernel_runs(kernel):
    with AttentionOps() as ops:
        gradients(kernel)
    assert ops.names == EXPECTED_OPS[kernel]


def test_all_kernels_give_the_same_gradients():
    for kernel in CPU_KERNELS:
        for actual, expected in zip(gradients(kernel), gradients(None), strict=True):
            assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_a_compiled_block_runs_the_configured_kernel(kernel):
    """The block is one graph, and code outside it still uses the default kernel."""
    model = build_model(kernel)
    for block in model.layers.values():
        block.compile(fullgraph=True, backend="aot_eager", dynamic=False)  # as compile_blocks
    run = partial(model, torch.arange(48).view(2, 24))
    run()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run()
    names = {event.key.removeprefix("aten::") for event in trace.key_averages()}
    assert names & {FLASH, SOFTMAX} == EXPECTED_OPS[kernel]
    with AttentionOps() as ops:
        gradients(None)
    assert ops.names == EXPECTED_OPS["flash"]


def choose_on_cpu(dtype=torch.float32, context_degree=1, **section) -> str | None:
    config = AttentionConfig(**section)
    return choose_kernel(config, ATTENTION, dtype, CPU, context_degree=context_degree)


def test_on_a_cpu_sdpa_chooses_the_kernel_and_nothing_is_measured():
    """A choice by measured times could change the bits of a restarted run."""
    assert choose_on_cpu() is None
    assert choose_on_cpu(torch.bfloat16) is None
    assert choose_on_cpu(context_degree=2) is None
    assert choose_on_cpu(mask="document") is None


def test_a_configured_kernel_that_can_run_is_choose_on_cpu():
    assert [choose_on_cpu(backend=name) for name in CPU_KERNELS] == list(CPU_KERNELS)
    assert choose_on_cpu(backend="flash", context_degree=2) == "flash"


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - set(CPU_KERNELS)))
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as refused:
        choose_on_cpu(backend=name)
    message = str(refused.value)
    assert (
        f'attention.backend = "{name}": cannot run on cpu in torch.float32 with 4 heads' in message
    )
    reason = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}.get(name, "No viable backend")
    assert reason in message
    assert choose_on_cpu() is None  # the refused kernel is not still active


def test_a_kernel_that_context_parallel_cannot_use_is_refused_with_those_that_it_can():
    with pytest.raises(ConfigError, match="or another of flash, cudnn, fa3, fa4") as refused:
        choose_on_cpu(backend="cudnn", context_degree=2)
    assert "No viable backend" in str(refused.value)


def test_a_kernel_of_context_parallel_with_infinite_results_is_refused(monkeypatch):
    backward = CpuFlash.backward
    monkeypatch.setattr(
        CpuFlash, "backward", lambda *args: [grad * math.inf for grad in backward(*args)]
    )
    with pytest.raises(ConfigError, match="its results are not finite"):
        choose_on_cpu(backend="flash", context_degree=2)


@pytest.mark.parametrize("n_keys", [24, 12])
def test_cudnn_gets_what_its_plans_and_its_lse_require(n_keys):
    """Shapes and strides of the operators, on the meta device."""
    q = torch.empty(2, 48, 8, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2)[:, :, 24:]
    k, v = torch.empty(2, 2, 2, n_keys, 64, device="meta", dtype=torch.bfloat16)
    kernel, causal = CudnnAttention(), n_keys == 24
    out, lse = kernel.forward(q, k, v, causal)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    seen: list[dict] = []

    class Arguments(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default:
                names = (argument.name for argument in function._schema.arguments)
                seen.append(dict(zip(names, args, strict=False)))
            return function(*args, **(kwargs or {}))

    with Arguments():
        grads = kernel.backward(torch.empty_like(out).contiguous(), q, k, v, out, lse, causal)
    (given,) = seen
    assert given["grad_out"].stride() == given["out"].stride() == q.stride()
    assert given["logsumexp"].shape == (*lse.shape, 1) and given["logsumexp"].is_contiguous()
    assert (given["max_q"], given["max_k"], given["is_causal"]) == (24, n_keys, causal)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_only_kernels_that_can_run_are_measured():
    """Tries all kernels, as on a GPU; a CPU supports two of them."""
    trial = KernelTrial(ATTENTION, torch.float32, CPU, documents=False)
    milliseconds = trial.measure(list(KERNELS))
    assert milliseconds.keys() == set(CPU_KERNELS) and min(milliseconds.values()) > 0
    assert trial.measure(["cudnn", "math", "flash"], measure=False) == {"math": 0.0}


def test_activating_a_kernel_that_comes_with_torch_does_nothing():
    for name in ("flash", "math", None):
        activate_flash_package(name)


class WithoutDocuments(torch.nn.Module):
    """A model of a family that does not support document masks."""


def test_a_document_mask_is_refused_by_a_model_that_does_not_support_it():
    with pytest.raises(ConfigError, match="WithoutDocuments does not support it"):
        set_attention_kernel(WithoutDocuments(), "attend", None, documents=True)


def test_a_kernel_is_timed_with_a_gradient_in_the_memory_order_of_training(monkeypatch):
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    forward = CausalAttention.forward

    def record(self, q, k, v, *others):
        out = forward(self, q, k, v, *others)
        out.register_hook(lambda grad: seen.append((q.stride(), grad.stride())))
        return out

    monkeypatch.setattr(CausalAttention, "forward", record)
    tokens = torch.zeros(ATTENTION.batch, ATTENTION.seq_len, dtype=torch.long)
    FAMILY.build(SIZES)(tokens, labels=tokens).backward()
    in_training = set(seen)
    seen.clear()
    KernelTrial(ATTENTION, torch.float32, CPU, documents=False).measure(["math"])
    assert seen and set(seen) == in_training
