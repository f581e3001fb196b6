"""FSDP all-gathers weights ahead of the computation, in forward and in backward."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.distributed.oracle import SGD, Layout, batch_at, build_sharded, with_enough_blocks
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import MOE
from titanlite.models import valid_tokens
from titanlite.parallelize.token_exchange import _RowExchange

BLOCKS = 4
EXPERT_RECIPE = replace(MOE, sizes=replace(MOE.sizes, n_layers=2))  # one block with experts


def order_of_events(layout) -> list[tuple[str, str]]:
    """(FSDP event, its parameter group) in the order in which they start in the second step."""
    _, _, engine = build_sharded(layout, with_enough_blocks(SGD, layout))
    sequences = layout.local_batch(SGD)
    inputs, labels = (part[:sequences] for part in batch_at(0, SGD))
    batch = engine.prepare(inputs, labels)
    engine.forward_backward(batch, valid_tokens(labels))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.forward_backward(batch, valid_tokens(labels))
    matches = (
        (re.match(r"FSDP::(\w+) \((.*)\)", e.name), e.time_range.start) for e in profiler.events()
    )
    events = sorted((start, match[1], match[2]) for match, start in matches if match)
    return [(event, group) for _, event, group in events]


def order_of_exchanges() -> list[str]:
    """Transfers of tokens, and what the shared experts of one block do, in the order of a step."""
    layout, events = Layout(shard=2, expert=2), []
    model, _, engine = build_sharded(layout, EXPERT_RECIPE)
    sequences = layout.local_batch(EXPERT_RECIPE)
    inputs, labels = (part[:sequences] for part in batch_at(0, EXPERT_RECIPE))

    def recorded(name, original):
        def call(self, *args, **options):
            events.append(name)
            return original(self, *args, **options)

        return call

    _RowExchange.send = recorded("send", _RowExchange.send)
    _RowExchange.wait = recorded("wait", _RowExchange.wait)
    shared = model.layers["1"].moe.shared_experts
    for layer in (shared.w1, shared.w2):
        layer.register_forward_hook(lambda *_: events.append("shared"))
        layer.register_full_backward_hook(lambda *_: events.append("shared"))
    engine.forward_backward(engine.prepare(inputs, labels), valid_tokens(labels))
    return events


def test_tokens_are_sent_while_the_shared_experts_compute():
    dispatch, combine = ["send", "shared", "shared", "wait"], ["send", "wait"]
    for events in run_on_ranks(order_of_exchanges, 2):
        assert events == dispatch + combine + combine + dispatch, "in forward, and in backward"


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=2, recompute="full")], ids=str)
def test_weights_are_gathered_one_group_ahead(layout):
    for events in run_on_ranks(order_of_events, 2, layout):
        gathers = [n for n, (event, _) in enumerate(events) if event == "all_gather"]
        groups = [events[n][1] for n in gathers]
        blocks = [f"layers.{n}" for n in range(BLOCKS)]
        assert [g for g in groups if g in blocks] == blocks + blocks[::-1]
        first_start = {event: n for n, event in reversed(list(enumerate(events)))}
        for before, after in pairwise(blocks):
            forward = first_start["all_gather", after]
            assert forward < first_start["post_forward", before]  # while `before` computes
            backward = next(n for n in gathers if n > forward and events[n][1] == before)
            assert backward < first_start["post_backward_reduce", after]
