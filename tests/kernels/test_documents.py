"""Packed documents do not attend to each other: each gives the same result as alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanlite.kernels.backend import set_attention_kernel
from titanlite.kernels.documents import document_attention, document_boundaries, document_positions
from titanlite.labels import IGNORE_INDEX
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    checkpoint_blocks,
)

FAMILY, END = FAMILIES["llama3"], 7
SIZES = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)


def build_model(documents: bool = True):
    torch.manual_seed(0)
    model = FAMILY.build(SIZES)
    set_attention_kernel(model, FAMILY.attention_pattern, "flash", documents)
    return model


def sample_tokens(*ends: tuple[int, ...], length: int = 24) -> torch.Tensor:
    """One sequence for each of `ends`, the indices of end-of-document tokens."""
    generator = torch.Generator().manual_seed(len(ends))
    ids = torch.randint(8, 61, (len(ends), length), generator=generator)
    for row, indices in enumerate(ends):
        ids[row, list(indices)] = END
    return ids


def test_positions_restart_after_each_end_token():
    ids = torch.tensor([[1, END, 1, 1, END, END, 1], [1] * 7, [END, 1, 1, 1, 1, 1, END]])
    assert document_positions(ids, END).tolist() == [
        [0, 1, 0, 1, 2, 0, 0],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 0, 1, 2, 3, 4, 5],
    ]
    boundaries = document_boundaries(document_positions(ids, END))
    assert boundaries.tolist() == [0, 2, 5, 6, 7, 14, 15, 21]


def test_no_document_attends_to_another():
    """The gradient of one document's loss is exactly zero at the tokens of the others."""
    model, ids = build_model(), sample_tokens((5, 13), (0, 23))
    embedded = model.tok_embeddings(ids).detach().requires_grad_()
    model.tok_embeddings = None
    positions = document_positions(ids, END)
    logits = model(embedded, positions)
    for row, begin, end in [(0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 1), (1, 1, 24)]:
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[row, begin:end] = ids[row, begin:end]  # any labels would do
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        (gradient,) = torch.autograd.grad(loss, embedded, retain_graph=True)
        own = torch.zeros(ids.shape, dtype=torch.bool)
        own[row, begin:end] = True
        assert torch.equal(gradient[~own], torch.zeros_like(gradient[~own]))
        assert (gradient[own].abs().amax(-1) > 0).all()


def test_a_packed_document_gives_the_same_logits_as_alone():
    model, ids = build_model(), sample_tokens((5, 13), (0, 23))
    packed = model(ids, document_positions(ids, END))
    plain = build_model(documents=False)
    for row, begin, end in [(0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 1), (1, 1, 24)]:
        alone = plain(ids[row : row + 1, begin:end])[0]
        assert (packed[row, begin:end] - alone).abs().max() < 1e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_outputs_and_gradients_match_sdpa_with_an_explicit_mask(n_kv_heads, dtype, tolerance):
    positions = document_positions(sample_tokens((3, 4, 11), (), (22,)), END)
    document = (positions == 0).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(3, 24, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, n_kv_heads, n_kv_heads)
    )
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    actual = document_attention(q, k, v, document_boundaries(positions))
    grad = torch.randn_like(expected)
    assert (actual - expected).abs().max() < tolerance
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)
    for a, b in zip(torch.autograd.grad(actual, (q, k, v), grad), expected_grads, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 2 * tolerance * b.abs().max()


def test_the_custom_operator_passes_opcheck():
    positions = document_positions(sample_tokens((3, 11)), END)
    q, k, v = (torch.randn(1, 24, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    operator = torch.ops.titanlite.attend_in_documents.default
    torch.library.opcheck(operator, (q, k, v, document_boundaries(positions)))


def gradients(model, ids) -> list[torch.Tensor]:
    model(ids, document_positions(ids, END)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_activation_checkpointing_gives_the_same_gradients():
    ids, recomputed = sample_tokens((5, 13), (2,)), build_model()
    checkpoint_blocks(recomputed.layers, ActivationCheckpointConfig(mode="full"))
    for a, b in zip(gradients(build_model(), ids), gradients(recomputed, ids), strict=True):
        assert torch.equal(a, b)


def test_blocks_compile_once_for_any_number_of_documents():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, model = CompileCounterWithBackend("aot_eager"), build_model()
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    for ends in [((5, 13), (2,)), ((), ()), ((1, 2, 3, 9), (0, 1)), ((23,), ())]:
        ids = sample_tokens(*ends)
        for a, b in zip(gradients(build_model(), ids), gradients(model, ids), strict=True):
            assert (a - b).abs().max() < 1e-5 * a.abs().max()
        model.zero_grad()
    assert counter.frame_count == 1
