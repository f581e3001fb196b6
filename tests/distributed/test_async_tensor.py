"""Asynchronous tensor parallel: the compiler overlaps communication with matmuls, correctly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from tests.distributed.oracle import SGD, Layout, merge_ranks, one_process, run_layout, worst_error
from tests.distributed.ranks import run_on_ranks

RECIPE = replace(SGD, steps=1)
FALLBACKS = {  # torch's reference implementations; the fast ones need NVLink
    "fused_all_gather_matmul": "_fused_all_gather_matmul_fallback",
    "fused_matmul_reduce_scatter": "_fused_matmul_reduce_scatter_fallback",
}


def run_and_count_fusions(layout):
    """(the record of this rank, number of each fused op in the compiled graphs)."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for op, fallback in FALLBACKS.items():
        library.impl(op, getattr(symmetric, fallback))
    dist.is_nccl_available = lambda: True  # else the compiler does not try to fuse
    torch._inductor.config.cpp.vec_isa_ok = False  # scalar C++, which compiles in half the time
    fusions: Counter[str] = Counter()

    def count(graph) -> None:
        names = [str(node.target).split(".") for node in graph.nodes]
        fusions.update(name[1] for name in names if name[0] == "symm_mem")

    torch._inductor.config.post_grad_custom_post_pass = count
    return run_layout(layout, RECIPE), fusions


@pytest.mark.skipif(
    not all(hasattr(symmetric, fallback) for fallback in FALLBACKS.values()),
    reason="this torch has no fallbacks of these names",
)
def test_all_gathers_and_reduce_scatters_are_fused_with_matmuls_and_results_match():
    layout = Layout(tensor=2, compile="inductor", overlap=True)
    records, fusions = zip(*run_on_ranks(run_and_count_fusions, 2, layout), strict=True)
    errors = worst_error(merge_ranks(list(records)), one_process(RECIPE), tensors=True)
    assert max(errors.values()) <= 1e-5, errors
    # Two all-gathers and two reduce-scatters in the forward of a block; backward mirrors them.
    assert min(f["fused_all_gather_matmul"] for f in fusions) >= 2, fusions
    assert min(f["fused_matmul_reduce_scatter"] for f in fusions) >= 2, fusions
    print(fusions[0])
