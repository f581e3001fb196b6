"""Activation checkpointing is live: what is forgotten is computed again, and nothing else."""

from __future__ import annotations

import pytest
import torch

from titanlite.models import FAMILIES, LlamaShape
from titanlite.parallelize.activation import ActivationCheckpointConfig, recompute_activations

SHAPE = LlamaShape(dim=16, n_layers=4, n_heads=2, n_kv_heads=2, hidden_dim=32, vocab_size=31)


@pytest.mark.parametrize(
    "mode, option, times",
    [
        ("none", "2", [1, 1, 1, 1]),
        ("full", "2", [2, 2, 2, 2]),
        ("selective", "1", [2, 2, 2, 2]),
        ("selective", "2", [2, 1, 2, 1]),
        ("selective", "3", [2, 1, 1, 2]),
    ],
)
def test_the_blocks_that_are_asked_for_are_computed_twice(mode, option, times):
    model = FAMILIES["llama3"].build(SHAPE)
    names = [name for name, _ in model.named_parameters()]
    config = ActivationCheckpointConfig(mode=mode, selective_ac_option=option)
    recompute_activations(model.layers, config)
    counts = [0] * SHAPE.n_layers
    for name, block in model.layers.items():

        def count(*_, number=int(name)):
            counts[number] += 1

        block.attention.register_forward_hook(count)
    model(torch.randint(0, 31, (1, 8))).sum().backward()
    assert counts == times
    assert [name for name, _ in model.named_parameters()] == names  # checkpoints depend on them
