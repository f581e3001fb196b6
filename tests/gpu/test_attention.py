"""Every kernel of a GPU computes what plain matrix products do, and one of them is chosen."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.backend import (
    ADDED,
    KERNELS,
    AttentionConfig,
    AttentionShape,
    activate_flash_package,
    choose_kernel,
    deactivate_flash_package,
)
from titanlite.kernels.documents import document_attention, document_boundaries
from titanlite.kernels.flash import CudaFlash, flash_kernel_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

SIZES = AttentionShape(rows=2, heads=8, key_heads=2, tokens=512, width=64)
DEVICE = torch.device("cuda")


def drawn(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 512, heads, 64) for heads in (8, 2, 2)]
    parts = [torch.randn(shape, dtype=dtype, device=DEVICE).transpose(1, 2) for shape in shapes]
    return [part.requires_grad_() for part in parts]


def results(attend, inputs) -> list[torch.Tensor]:
    """What it gives, and its gradients."""
    out = attend(*inputs)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, inputs, torch.randn_like(out))]


def exact(documents: torch.Tensor | None = None) -> list[torch.Tensor]:
    """By matrix products in fp32, document by document."""
    inputs = [part.detach().float().requires_grad_() for part in drawn()]
    plain = CausalAttention(SDPBackend.MATH)
    if documents is None:
        return results(plain, inputs)
    bounds = documents.tolist()

    def one_by_one(q, k, v):
        rows = []
        for row in range(2):
            ends = [e - row * 512 for e in bounds if row * 512 <= e <= (row + 1) * 512]
            places = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
            parts = [[x[row : row + 1, :, at] for x in (q, k, v)] for at in places]
            rows.append(torch.cat([plain(*part) for part in parts], dim=2))
        return torch.cat(rows)

    return results(one_by_one, inputs)


def near(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(found, right, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 3e-2 * b.abs().max()


def some_documents() -> torch.Tensor:
    """One of a token, one as long as a sequence, and some between."""
    positions = torch.arange(512, device=DEVICE).repeat(2, 1)
    for begin in (1, 130, 131, 400):
        positions[0, begin:] = torch.arange(512 - begin, device=DEVICE)
    return document_boundaries(positions)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_matrix_products_do(name):
    if name != "math":
        config = AttentionConfig(backend=name)
        try:
            choose_kernel(config, SIZES, torch.bfloat16, DEVICE)
        except Exception as reason:
            pytest.skip(str(reason))
    try:
        activate_flash_package(name)
        near(results(CausalAttention(KERNELS[name]), drawn()), exact())
    finally:
        deactivate_flash_package()


@pytest.mark.parametrize("name", ["flash", *ADDED])
def test_documents_compute_what_each_does_alone(name):
    documents = some_documents()
    config = AttentionConfig(backend=name, mask="document")
    try:
        choose_kernel(config, SIZES, torch.bfloat16, DEVICE)
    except Exception as reason:
        pytest.skip(str(reason))
    inputs = drawn()
    assert isinstance(flash_kernel_for(inputs[0]), CudaFlash)
    try:
        activate_flash_package(name)
        near(results(lambda *x: document_attention(*x, documents), inputs), exact(documents))
    finally:
        deactivate_flash_package()


def test_documents_in_fp32_have_a_way_too():
    documents = some_documents()
    found = results(lambda *x: document_attention(*x, documents), drawn(torch.float32))
    inputs = drawn(torch.float32)
    right = results(lambda *x: document_attention(*(y.cpu() for y in x), documents.cpu()), inputs)
    for a, b in zip(found[:1], right[:1], strict=True):
        assert (a.cpu() - b).abs().max() < 1e-4


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_a_kernel_is_chosen_by_its_time_or_where_that_may_not_be_by_order(mask, caplog):
    config = AttentionConfig(mask=mask)
    with caplog.at_level("INFO"):
        assert choose_kernel(config, SIZES, torch.bfloat16, DEVICE) in KERNELS
    assert "ms forward and backward" in caplog.text
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_kernel(config, SIZES, torch.bfloat16, DEVICE) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_block_with_documents_is_one_graph_on_a_gpu_too():
    attend, documents = CausalAttention(), some_documents()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = drawn()
    for a, b in zip(
        results(lambda *x: compiled(*x, documents), inputs),
        results(lambda *x: attend(*x, documents), inputs),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-2 * b.abs().max()
