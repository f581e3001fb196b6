"""Activation checkpointing is live: what is forgotten is computed again, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallelize.memory import measure_allocations
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.parallelize import activation_offload
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    checkpoint_blocks,
    checkpoint_operations,
)

SHAPE = Llama3Sizes(dim=16, n_layers=4, n_heads=2, n_kv_heads=2, hidden_dim=32, vocab_size=31)
PRODUCTS, ATTENTION = 7, "_scaled_dot_product_flash_attention_for_cpu"  # of a block


def built(config: ActivationCheckpointConfig, shape=SHAPE):
    torch.manual_seed(0)
    model = FAMILIES["llama3"].build(shape)
    checkpoint_operations(model.layers, config)
    checkpoint_blocks(model.layers, config)
    if config.offload:
        activation_offload.offload_activations(model.layers, "cpu")
    return model


def learn(model):
    torch.manual_seed(1)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 8))
    model(tokens, labels=tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "mode, option, times",
    [
        ("none", "2", [1, 1, 1, 1]),
        ("full", "2", [2, 2, 2, 2]),
        ("selective", "1", [2, 2, 2, 2]),
        ("selective", "2", [2, 1, 2, 1]),
        ("selective", "3", [2, 1, 1, 2]),
        ("selective", "op", [2, 2, 2, 2]),
    ],
)
def test_the_blocks_that_are_asked_for_are_computed_twice(mode, option, times):
    plain = FAMILIES["llama3"].build(SHAPE)
    model = built(ActivationCheckpointConfig(mode=mode, selective_ac_option=option))
    counts = [0] * SHAPE.n_layers
    for name, block in model.layers.items():

        def count(*_, number=int(name)):
            counts[number] += 1

        block.attention.register_forward_hook(count)
    learn(model)
    assert counts == times
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.times[function.name().removeprefix("aten::").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def times_of_a_step(config) -> Counter[str]:
    model = built(config)
    with Counted() as seen:
        learn(model)
    return seen.times


@pytest.mark.parametrize("named, again", [([], 3), (["w1"], 4), (["attention.w"], 5)])
def test_per_operation_every_second_product_is_computed_again_and_attention_is_not(named, again):
    plain = times_of_a_step(ActivationCheckpointConfig(mode="none"))
    chosen = ActivationCheckpointConfig(
        selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=named
    )
    per_operation = times_of_a_step(chosen)
    assert per_operation["mm"] - plain["mm"] == again * SHAPE.n_layers
    assert per_operation[ATTENTION] == plain[ATTENTION] == SHAPE.n_layers
    assert per_operation["silu"] - plain["silu"] == SHAPE.n_layers


def bytes_held(**config) -> int:
    """What is there after a forward, beside the model, the tokens and the loss."""
    shape = Llama3Sizes(64, 4, 4, 4, 256, vocab_size=31)
    model = built(ActivationCheckpointConfig(**config), shape)
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    _, held = measure_allocations(lambda: model(tokens, labels=tokens))
    return held


def test_each_mode_holds_less_than_the_one_before():
    held = {
        "full": bytes_held(mode="full"),
        "op": bytes_held(selective_ac_option="op"),
        "every second": bytes_held(selective_ac_option="2"),
        "none": bytes_held(mode="none"),
    }
    print({mode: f"{held[mode] / 2**20:.2f} MiB" for mode in held})  # pytest -rP
    assert list(held.values()) == sorted(set(held.values())), held


class Journey(activation_offload._OnHost):
    """Who left and who came back, in order."""

    def __init__(self):
        self.log: list[tuple[str, int]] = []

    def out(self, tensor):
        host = super().out(tensor)
        self.log.append(("out", id(host)))
        return host

    def come(self, away, device):
        super().come(away, device)
        self.log.append(("come", id(away.host)))

    def arrived(self, away):
        self.log.append(("used", id(away.host)))
        return super().arrived(away)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_blocks_save_leaves_once_and_is_on_its_way_before_it_is_used(mode, monkeypatch):
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 1)
    journey = Journey()
    monkeypatch.setattr(activation_offload, "_OnHost", lambda: journey)
    right = learn(built(ActivationCheckpointConfig(mode="none")))
    found = learn(built(ActivationCheckpointConfig(mode=mode, offload=True)))
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient)

    left = [who for what, who in journey.log if what == "out"]
    came = [who for what, who in journey.log if what == "come"]
    each, rest = divmod(len(left), SHAPE.n_layers)
    assert rest == 0 and each >= 1 and len(set(left)) == len(left)
    groups = [
        set(left[n * each : (n + 1) * each])
        for n in range(SHAPE.n_layers - activation_offload.STAY)
    ]
    assert sorted(came) == sorted(set().union(*groups))  # the last blocks' are still there
    for block, group in enumerate(groups):
        first_use = next(
            n for n, (w, who) in enumerate(journey.log) if w == "used" and who in group
        )
        on_the_way = {who for what, who in journey.log[:first_use] if what == "come"}
        assert group <= on_the_way
        if block:  # and those of the block that comes next
            assert groups[block - 1] <= on_the_way | {
                who for what, who in journey.log[first_use - each : first_use + 1] if what == "come"
            }
