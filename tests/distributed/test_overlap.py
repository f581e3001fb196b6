"""Weights are on their way before they are needed, in forward and in backward."""

from __future__ import annotations

import re

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.distributed.oracle import SGD, Layout, batch_at, deepened, sharded
from tests.distributed.ranks import run_on_ranks
from titanlite.models import valid_tokens

BLOCKS = 4


def order_of_events(layout) -> list[tuple[str, str]]:
    """(what FSDP does, to which group), as it begins, in a second step's trace."""
    model, mesh, engine = sharded(layout, deepened(SGD, layout))
    rows = layout.local_batch(SGD)
    inputs, labels = (part[:rows] for part in batch_at(0, SGD))
    engine.forward_backward(inputs, labels, valid_tokens(labels))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        engine.forward_backward(inputs, labels, valid_tokens(labels))
    named = ((re.match(r"FSDP::(\w+) \((.*)\)", e.name), e.time_range.start) for e in seen.events())
    events = sorted((start, match[1], match[2]) for match, start in named if match)
    return [(what, group) for _, what, group in events]


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=2, recompute="full")], ids=str)
def test_weights_are_gathered_a_group_ahead(layout):
    for events in run_on_ranks(order_of_events, 2, layout):
        gathers = [n for n, (what, _) in enumerate(events) if what == "all_gather"]
        groups = [events[n][1] for n in gathers]
        blocks = [f"layers.{n}" for n in range(BLOCKS)]
        assert [g for g in groups if g in blocks] == blocks + blocks[::-1]
        begun = {event: n for n, event in reversed(list(enumerate(events)))}  # first time of each
        for before, after in zip(blocks, blocks[1:], strict=False):
            forward = begun["all_gather", after]
            assert forward < begun["post_forward", before]  # while the one before computes
            again = next(n for n in gathers if n > forward and events[n][1] == before)
            assert again < begun["post_backward_reduce", after]
