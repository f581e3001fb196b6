"""Memory features that need a GPU: offloaded moments, snapshots, expandable segments."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from titanlite.metrics.memory_snapshots import CudaAllocationRecorder, MemorySnapshots
from titanlite.optim import OptimizerConfig, OptimizerInBackward, build_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def train(config: OptimizerConfig, in_backward: bool = False, steps: int = 5):
    """(weights, optimizer) after some steps on a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)).cuda()
    optimizer = build_optimizer(model, config)
    if in_backward:
        OptimizerInBackward(model, optimizer)
    for _ in range(steps):
        model(torch.randn(64, 256, device="cuda")).square().sum().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "8bit", "4bit", "float8"])
def test_offloaded_moments_train_like_those_on_the_device(dtype, in_backward):
    config = OptimizerConfig(lr=1e-2, state_dtype=dtype)
    expected, on_device = train(config)
    actual, offloaded = train(replace(config, offload=True), in_backward)
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    # state_dict waits for the copies to the host
    saved, saved_on_device = offloaded.state_dict(), on_device.state_dict()
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
    config = OptimizerConfig(lr=1e-2, state_dtype=dtype)
    (fused, _), (eager, _) = train(config), train(replace(config, implementation="for-loop"))
    for a, b in zip(fused, eager, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_snapshot_contains_the_allocated_blocks(tmp_path):
    with MemorySnapshots(
        CudaAllocationRecorder(), tmp_path, 0, completed_steps=0, every=1
    ) as snapshots:
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
