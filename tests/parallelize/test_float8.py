"""Which linear layers become Float8, and the reason that is logged for each other one."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.distributed.collectives import local_shard
from titanlite.distributed.mesh import Degrees
from titanlite.models import FAMILIES
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize import float8
from titanlite.parallelize.compile import NOT_COMPILED, CompileConfig, compile_blocks
from titanlite.parallelize.float8 import (
    AUTO_FILTER,
    Float8Config,
    Gpu,
    check_float8,
    check_float8_device,
    convert_to_float8,
    select_float8_layers,
    torchao,
)

FAMILY = FAMILIES["llama3"]


def build_on_meta(flavor: str):
    with torch.device("meta"):
        return FAMILY.build(FAMILY.flavors[flavor])


def excluded_layers(recipe: str, *filter_fqns: str, flavor: str = "8B") -> dict[str, str]:
    """Reason for every layer of the first block, and for the output layer, that is not Float8."""
    config = Float8Config(recipe_name=recipe, filter_fqns=list(filter_fqns))
    selected, excluded = select_float8_layers(build_on_meta(flavor), config)
    assert len(selected) + len(excluded) == 7 * FAMILY.flavors[flavor].n_layers + 1
    return {
        name.replace("layers.0.", ""): reason
        for name, reason in excluded.items()
        if not name.startswith("layers.") or name.startswith("layers.0.")
    }


def test_a_filter_matches_a_part_of_a_name():
    excluded = excluded_layers("tensorwise", "output", "attention.w")
    assert excluded.pop("output") == "fused with the loss"
    assert excluded.keys() == {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
    config = Float8Config(recipe_name="tensorwise", filter_fqns=[".3.", ".31."])
    selected, excluded = select_float8_layers(build_on_meta("8B"), config)
    blocks = {name.split(".")[1] for name in excluded if name != "output"}
    assert blocks == {"3", "31"} and len(selected) == 30 * 7


def test_shards_of_shared_experts_that_float8_hardware_does_not_support_are_refused():
    """Their hidden width is sharded over the tensor ranks, by no role of the plan."""
    family = FAMILIES["deepseek_v3"]
    sizes = replace(family.flavors["tiny"], n_shared_experts=1, expert_hidden_dim=48)
    config = Float8Config(recipe_name="tensorwise")
    assert not list(check_float8(config, family, sizes, Degrees(), 64))
    (problem,) = check_float8(config, family, sizes, Degrees(tensor=2), 64)
    assert "shared_experts.w1 24x256" in str(problem) and "w2 256x24" in str(problem)


@pytest.mark.parametrize(
    "recipe, flavor, small",
    [
        ("tensorwise", "8B", {"attention.wk", "attention.wv"}),  # 1024 x 4096
        ("rowwise", "8B", {"attention.wk", "attention.wv"}),
        ("rowwise", "1B", {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
         | {"feed_forward.w2"}),
    ],
)  # fmt: skip
def test_the_auto_filter_excludes_layers_too_small_to_be_faster(recipe, flavor, small):
    assert excluded_layers(recipe, flavor=flavor).keys() == {"output"}
    excluded = excluded_layers(recipe, AUTO_FILTER, flavor=flavor)
    assert excluded.pop("output") == "fused with the loss"
    assert excluded.keys() == small
    assert all("too small to be faster" in reason for reason in excluded.values())


def test_mxfp8_is_refused_where_blocks_of_32_or_hardware_are_missing(monkeypatch):
    """Emulated too: a scale for each 32 values needs whole blocks. It is never emulated unasked."""
    sizes = replace(FAMILY.flavors["quickstart"], hidden_dim=96)
    real, emulated = (Float8Config(recipe_name="mxfp8", emulate=e) for e in (False, True))

    def problems(config: Float8Config, tokens: int = 64, tensor: int = 1) -> str:
        return " ".join(
            map(str, check_float8(config, FAMILY, sizes, Degrees(tensor=tensor), tokens))
        )

    assert problems(emulated) == problems(real) == ""
    assert "48 tokens a rank" in problems(emulated, tokens=48)
    assert "w1 48x256" in problems(emulated, tensor=2)
    assert "tensorwise" in problems(replace(emulated, enable_fsdp_float8_all_gather=True))
    assert AUTO_FILTER in problems(replace(emulated, filter_fqns=[AUTO_FILTER]))
    gpus = [None, *(Gpu("GPU", capability) for capability in [(9, 0), (12, 0), (10, 0), (10, 3)])]
    refused = [bool(list(check_float8_device(real, gpu, compiles_blocks=True))) for gpu in gpus]
    assert refused == [True, True, True, False, False]
    assert not list(check_float8_device(emulated, None, compiles_blocks=True))
    torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.prototype.moe_training.mxfp8_linear", None)
    assert "mxfp8_linear cannot be imported" in problems(emulated)


def test_conversion_does_not_rename_parameters_and_logs_excluded_layers(caplog):
    model = build_on_meta("quickstart")
    model.layers["0"].attention.wo = torch.nn.Linear(256, 4100, bias=False, device="meta")
    names = [name for name, _ in model.named_parameters()]
    with caplog.at_level(logging.INFO, logger="titanlite"):
        convert_to_float8(model, Float8Config(recipe_name="rowwise", filter_fqns=["attention.wk"]))
    assert [name for name, _ in model.named_parameters()] == names
    assert "float8 rowwise in 23 linear layers; in high precision: " in caplog.text
    assert "attention.wo (4100x256 is not a multiple of 16)" in caplog.text
    assert 'layers.*.attention.wk ("attention.wk" in filter_fqns)' in caplog.text


@pytest.mark.parametrize(
    "recipe, expected", [("rowwise", True), ("rowwise_with_gw_hp", True), ("tensorwise", False)]
)
def test_only_blocks_with_scales_of_rows_round_as_eager_mode(recipe, expected, monkeypatch):
    """Not everything that the process compiles: rounding adds 1.2 GB to an 8B block."""
    options = []
    monkeypatch.setattr(torch, "compile", lambda forward, **o: options.append(o.get("options")))
    config = Float8Config(recipe_name=recipe)
    model = build_on_meta("quickstart")
    convert_to_float8(model, config)
    compile_blocks(model.layers, CompileConfig(enable=True), config.rounds_as_eager)
    assert options[-1] == ({"emulate_precision_casts": True} if expected else None)
    assert not torch._inductor.config.emulate_precision_casts


def test_one_graph_casts_all_weights_before_their_all_gather_to_the_values_of_torchao():
    """Eager operations would move 27 bytes a weight; a graph for each shape would compile long."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    scales, bits = torch.tensor([3.0, 7.0, 7000.0]), []  # the last ones saturate
    for compile in (NOT_COMPILED, CompileConfig(enable=True, backend=backend)):
        for scale, rows in zip(scales, (64, 32, 160), strict=True):
            layer = float8_layer(scale, rows, compile)
            (data,), (kept,) = layer.weight.fsdp_pre_all_gather(None)
            assert kept is scale and data.shape == (rows, 128)
            bits.append(data.view(torch.uint8))
    assert all(map(torch.equal, bits[:3], bits[3:]))
    assert len(graphs) == 1


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_in_the_matmuls_give_the_gradients_of_scales_after_them(recipe, monkeypatch):
    """Scaled after them, each output of a backward matmul is read and written once more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 32, bias=False)).bfloat16()
    convert_to_float8(model, Float8Config(recipe_name=recipe))
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    gradients, operations = [], []
    for cuda in ("12.8", "12.9"):
        monkeypatch.setattr(float8, "find_gpu", lambda _: Gpu("H100", (9, 0)))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        with torch.profiler.profile() as profile:
            gradients += [torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]
        operations.append(sum(e.count for e in profile.key_averages() if e.key == "aten::mul_"))
    assert all(map(torch.equal, *gradients))
    assert operations[0] > operations[1] == 0


def test_mxfp8_rounds_gradients_by_a_few_percent():
    torch.manual_seed(0)
    layers = nn.Linear(64, 96, bias=False), nn.SiLU(), nn.Linear(96, 32, bias=False)
    model, x = nn.Sequential(*layers), torch.randn(2, 64, 64)
    gradients = []
    for recipe in (None, "mxfp8"):
        convert_to_float8(model, Float8Config(recipe_name=recipe, emulate=True))
        gradients.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    for exact, rounded in zip(*gradients, strict=True):
        error = (rounded - exact).norm() / exact.norm()
        print(f"{error:.3f}, cosine {torch.cosine_similarity(rounded, exact, 0).min():.4f}")
        assert 0.01 < error < 0.1


def test_a_matrix_of_tokens_is_what_torchao_gets():
    """Otherwise a compiled backward computes the maximum of each layer's input again."""
    # here, because each worker of the suite imports all tests, and these take seconds
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    convert_to_float8(model, Float8Config(recipe_name="tensorwise", emulate=True))
    maxima = []

    def backend(graph, inputs):
        maxima.append(sum(n.target is torch.ops.aten.max.default for n in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def partition(graph, *args, **options):
        joint_graph_passes(graph)  # as inductor does
        return min_cut_rematerialization_partition(graph, *args, **options)

    x = torch.randn(2, 16, 64, requires_grad=True)
    aot = aot_autograd(fw_compiler=backend, partition_fn=partition)
    torch.compile(model, backend=aot)(x).sum().backward()
    assert maxima == [2, 1]  # of the input and the weight; of the output's gradient


class RefuseHostReads(TorchDispatchMode):
    """Fails where the host reads the value of a tensor, which would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def float8_layer(scale: Tensor, rows: int = 64, compile: CompileConfig = NOT_COMPILED) -> nn.Linear:
    """A linear layer whose weight is all-gathered in Float8, with this precomputed scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, rows, bias=False, dtype=torch.bfloat16))
    config = Float8Config(recipe_name="tensorwise", enable_fsdp_float8_all_gather=True)
    convert_to_float8(model, config, compile)
    layer = model[0]
    assert isinstance(layer, nn.Linear) and hasattr(layer.weight, "_precomputed_scale")
    layer.weight._precomputed_scale = scale
    return layer


def test_the_local_shard_of_a_float8_weight_is_found_without_reading_its_scale():
    """The host would wait for the device once per weight and step."""
    weight = float8_layer(scale=torch.tensor(2.0)).weight
    with RefuseHostReads():
        local = local_shard(weight)
    assert local is weight._tensor


def test_an_update_of_low_memory_adam_does_not_read_the_scales_of_float8_weights():
    layer = float8_layer(scale=torch.empty((), device="meta"))  # has no value to read
    config = OptimizerConfig.of(state_dtype="8bit", implementation="for-loop")
    optimizer = build_optimizer(layer, config)
    before = local_shard(layer.weight).clone()
    layer.weight.grad = torch.ones_like(local_shard(layer.weight))
    optimizer.step()
    assert not torch.equal(local_shard(layer.weight), before)
