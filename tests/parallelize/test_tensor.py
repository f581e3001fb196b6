"""The table of tensor-parallel roles, without processes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.distributed.oracle import FAMILY, SGD, SIZES, Layout, batch_at, build_sharded
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.mesh import Degrees, build_mesh
from titanlite.errors import ConfigError
from titanlite.models import first_match
from titanlite.parallelize.tensor import (
    TENSOR_PARALLEL_ROLES,
    apply_tensor_parallel,
    weight_shard_size,
)


def error_of_plan(plan: dict[str, str]) -> str:
    mesh = build_mesh(Degrees(), "cpu")
    with pytest.raises(ConfigError) as raised:
        apply_tensor_parallel(nn.Linear(4, 4), plan, mesh.tp, head_width=2, loss_parallel=True)
    return str(raised.value)


def test_an_unknown_role_in_a_plan_is_refused_and_the_known_ones_are_listed():
    (message,) = run_on_ranks(error_of_plan, 1, {"layers.*.wq": "colwize"})
    assert '"layers.*.wq" has the unknown role "colwize"' in message
    assert all(role in message for role in TENSOR_PARALLEL_ROLES)


def compare_weight_shards(layout) -> None:
    model, _, _ = build_sharded(layout, SGD)
    full = FAMILY.build(SIZES)
    for name, layer in full.named_modules():
        if isinstance(layer, nn.Linear):
            shard = model.get_submodule(name).weight.to_local()
            role = first_match(FAMILY.tp_plan, name)
            size = (layer.out_features, layer.in_features)
            computed = weight_shard_size(role, *size, layout.tensor, SIZES.head_width)
            # 509 token ids: the last rank has fewer rows of the output layer.
            assert computed == tuple(shard.shape) or name == "output", name


@pytest.mark.parametrize("ranks", [2, 4])  # 4: more ranks than key-value heads
def test_computed_shard_sizes_are_those_of_the_model(ranks):
    run_on_ranks(compare_weight_shards, ranks, Layout(tensor=ranks))


def embed_with_warnings(layout) -> tuple[type, bool, list[str]]:
    """(type of the embedding's output, whether it is a view, warnings)."""
    model, _, engine = build_sharded(layout, SGD)
    outputs = []
    model.tok_embeddings.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.forward_backward(engine.prepare(*batch_at(0, SGD)), torch.tensor(1.0))
    return type(outputs[0]), outputs[0]._is_view(), [str(each.message) for each in caught]


def test_the_embedding_returns_a_plain_tensor_about_which_fsdp_does_not_warn():
    for kind, is_view, messages in run_on_ranks(embed_with_warnings, 4, Layout(shard=2, tensor=2)):
        assert kind is torch.Tensor and not is_view
        assert not [message for message in messages if "view" in message]


def test_a_norm_whose_forward_would_be_lost_is_refused():
    class DividedNorm(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) / 8

    style = TENSOR_PARALLEL_ROLES["sequence"].style(None)
    with pytest.raises(TypeError, match="DividedNorm has a forward of its own"):
        style._apply(DividedNorm(4), None)
