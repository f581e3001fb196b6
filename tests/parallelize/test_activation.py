"""Activation checkpointing recomputes the selected blocks and operations; offload prefetches."""

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

SIZES = Llama3Sizes(dim=16, n_layers=4, n_heads=2, n_kv_heads=2, hidden_dim=32, vocab_size=31)
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def build_model(config: ActivationCheckpointConfig, sizes=SIZES):
    torch.manual_seed(0)
    model = FAMILIES["llama3"].build(sizes)
    checkpoint_operations(model.layers, config)
    checkpoint_blocks(model.layers, config)
    if config.offload:
        activation_offload.offload_activations(model.layers, "cpu")
    return model


def backward(model):
    """Run one forward and backward; return the gradients."""
    torch.manual_seed(1)
    tokens = torch.randint(0, SIZES.vocab_size, (2, 8))
    model(tokens, labels=tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "mode, option, forwards",
    [
        ("none", "2", [1, 1, 1, 1]),
        ("full", "2", [2, 2, 2, 2]),
        ("selective", "1", [2, 2, 2, 2]),
        ("selective", "2", [2, 1, 2, 1]),
        ("selective", "3", [2, 1, 1, 2]),
        ("selective", "op", [2, 2, 2, 2]),
    ],
)
def test_exactly_the_selected_blocks_are_recomputed(mode, option, forwards):
    plain = FAMILIES["llama3"].build(SIZES)
    model = build_model(ActivationCheckpointConfig(mode=mode, selective_ac_option=option))
    counts = [0] * SIZES.n_layers
    for name, block in model.layers.items():

        def count(*_, number=int(name)):
            counts[number] += 1

        block.attention.register_forward_hook(count)
    backward(model)
    assert counts == forwards
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()


class OperationCounter(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.name().removeprefix("aten::").partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def count_operations(config) -> Counter[str]:
    """Operations of one forward and backward."""
    model = build_model(config)
    with OperationCounter() as counter:
        backward(model)
    return counter.counts


@pytest.mark.parametrize("names, recomputed_matmuls", [([], 3), (["w1"], 4), (["attention.w"], 5)])
def test_per_operation_recomputes_every_second_matmul_and_not_attention(names, recomputed_matmuls):
    without = count_operations(ActivationCheckpointConfig(mode="none"))
    config = ActivationCheckpointConfig(
        selective_ac_option="op", per_op_sac_force_recompute_mm_shapes_by_fqns=names
    )
    per_operation = count_operations(config)
    assert per_operation["mm"] - without["mm"] == recomputed_matmuls * SIZES.n_layers
    assert per_operation[ATTENTION] == without[ATTENTION] == SIZES.n_layers
    assert per_operation["silu"] - without["silu"] == SIZES.n_layers


def bytes_saved(**config) -> int:
    """Bytes allocated by a forward and not freed at its end."""
    sizes = Llama3Sizes(64, 4, 4, 4, 256, vocab_size=31)
    model = build_model(ActivationCheckpointConfig(**config), sizes)
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    _, saved = measure_allocations(lambda: model(tokens, labels=tokens))
    return saved


def test_each_mode_saves_less_than_the_next_weaker_one():
    saved = {
        "full": bytes_saved(mode="full"),
        "op": bytes_saved(selective_ac_option="op"),
        "every second": bytes_saved(selective_ac_option="2"),
        "none": bytes_saved(mode="none"),
    }
    print({mode: f"{saved[mode] / 2**20:.2f} MiB" for mode in saved})  # pytest -rP
    assert list(saved.values()) == sorted(set(saved.values())), saved


class TransferLog(activation_offload._HostTransfers):
    """Records every copy and every wait, in order."""

    def __init__(self):
        self.entries: list[tuple[str, int]] = []

    def to_host(self, tensor):
        host = super().to_host(tensor)
        self.entries.append(("to host", id(host)))
        return host

    def to_device(self, host, device):
        self.entries.append(("to device", id(host)))
        return super().to_device(host, device)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_saved_activations_are_offloaded_once_and_prefetched_before_use(mode, monkeypatch):
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1)
    transfers = TransferLog()
    monkeypatch.setattr(activation_offload, "_HostTransfers", lambda: transfers)
    wait = activation_offload._OffloadedTensor.wait

    def logged_wait(tensor):
        transfers.entries.append(("use", id(tensor._host)))
        return wait(tensor)

    monkeypatch.setattr(activation_offload._OffloadedTensor, "wait", logged_wait)
    expected = backward(build_model(ActivationCheckpointConfig(mode="none")))
    gradients = backward(build_model(ActivationCheckpointConfig(mode=mode, offload=True)))
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)

    sent = [tensor for entry, tensor in transfers.entries if entry == "to host"]
    fetched = [tensor for entry, tensor in transfers.entries if entry == "to device"]
    per_block, remainder = divmod(len(sent), SIZES.n_layers)
    assert remainder == 0 and per_block >= 1 and len(set(sent)) == len(sent)
    blocks = [
        set(sent[number * per_block : (number + 1) * per_block])
        for number in range(SIZES.n_layers - activation_offload.BLOCKS_ON_DEVICE)
    ]
    assert sorted(fetched) == sorted(set().union(*blocks))  # the last blocks never left the device
    for number, block in enumerate(blocks):
        first_use = next(
            index
            for index, (entry, tensor) in enumerate(transfers.entries)
            if entry == "use" and tensor in block
        )
        fetched_before = {t for entry, t in transfers.entries[:first_use] if entry == "to device"}
        assert block <= fetched_before
        if number:  # the block whose backward runs next is prefetched too
            assert blocks[number - 1] <= fetched_before


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"mode": "none"}, "off"),
        ({"mode": "full"}, "full"),
        ({"selective_ac_option": "1"}, "selective, every block"),
        ({"selective_ac_option": "2"}, "selective, every 2nd block"),
        ({"selective_ac_option": "4"}, "selective, every 4th block"),
        ({"mode": "memory_budget"}, "compiler-selected, memory budget 0.5"),
        (
            {"mode": "full", "offload": True},
            "full; saved activations offloaded to host memory",
        ),
    ],
)
def test_the_start_up_summary_names_what_is_recomputed(settings, text):
    assert str(ActivationCheckpointConfig(**settings)) == text
