"""The compiler overlaps tensor parallel's communication with its products, and they stay right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from tests.distributed.oracle import SGD, Layout, joined, one_process, spread_run, worst_error
from tests.distributed.ranks import run_on_ranks

RECIPE = replace(SGD, steps=1)
FALLBACKS = {  # what the operations mean, by torch itself; the fast ones need NVLink
    "fused_all_gather_matmul": "_fused_all_gather_matmul_fallback",
    "fused_matmul_reduce_scatter": "_fused_matmul_reduce_scatter_fallback",
}


def overlapped(layout):
    """(the record of this rank, how often the compiler found what it can overlap)."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for operation, meaning in FALLBACKS.items():
        library.impl(operation, getattr(symmetric, meaning))
    dist.is_nccl_available = lambda: True  # else the compiler does not look for it
    torch._inductor.config.cpp.vec_isa_ok = False  # plain C++, which is compiled in half the time
    found: Counter[str] = Counter()

    def count(graph) -> None:
        names = [str(node.target).split(".") for node in graph.nodes]
        found.update(name[1] for name in names if name[0] == "symm_mem")

    torch._inductor.config.post_grad_custom_post_pass = count
    return spread_run(layout, RECIPE), found


@pytest.mark.skipif(
    not all(hasattr(symmetric, meaning) for meaning in FALLBACKS.values()),
    reason="this torch has other names for what the operations mean",
)
def test_gathers_and_scatters_become_one_with_their_products():
    layout = Layout(tensor=2, compile="inductor", overlap=True)
    records, found = zip(*run_on_ranks(overlapped, 2, layout), strict=True)
    errors = worst_error(joined(list(records)), one_process(RECIPE), tensors=True)
    assert max(errors.values()) <= 1e-5, errors
    # two gathers and two scatters of a block's forward; the backward mirrors them
    assert min(f["fused_all_gather_matmul"] for f in found) >= 2, found
    assert min(f["fused_matmul_reduce_scatter"] for f in found) >= 2, found
    print(found[0])
