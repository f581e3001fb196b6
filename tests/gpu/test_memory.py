"""Memory savers whose point is a GPU: moments in host memory, snapshots, growing segments."""

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


def run(config: OptimizerConfig, early: bool = False, steps: int = 5):
    """(weights, optimizer) after some steps on a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)).cuda()
    optimizer = build_optimizer(model, config)
    in_backward = OptimizerInBackward(model, optimizer) if early else None
    for _ in range(steps):
        model(torch.randn(64, 256, device="cuda")).square().sum().backward()
        if in_backward is None:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8bit", "4bit", "float8"])
def test_moments_in_host_memory_learn_what_those_on_the_device_learn(kind, early):
    config = OptimizerConfig(lr=1e-2, state_dtype=kind)
    (right, plain), (found, optimizer) = run(config), run(replace(config, offload=True), early)
    for ours, theirs in zip(found, right, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    saved, expected = optimizer.state_dict(), plain.state_dict()  # waits for what still travels
    for number, moments in saved["state"].items():
        for name, moment in moments.items():
            assert moment.device.type == "cpu" and (name == "step" or moment.is_pinned())
            same = expected["state"][number][name].cpu()
            if moment.is_floating_point():
                assert torch.allclose(moment, same, rtol=1e-3, atol=1e-6)
            else:  # a code may be tipped over by rounding
                assert (moment != same).float().mean() < 0.01


@pytest.mark.parametrize("kind", ["8bit", "4bit", "float8"])
def test_the_compiled_kernel_is_the_operations_one_by_one(kind):
    config = OptimizerConfig(lr=1e-2, state_dtype=kind)
    (fused, _), (eager, _) = run(config), run(replace(config, implementation="for-loop"))
    for ours, theirs in zip(fused, eager, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_snapshot_holds_what_is_alive(tmp_path):
    with MemorySnapshots(CudaAllocationRecorder(), tmp_path, 0, first_step=0, every=1) as snapshots:
        held = torch.ones(1 << 20, device="cuda")
        snapshots.step()
    place = tmp_path / "iteration_1" / "rank0_memory_snapshot.pickle"
    with place.open("rb") as file:
        blocks = [b for segment in pickle.load(file)["segments"] for b in segment["blocks"]]
    alive = [b["size"] for b in blocks if b["state"] == "active_allocated"]
    assert held.nbytes in alive
    torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.parametrize("said, grows", [({}, True), ({"PYTORCH_CUDA_ALLOC_CONF": ""}, False)])
def test_segments_grow_unless_the_user_has_said_how(said, grows):
    program = (
        "import torch\nfrom titanlite.distributed.process_group import enable_expandable_segments\n"
        "torch.cuda.is_available()\ngrow_segments()\nheld = torch.ones(1 << 20, device='cuda')\n"
        "print(any(s['is_expandable'] for s in torch.cuda.memory_snapshot()))"
    )
    unsaid = {n: v for n, v in os.environ.items() if not n.endswith("_ALLOC_CONF")}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, env={**unsaid, **said}, capture_output=True, text=True)
    assert answer.stdout.strip() == str(grows), answer.stderr
