"""A sequence in parts: every token is somewhere once, work and memory are shared, heads travel
once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.oracle import SGD, Layout, batch_at, sharded
from tests.distributed.ranks import run_on_ranks
from tests.parallelize.memory import taken
from titanlite.kernels.flash import CpuFlash, EagerAttention
from titanlite.parallelize import context
from titanlite.parallelize.context import SequenceShard

LENGTH = 48


def shares(ranks: int, balanced: bool) -> list[SequenceShard]:
    return [SequenceShard(rank, ranks, balanced) for rank in range(ranks)]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_is_on_one_rank_and_knows_its_position(ranks, balanced):
    batch = torch.arange(LENGTH).expand(2, -1)  # each token is its own position
    for share in shares(ranks, balanced):
        assert torch.equal(share.of(batch)[1], share.positions(LENGTH))
    positions = torch.cat([share.positions(LENGTH) for share in shares(ranks, balanced)])
    assert positions.sort().values.tolist() == list(range(LENGTH))


def test_balancing_gives_every_rank_the_same_work_and_none_would_not():
    def work(share):
        return (share.positions(LENGTH) + 1).sum().item()  # keys that its queries see

    assert len({work(share) for share in shares(4, balanced=True)}) == 1
    first, *_, last = (work(share) for share in shares(4, balanced=False))
    assert last > 6 * first


@pytest.mark.parametrize("flash", [CpuFlash(), EagerAttention()], ids=["kernel", "plain"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_kernel_is_sdpa_with_grouped_heads_and_the_sum_of_scores(flash, causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    q, k, v = (part.requires_grad_() for part in (q, k, v))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    gradient = torch.randn_like(right)
    right.backward(gradient)
    plain = [part.detach() for part in (q, k, v)]
    out, lse = flash.forward(*plain, causal)
    assert (out - right).abs().max() < 1e-6 and lse.shape == (2, 4, 12)
    for found, part in zip(
        flash.backward(gradient, *plain, out, lse, causal), (q, k, v), strict=True
    ):
        assert found.shape == part.shape and (found - part.grad).abs().max() < 2e-6


def what_travels(layout) -> dict[str, list[int]]:
    """How many numbers each kind of collective was given."""
    model, _, _ = sharded(layout, SGD)
    attention = model.layers["0"].attention.attend
    part = LENGTH // layout.context
    q, k, v = torch.randn(3, 4, part, 8), torch.randn(3, 2, part, 8), torch.randn(3, 2, part, 8)
    sent: dict[str, list[int]] = {"gather": [], "all_to_all_single": []}

    def counted(room, name):
        collective = getattr(room, name)

        def count(first, second, *others, **options):
            sent[name].append(second.numel())
            return collective(first, second, *others, **options)

        setattr(room, name, count)

    counted(context, "gather")
    counted(dist, "all_to_all_single")
    with torch.no_grad():
        attention(q, k, v)
    return sent


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_grouped_heads_travel_once(rotate):
    ranks = 4
    layout = Layout(context=ranks, rotate=rotate)
    own = 2 * 3 * 2 * LENGTH // ranks * 8  # keys and values, rows, key-value heads, tokens, width
    for sent in run_on_ranks(what_travels, ranks, layout):
        right = {"gather": [own], "all_to_all_single": []}
        if rotate == "alltoall":
            right = {"gather": [], "all_to_all_single": [own] * (ranks - 1)}
        assert sent == right


def peak_of_a_step(layout, recipe) -> int:
    _, mesh, engine = sharded(layout, recipe)
    inputs, labels = batch_at(0, recipe)
    engine.forward_backward(inputs, labels, torch.tensor(1.0))  # what is made once is made
    peak, _ = taken(lambda: engine.forward_backward(inputs, labels, torch.tensor(1.0)))
    return peak


@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_a_sequence_four_times_as_long_fits_four_ranks(rotate):
    from dataclasses import replace

    short = replace(SGD, seq_len=256, batch=2)
    alone = run_on_ranks(peak_of_a_step, 1, Layout(), short)[0]
    layout = Layout(context=4, rotate=rotate)
    for peak in run_on_ranks(peak_of_a_step, 4, layout, replace(short, seq_len=1024)):
        print(f"{rotate}: {peak / alone:.3f} of the peak of the short one")  # pytest -rP
        assert peak <= 1.2 * alone
