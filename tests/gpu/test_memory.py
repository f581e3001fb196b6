"""Memory features that need a GPU: offloaded moments, snapshots, expandable segments."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from titanlite.metrics.profiler import MemorySnapshots
from titanlite.optim import OptimizerConfig, OptimizerInBackward, OptimizerSet, build_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def train(
    config: OptimizerConfig, in_backward: bool = False, steps: int = 5
) -> tuple[list[Tensor], OptimizerSet]:
    """(weights, optimizer) after some steps on a GPU, with gradients that ignore the weights.

    With others, Adam would amplify a difference in the last bit of a weight: where the gradient is
    about 0, its sign decides the update.
    """
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(256, 512), nn.Linear(256, 384)]).cuda()
    optimizer = build_optimizer(layers, config)
    if in_backward:
        OptimizerInBackward(layers, optimizer)
    for _ in range(steps):
        inputs = torch.randn(64, 256, device="cuda")
        outputs = torch.cat([layer(inputs) for layer in layers], 1)
        (outputs * torch.randn_like(outputs)).sum().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in layers.parameters()], optimizer


def assert_same_weights(actual, expected, dtype: str) -> None:
    """Equal to rounding; a rounding may change a low-bit code, and with it one weight's updates."""
    allowed = 0.0 if dtype in ("float32", "bfloat16") else 0.01
    for a, b in zip(actual, expected, strict=True):
        assert (~torch.isclose(a, b, rtol=1e-4, atol=1e-5)).float().mean() <= allowed


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "8bit", "4bit", "float8"])
def test_offloaded_moments_train_like_those_on_the_device(dtype, in_backward):
    config = OptimizerConfig.of(lr=1e-2, state_dtype=dtype)
    expected, on_device = train(config)
    actual, offloaded = train(replace(config, offload=True), in_backward)
    assert_same_weights(actual, expected, dtype)
    # state_dict waits for the copies to the host
    (saved,), (saved_on_device,) = ([o.state_dict() for o in s] for s in (offloaded, on_device))
    for number, moments in saved["state"].items():
        for name, moment in moments.items():
            assert moment.device.type == "cpu" and (name == "step" or moment.is_pinned())
            same = saved_on_device["state"][number][name].cpu()
            if moment.is_floating_point():
                assert torch.allclose(moment, same, rtol=1e-3, atol=1e-6)
            else:  # rounding may change a code
                assert (moment != same).float().mean() < 0.01


@pytest.mark.parametrize("dtype", ["8bit", "4bit", "float8"])
def test_the_compiled_update_matches_the_eager_update(dtype):
    config = OptimizerConfig.of(lr=1e-2, state_dtype=dtype)
    (fused, _), (eager, _) = train(config), train(replace(config, implementation="for-loop"))
    assert_same_weights(fused, eager, dtype)


def test_a_snapshot_contains_the_allocated_blocks(tmp_path):
    with MemorySnapshots(tmp_path, 0, completed_steps=0, every=1) as snapshots:
        tensor = torch.ones(1 << 20, device="cuda")
        snapshots.step()
    path = tmp_path / "iteration_1" / "rank0_memory_snapshot.pickle"
    with path.open("rb") as file:
        blocks = [b for segment in pickle.load(file)["segments"] for b in segment["blocks"]]
    allocated = [b["size"] for b in blocks if b["state"] == "active_allocated"]
    assert tensor.nbytes in allocated
    torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.parametrize(
    "setting, expandable", [({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": ""}, False)]
)
def test_segments_are_expandable_unless_the_user_has_set_it(setting, expandable):
    program = """
import torch
from titanlite.distributed.process_group import enable_expandable_segments
torch.cuda.is_available()
enable_expandable_segments()
tensor = torch.ones(1 << 20, device="cuda")
print(any(s["is_expandable"] for s in torch.cuda.memory_snapshot()))
"""
    environment = {n: v for n, v in os.environ.items() if not n.endswith("_ALLOC_CONF")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env={**environment, **setting}, capture_output=True, text=True)
    assert result.stdout.strip() == str(expandable), result.stderr
