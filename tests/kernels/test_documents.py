"""Documents in one sequence know nothing of each other, and each is what it is alone."""

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
SHAPE = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)


def built(documents: bool = True):
    torch.manual_seed(0)
    model = FAMILY.build(SHAPE)
    set_attention_kernel(model, FAMILY.attention_pattern, "flash", documents)
    return model


def sample(*ends: tuple[int, ...], length: int = 24) -> torch.Tensor:
    """A sequence for each of `ends`, the places of the last ids of documents."""
    generator = torch.Generator().manual_seed(len(ends))
    ids = torch.randint(8, 61, (len(ends), length), generator=generator)
    for row, places in enumerate(ends):
        ids[row, list(places)] = END
    return ids


def test_positions_start_anew_after_each_end():
    ids = torch.tensor([[1, END, 1, 1, END, END, 1], [1] * 7, [END, 1, 1, 1, 1, 1, END]])
    assert document_positions(ids, END).tolist() == [
        [0, 1, 0, 1, 2, 0, 0],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 0, 1, 2, 3, 4, 5],
    ]
    ends = document_boundaries(document_positions(ids, END))
    assert ends.tolist() == [0, 2, 5, 6, 7, 14, 15, 21]


def test_no_document_leaks_into_another():
    """The gradient of one document's loss is exactly zero at all that the others are."""
    model, ids = built(), sample((5, 13), (0, 23))
    rows = model.tok_embeddings(ids).detach().requires_grad_()
    model.tok_embeddings = None
    positions = document_positions(ids, END)
    logits = model(rows, positions)
    for row, begin, end in [(0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 1), (1, 1, 24)]:
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[row, begin:end] = ids[row, begin:end]  # what it is asked for matters not
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        (gradient,) = torch.autograd.grad(loss, rows, retain_graph=True)
        own = torch.zeros(ids.shape, dtype=torch.bool)
        own[row, begin:end] = True
        assert torch.equal(gradient[~own], torch.zeros_like(gradient[~own]))
        assert (gradient[own].abs().amax(-1) > 0).all()


def test_a_document_in_company_is_what_it_is_alone():
    model, ids = built(), sample((5, 13), (0, 23))
    together = model(ids, document_positions(ids, END))
    plain = built(documents=False)
    for row, begin, end in [(0, 0, 6), (0, 6, 14), (0, 14, 24), (1, 0, 1), (1, 1, 24)]:
        alone = plain(ids[row : row + 1, begin:end])[0]
        assert (together[row, begin:end] - alone).abs().max() < 1e-6


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_and_its_gradients_are_those_under_a_mask(key_heads, dtype, allowed):
    positions = document_positions(sample((3, 4, 11), (), (22,)), END)
    document = (positions == 0).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(3, 24, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = document_attention(q, k, v, document_boundaries(positions))
    gradient = torch.randn_like(right)
    assert (found - right).abs().max() < allowed
    of_right = torch.autograd.grad(right, (q, k, v), gradient)
    for a, b in zip(torch.autograd.grad(found, (q, k, v), gradient), of_right, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 2 * allowed * b.abs().max()


def test_the_operation_keeps_the_rules_that_compilers_rely_on():
    positions = document_positions(sample((3, 11)), END)
    q, k, v = (torch.randn(1, 24, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    operation = torch.ops.titanlite.attend_in_documents.default
    torch.library.opcheck(operation, (q, k, v, document_boundaries(positions)))


def gradients(model, ids) -> list[torch.Tensor]:
    model(ids, document_positions(ids, END)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_recomputing_blocks_changes_nothing():
    ids, again = sample((5, 13), (2,)), built()
    checkpoint_blocks(again.layers, ActivationCheckpointConfig(mode="full"))
    for a, b in zip(gradients(built(), ids), gradients(again, ids), strict=True):
        assert torch.equal(a, b)


def test_one_graph_serves_any_number_of_documents_and_every_block():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, model = CompileCounterWithBackend("aot_eager"), built()
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    for ends in [((5, 13), (2,)), ((), ()), ((1, 2, 3, 9), (0, 1)), ((23,), ())]:
        ids = sample(*ends)
        for a, b in zip(gradients(built(), ids), gradients(model, ids), strict=True):
            assert (a - b).abs().max() < 1e-5 * a.abs().max()
        model.zero_grad()
    assert counter.frame_count == 1
