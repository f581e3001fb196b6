"""Context parallel: shards cover every sequence, and balance work, memory and traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.oracle import SGD, Layout, batch_at, build_sharded
from tests.distributed.ranks import run_on_ranks
from tests.parallelize.memory import measure_allocations
from titanlite.distributed import collectives
from titanlite.kernels.flash import CpuFlash, EagerAttention
from titanlite.parallelize import kv_exchange
from titanlite.parallelize.context_delta import gather_over_ranks, sum_own_over_ranks
from titanlite.parallelize.context_tiles import SequenceShard

LENGTH = 48


def shards_of(ranks: int, balanced: bool) -> list[SequenceShard]:
    return [SequenceShard(rank, ranks, balanced) for rank in range(ranks)]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_is_on_one_rank_with_its_position(ranks, balanced):
    batch = torch.arange(LENGTH).expand(2, -1)  # each token is its own position
    for shard in shards_of(ranks, balanced):
        assert torch.equal(shard.select(batch)[1], shard.positions(LENGTH))
    positions = torch.cat([shard.positions(LENGTH) for shard in shards_of(ranks, balanced)])
    assert positions.sort().values.tolist() == list(range(LENGTH))


def test_balanced_shards_have_equal_work_and_unbalanced_ones_do_not():
    def count_attended_keys(shard):
        return (shard.positions(LENGTH) + 1).sum().item()

    assert len({count_attended_keys(shard) for shard in shards_of(4, balanced=True)}) == 1
    first, *_, last = (count_attended_keys(shard) for shard in shards_of(4, balanced=False))
    assert last > 6 * first


@pytest.mark.parametrize("flash", [CpuFlash(), EagerAttention()], ids=["kernel", "eager"])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_kernels_match_sdpa_with_grouped_heads_and_return_lse(flash, causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    grad_out = torch.randn_like(expected)
    expected.backward(grad_out)
    inputs = [tensor.detach() for tensor in leaves]
    out, lse = flash.forward(*inputs, causal)
    assert (out - expected).abs().max() < 1e-6 and lse.shape == (2, 4, 12)
    gradients = flash.backward(grad_out, *inputs, out, lse, causal)
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape and (gradient - leaf.grad).abs().max() < 2e-6


def count_sent_values(layout) -> dict[str, list[int]]:
    """Input size of every call of each collective in one forward of attention."""
    model, _, _ = build_sharded(layout, SGD)
    attention = model.layers["0"].attention.attend
    tokens = LENGTH // layout.context
    q, k, v = (torch.randn(3, heads, tokens, 8) for heads in (4, 2, 2))
    sizes: dict[str, list[int]] = {"start_all_gather": [], "all_to_all_single": []}

    def record_sizes(module, name):
        collective = getattr(module, name)

        def recorded(first, second, *others, **options):
            sizes[name].append(second.numel())
            return collective(first, second, *others, **options)

        setattr(module, name, recorded)

    record_sizes(kv_exchange, "start_all_gather")
    record_sizes(dist, "all_to_all_single")
    with torch.no_grad():
        attention(q, k, v)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_grouped_key_value_heads_are_sent_once_not_per_query_head(rotate):
    ranks = 4
    layout = Layout(context=ranks, rotate=rotate)
    # keys and values, sequences, key-value heads, tokens of a rank, head width
    own = 2 * 3 * 2 * (LENGTH // ranks) * 8
    expected = {"start_all_gather": [own], "all_to_all_single": []}
    if rotate == "alltoall":
        expected = {"start_all_gather": [], "all_to_all_single": [own] * (ranks - 1)}
    for sizes in run_on_ranks(count_sent_values, ranks, layout):
        assert sizes == expected


class RecordedWork:
    """The handle of a collective in flight; records when it is waited for."""

    def __init__(self, work: dist.Work, events: list[str]):
        self.work, self.events = work, events

    def wait(self) -> bool:
        self.events.append("wait")
        return self.work.wait()


def order_of_attention(layout) -> tuple[list[str], list[str]]:
    """Collectives and tiles of one forward and of one backward of attention, in order."""
    model, _, _ = build_sharded(layout, SGD)
    events: list[str] = []

    def record_collective(module, name):
        collective = getattr(module, name)

        def recorded(*args, async_op=False, **options):
            events.append("start" if async_op else f"blocking {name}")
            work = collective(*args, async_op=async_op, **options)
            return RecordedWork(work, events) if async_op else work

        setattr(module, name, recorded)

    def record_tile(name):
        compute = getattr(CpuFlash, name)

        def recorded(self, *args):
            events.append("own" if args[-1] else "other")  # causal: keys of this rank
            return compute(self, *args)

        setattr(CpuFlash, name, recorded)

    record_collective(collectives, "_all_gather")
    record_collective(dist, "all_to_all_single")
    for name in ("forward", "backward"):
        record_tile(name)
    tokens = LENGTH // layout.context
    q, k, v = (torch.randn(3, heads, tokens, 8, requires_grad=True) for heads in (4, 2, 2))
    out = model.layers["0"].attention.attend(q, k, v)
    forward = events.copy()
    events.clear()
    out.sum().backward()
    return forward, events


ONE_GATHER = "start own wait other other"
ORDERS = {
    # In backward, each gradient is sent while the next one is computed.
    "allgather": (ONE_GATHER, "start own wait other start other wait start wait"),
    # Gradients follow the keys and values around the ring, one step behind.
    "alltoall": (
        "start own wait start other wait other",
        "start own start wait start other wait start wait other wait start wait",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ORDERS)
def test_keys_and_values_are_exchanged_while_the_own_ones_are_computed_with(rotate):
    ranks = 3
    for orders in run_on_ranks(order_of_attention, ranks, Layout(context=ranks, rotate=rotate)):
        assert tuple(map(" ".join, orders)) == ORDERS[rotate]


def sum_by_each_exchange(_) -> list[torch.Tensor]:
    """The summed gradients of this rank's shard by each exchange, and their sum in fp64."""
    group, shape = dist.group.WORLD, (2, 1, 2, 5, 8)
    assert group is not None

    def gradient_of(rank: int, source: int) -> torch.Tensor | None:
        if (rank, source) == (1, 0):
            return None  # no query of rank 1 attends to a key of rank 0
        return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + source))

    sums = [
        exchange(group).sum_gradients(
            torch.zeros(shape), lambda source, _: gradient_of(group.rank(), source)
        )
        for exchange in kv_exchange.KV_EXCHANGES.values()
    ]
    parts = [gradient_of(rank, group.rank()) for rank in range(group.size())]
    exact = torch.stack([part.double() for part in parts if part is not None]).sum(0)
    return [*sums, exact.float()]


@pytest.mark.slow
def test_all_gather_and_ring_sum_gradients_in_one_order():
    for allgather, ring, exact in run_on_ranks(sum_by_each_exchange, 4, None):
        assert torch.equal(allgather, ring)
        assert (allgather - exact).abs().max() < 1e-6


def peak_bytes_of_a_step(layout, recipe) -> int:
    _, _, engine = build_sharded(layout, recipe)
    batch = engine.prepare(*batch_at(0, recipe))

    def run_step():
        engine.forward_backward(batch, torch.tensor(1.0))

    run_step()  # allocates what later steps reuse
    peak, _ = measure_allocations(run_step)
    return peak


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["alltoall", "allgather"])
def test_a_sequence_four_times_as_long_fits_on_four_ranks(rotate):
    short = replace(SGD, seq_len=256, batch=2)
    one_rank = run_on_ranks(peak_bytes_of_a_step, 1, Layout(), short)[0]
    layout = Layout(context=4, rotate=rotate)
    for peak in run_on_ranks(peak_bytes_of_a_step, 4, layout, replace(short, seq_len=1024)):
        print(f"{rotate}: {peak / one_rank:.3f} of the peak of the short sequence")  # pytest -rP
        assert peak <= 1.2 * one_rank


def check_operators_of_linear_attention() -> None:
    group_name = dist.group.WORLD.group_name
    torch.library.opcheck(gather_over_ranks, (torch.randn(2, 3, requires_grad=True), group_name))
    torch.library.opcheck(sum_own_over_ranks, (torch.randn(2, 3, 4), group_name))


@pytest.mark.slow
def test_the_operators_of_linear_attention_pass_opcheck():
    """What torch.compile needs of them, without a compiled layout."""
    run_on_ranks(check_operators_of_linear_attention, 2)
