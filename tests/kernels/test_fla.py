"""The kernels of fla-core are used only if they compute what torch's matmuls compute."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from titanlite.errors import ConfigError
from titanlite.kernels.backend import AttentionConfig, check_attention_config
from titanlite.kernels.delta_rule import gated_delta_rule
from titanlite.kernels.fla import try_fla_kernels
from titanlite.models import FAMILIES

SIZES = FAMILIES["qwen3_5"].flavors["debugmodel"]
CPU = torch.device("cpu")


def stand_in(factor: float = 1.0, sees_documents: bool = True):
    """fla-core's functions by matmuls; `factor` multiplies the gradients of v."""

    def compute(q, k, v, g, beta, boundaries):
        starts = None
        if boundaries is not None and sees_documents:
            starts = torch.zeros(v.shape[1], dtype=torch.bool)
            starts = starts.index_fill(0, boundaries[:-1].long(), True)[None]
        v = v.detach() + factor * (v - v.detach())
        return gated_delta_rule(q, k, v, g, beta, starts)[0].to(v.dtype)

    def rule(*inputs, scale, cu_seqlens=None, chunk_indices=None):
        assert scale == 1
        # In a thread of its own, which records gradients: below an operator of torch, only an
        # autograd function, as in fla-core, has them.
        with ThreadPoolExecutor(1) as thread:
            out = thread.submit(compute, *inputs, cu_seqlens).result()
        return out if torch.is_grad_enabled() else out.detach(), None

    kernels, tools = ModuleType("fla.ops.gated_delta_rule"), ModuleType("fla.ops.utils")
    kernels.chunk_gated_delta_rule = rule
    tools.prepare_chunk_indices = lambda boundaries, size: boundaries
    return {module.__name__: module for module in (kernels, tools)}


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [({}, None), ({"factor": 1.1}, "differ"), ({"sees_documents": False}, "differ")],
)
def test_a_kernel_that_computes_something_else_is_refused(monkeypatch, arguments, refused):
    for name, module in stand_in(**arguments).items():
        monkeypatch.setitem(sys.modules, name, module)
    if refused is None:
        try_fla_kernels(SIZES, 2, torch.float32, CPU)
        return
    with pytest.raises(ConfigError, match=f"linear_backend.*float32 on this cpu: .*{refused}"):
        try_fla_kernels(SIZES, 2, torch.float32, CPU)


def test_context_parallel_is_refused():
    config = AttentionConfig(linear_backend="fla")
    assert not [*check_attention_config(config, 1, None)]
    (problem,) = check_attention_config(config, 2, None)
    assert "cannot be used with context parallel" in str(problem)


def test_a_package_that_is_absent_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ConfigError, match="No module named|import of fla") as refused:
        try_fla_kernels(SIZES, 1, torch.bfloat16, CPU)
    assert "pip install 'titanlite[fla]'" in str(refused.value)
