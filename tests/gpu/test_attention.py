"""Every GPU kernel matches attention by matmuls, and one of them is chosen."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend

from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.backend import (
    FLASH_PACKAGES,
    KERNELS,
    AttentionConfig,
    AttentionShape,
    activate_flash_package,
    choose_kernel,
    deactivate_flash_package,
)
from titanlite.kernels.documents import DocumentIndex, document_attention, index_documents
from titanlite.kernels.flash import CudaFlash, flash_kernel_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

ATTENTION = AttentionShape(batch=2, n_heads=8, n_kv_heads=2, seq_len=512, head_dim=64)
DEVICE = torch.device("cuda")


def random_qkv(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 512, heads, 64) for heads in (8, 2, 2)]
    tensors = [torch.randn(shape, dtype=dtype, device=DEVICE).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def output_and_grads(attend, inputs) -> list[torch.Tensor]:
    """The output and the gradients of the inputs."""
    out = attend(*inputs)
    torch.manual_seed(1)
    # drawn in the order of indices, and on the CPU for every device; in the layout of the output,
    # as in training: see _KernelTrial
    grad = torch.empty_like(out).copy_(torch.randn(out.shape))
    return [out, *torch.autograd.grad(out, inputs, grad)]


def reference(documents: DocumentIndex | None = None) -> list[torch.Tensor]:
    """Attention by matmuls in fp32, one document at a time."""
    inputs = [part.detach().float().requires_grad_() for part in random_qkv()]
    plain = CausalAttention(SDPBackend.MATH)
    if documents is None:
        return output_and_grads(plain, inputs)
    boundaries = documents.on_host.tolist()

    def one_by_one(q, k, v):
        rows = []
        for row in range(2):
            ends = [e - row * 512 for e in boundaries if row * 512 <= e <= (row + 1) * 512]
            slices = [slice(a, b) for a, b in pairwise(ends)]
            parts = [[x[row : row + 1, :, index] for x in (q, k, v)] for index in slices]
            rows.append(torch.cat([plain(*part) for part in parts], dim=2))
        return torch.cat(rows)

    return output_and_grads(one_by_one, inputs)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 3e-2 * b.abs().max()


def mixed_documents() -> DocumentIndex:
    """One document of one token, one as long as a sequence, and some in between."""
    positions = torch.arange(512).repeat(2, 1)
    for begin in (1, 130, 131, 400):
        positions[0, begin:] = torch.arange(512 - begin)
    return index_documents(positions).to(DEVICE)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_matches_matmuls(name):
    if name != "math":
        config = AttentionConfig(backend=name)
        try:
            choose_kernel(config, ATTENTION, torch.bfloat16, DEVICE)
        except Exception as reason:
            pytest.skip(str(reason))
    try:
        activate_flash_package(name)
        assert_close(output_and_grads(CausalAttention(KERNELS[name]), random_qkv()), reference())
    finally:
        deactivate_flash_package()


@pytest.mark.parametrize("name", ["flash", *FLASH_PACKAGES])
def test_packed_documents_match_separate_ones(name):
    documents = mixed_documents()
    config = AttentionConfig(backend=name, mask="document")
    try:
        choose_kernel(config, ATTENTION, torch.bfloat16, DEVICE)
    except Exception as reason:
        pytest.skip(str(reason))
    inputs = random_qkv()
    assert isinstance(flash_kernel_for(inputs[0]), CudaFlash)
    try:
        activate_flash_package(name)
        assert_close(
            output_and_grads(lambda q, k, v: document_attention(q, k, v, documents), inputs),
            reference(documents),
        )
    finally:
        deactivate_flash_package()


def test_results_do_not_depend_on_the_bound_of_the_longest_document():
    documents, inputs = mixed_documents(), random_qkv()
    longer = DocumentIndex.build(documents.on_host, longest=4096).to(DEVICE)
    (out, *grads), (other, *other_grads) = (
        output_and_grads(lambda q, k, v, index=index: document_attention(q, k, v, index), inputs)
        for index in (documents, longer)
    )
    assert torch.equal(out, other)
    for a, b in zip(grads, other_grads, strict=True):  # of q: a sum in any order
        assert (a - b).abs().max() < 1e-2 * b.abs().max()


def test_documents_in_fp32_are_supported_on_a_gpu():
    documents = mixed_documents()
    actual = output_and_grads(
        lambda q, k, v: document_attention(q, k, v, documents), random_qkv(torch.float32)
    )
    inputs = random_qkv(torch.float32)
    expected = output_and_grads(
        lambda q, k, v: document_attention(q.cpu(), k.cpu(), v.cpu(), documents), inputs
    )
    for a, b in zip(actual[:1], expected[:1], strict=True):
        assert (a.cpu() - b).abs().max() < 1e-4


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_the_fastest_kernel_is_chosen_or_the_first_in_a_deterministic_run(mask, caplog):
    config = AttentionConfig(mask=mask)
    with caplog.at_level("INFO"):
        assert choose_kernel(config, ATTENTION, torch.bfloat16, DEVICE) in KERNELS
    assert "ms forward and backward" in caplog.text
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_kernel(config, ATTENTION, torch.bfloat16, DEVICE) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def test_document_attention_compiles_to_one_graph():
    attend, documents = CausalAttention(), mixed_documents()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs = random_qkv()
    for a, b in zip(
        output_and_grads(lambda *x: compiled(*x, documents), inputs),
        output_and_grads(lambda *x: attend(*x, documents), inputs),
        strict=True,
    ):
        assert (a - b).abs().max() <= 1e-2 * b.abs().max()
