"""Traces jobs on a fake GPU, one for each line of JSON on its input; replies with a line each.

A process of its own, because it replaces parts of torch: see benchmarks/gpu_bytes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from types import ModuleType
from unittest.mock import patch

import torch

from benchmarks.gpu_bytes.fake_cuda import Trace, fake_cuda
from benchmarks.gpu_bytes.traced_run import trace_run


class FakeRule(torch.autograd.Function):
    """The shapes of fla-core's outputs and gradients; its kernels cannot run on a fake GPU."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[2])

    @staticmethod
    def backward(ctx, grad):
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def fake_fla(trace: Trace) -> dict[str, ModuleType]:
    """The modules of fla-core whose functions a job calls."""

    def rule(*inputs, scale, cu_seqlens, chunk_indices):
        assert cu_seqlens.is_cuda and chunk_indices.is_cuda
        trace.attention[trace.position()[0], "fla"] += 1
        return FakeRule.apply(*inputs), None

    kernels, tools = ModuleType("fla.ops.gated_delta_rule"), ModuleType("fla.ops.utils")
    kernels.chunk_gated_delta_rule = rule
    tools.prepare_chunk_indices = lambda boundaries, size: boundaries.diff().div(size).long()
    return {module.__name__: module for module in (kernels, tools)}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a job prints goes to the log
    trace = Trace()
    sys.modules.update(fake_fla(trace))
    # their results are those of a fake GPU, so they are not compared with torch's
    with fake_cuda(trace), patch("titanlite.job.build.try_fla_kernels", return_value=None):
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = trace_run(trace, **request)
            except Exception:
                reply = {"error": traceback.format_exc()}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
