"""muP: initial weights and learning rates at named points, and against explicit multipliers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from titanlite.models import FAMILIES, LLAMA3, Llama3Sizes
from titanlite.models.mup import BaseWidths, MupConfig, check_mup_base, width_scales
from titanlite.models.spec import PARAMETER_ROLE_NAMES, first_match
from titanlite.optim import MatrixFacts, OptimizerConfig, ParameterGroupConfig, build_optimizer
from titanlite.parallelize.weight_init import init_weights

SIZES = Llama3Sizes(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, hidden_dim=160, vocab_size=101)
BASE = BaseWidths(dim=16, n_heads=2, n_kv_heads=1, hidden_dim=20)  # 4 x the width, 8 x hidden_dim
WIDER_HEADS = BaseWidths(dim=16, n_heads=8, n_kv_heads=4, hidden_dim=40)  # 4 x the head width
INIT_STD = LLAMA3.init_std
QUERY, NORM = "layers.1.attention.wq.weight", "norm.weight"


def scales(base: BaseWidths | None = BASE, **changes):
    return width_scales(MupConfig(base), LLAMA3, replace(SIZES, **changes))


def lr_factors(base: BaseWidths | None = BASE, changes=None, **section) -> dict[str, tuple]:
    """(factor of the learning rate, weight decay) of each parameter."""
    model = LLAMA3.build(replace(SIZES, **(changes or {})))
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = build_optimizer(
        model,
        OptimizerConfig.of(**section),
        MatrixFacts(LLAMA3, SIZES),
        widths=scales(base, **(changes or {})),
    )
    return {
        names[parameter]: (group["lr_factor"], group["weight_decay"])
        for group in optimizers.param_groups
        for parameter in group["params"]
    }


def test_every_parameter_of_every_family_has_a_known_role():
    for family in FAMILIES.values():
        for sizes in family.flavors.values():
            with torch.device("meta"):
                model = family.build(replace(sizes, n_layers=1))
            for name, _ in model.named_parameters():
                assert first_match(family.parameter_roles, name) in PARAMETER_ROLE_NAMES, name


def test_a_bias_is_scaled_as_a_gain_and_that_of_the_queries_as_the_queries():
    """GPT-2 with 2 heads, each 2 times as wide; Qwen3's heads have one width in all sizes."""
    gpt2, qwen3 = FAMILIES["gpt2"], FAMILIES["qwen3"]
    base = BaseWidths(dim=64, n_heads=4, hidden_dim=256)
    scales = width_scales(MupConfig(base), gpt2, gpt2.flavors["characters"])
    for name in ("w1.bias", "w2.bias"):
        assert scales[f"layers.0.feed_forward.{name}"].multiplier == 1
    assert scales["layers.0.attention.wk.bias"] == scales["layers.0.ffn_norm.bias"]
    assert scales["layers.0.attention.wq.bias"].multiplier == 2**-0.5
    assert scales["norm.bias"] == scales["norm.weight"]
    assert scales["norm.bias"].multiplier == 1 / 2  # tied embeddings
    base = BaseWidths(dim=128, n_heads=8, hidden_dim=1536, n_kv_heads=4)
    scales = width_scales(MupConfig(base), qwen3, qwen3.flavors["debugmodel"])
    assert scales["layers.0.attention.q_norm.weight"].multiplier == 1
    assert scales["layers.0.attention.wq.weight"].fan_out == 2


@pytest.mark.parametrize(
    ("name", "init", "adam", "sgd", "muon"),
    [  # Tensor Programs V, table 3, at 4 times the width; w2 reads 8 times as many channels
        ("tok_embeddings.weight", 1, 1, 4, 1),
        ("layers.0.attention_norm.weight", 1, 1, 4, 1),
        ("layers.0.attention.wq.weight", 1 / 2, 1 / 4, 1, 1 / 2),
        ("layers.0.attention.wo.weight", 1 / 2, 1 / 4, 1, 1 / 2),
        ("layers.1.feed_forward.w1.weight", 1 / 2, 1 / 4, 2, 1 / 2),
        ("layers.1.feed_forward.w2.weight", 8**-0.5, 1 / 8, 1 / 2, 1 / 4),
        ("norm.weight", 1, 1, 4, 1),
        ("output.weight", 1 / 4, 1 / 4, 1 / 4, 1 / 4),
    ],
)
def test_each_role_has_the_scale_of_the_published_table(name, init, adam, sgd, muon):
    assert scales()[name].init_factor == pytest.approx(init)
    assert lr_factors()[name][0] == pytest.approx(adam)
    assert lr_factors(name="SGD")[name][0] == pytest.approx(sgd)
    assert lr_factors(name="Lion")[name][0] == pytest.approx(adam)
    assert lr_factors(name="Muon")[name][0] == pytest.approx(muon)


def test_initial_weights_have_the_scaled_deviation():
    model = LLAMA3.build(SIZES)
    init_weights(model, LLAMA3, SIZES, 0, scales())
    block, residual = model.layers["0"], INIT_STD / math.sqrt(2 * SIZES.n_layers)
    for weight, std in [
        (model.tok_embeddings.weight, INIT_STD),
        (block.attention.wv.weight, INIT_STD / 2),
        (block.attention.wo.weight, residual / 2),
        (block.feed_forward.w2.weight, residual / 8**0.5),
        (model.output.weight, INIT_STD / 4),
    ]:
        assert weight.std().item() == pytest.approx(std, rel=0.04)


def test_a_step_decays_by_the_learning_rate_times_the_weight_decay_of_the_base_model():
    for name, (lr_factor, weight_decay) in lr_factors(weight_decay=0.3).items():
        expected = 0.0 if name.endswith("norm.weight") else 0.3
        assert lr_factor * weight_decay == pytest.approx(expected), name


def test_the_factor_of_a_group_is_multiplied_by_that_of_mup():
    groups = [
        ParameterGroupConfig(["output.*"], lr_factor=0.5, weight_decay=0.2),
        ParameterGroupConfig(["*.wo.*"], name="SGD"),
    ]
    factors = lr_factors(groups=groups)
    assert factors["output.weight"] == pytest.approx((0.5 / 4, 0.2 * 4))
    assert factors["layers.0.attention.wo.weight"][0] == 1  # the rule of SGD


def test_the_base_model_itself_and_mup_off_change_no_bit():
    own = BaseWidths(SIZES.dim, SIZES.n_heads, SIZES.hidden_dim, SIZES.n_kv_heads)
    assert scales(None) == {}
    for changes in ({}, {"tied_embeddings": True, "qk_norm": True}):
        sizes, weights = replace(SIZES, **changes), []
        for base in (own, None):
            model = LLAMA3.build(sizes)
            init_weights(model, LLAMA3, sizes, 0, scales(base, **changes))
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert torch.equal(*weights)
        assert lr_factors(own, changes) == lr_factors(None, changes)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_absorbed_multipliers_equal_those_in_the_forward_pass(optimizer, qk_norm):
    """Tied embeddings and wider heads, against a model that multiplies in its forward pass."""
    sizes = replace(SIZES, tied_embeddings=True, qk_norm=qk_norm)
    widths = scales(WIDER_HEADS, tied_embeddings=True, qk_norm=qk_norm)
    output_scale, query_scale = 1 / 4, 1 / 2  # D_base / D, root of K_base / K
    model, reference = (LLAMA3.build(sizes).double() for _ in range(2))
    init_weights(model, LLAMA3, sizes, 0, widths)
    reference.load_state_dict(model.state_dict())
    multiply_by(reference.norm, output_scale)
    for block in reference.layers.values():
        attention = block.attention
        multiply_by(attention.q_norm if qk_norm else attention.wq, query_scale)
    gains = [reference.norm, *([attention.q_norm] if qk_norm else [])]
    assert all(torch.all(gain.weight == 1) for gain in gains)  # as without muP

    section = {"name": optimizer, "weight_decay": 0.0}
    section |= {} if optimizer == "SGD" else {"eps": 1e-30}
    ours = build_optimizer(model, OptimizerConfig.of(**section), widths=widths)
    plain = {name: replace(scale, multiplier=1.0) for name, scale in widths.items()}
    theirs = build_optimizer(reference, OptimizerConfig.of(**section), widths=plain)
    tokens = torch.randint(101, (4, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        logits = [m(tokens[:, :-1]) for m in (model, reference)]
        torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-12)
        for optimizers, own in zip((ours, theirs), logits, strict=True):
            F.cross_entropy(own.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizers.set_lr(1e-2 if optimizer == "Adam" else 1.0)
            optimizers.step()
            optimizers.zero_grad()
    moved = (model.norm.weight.mean() / output_scale - 1).abs()
    assert moved > 1e-4  # otherwise the learning rate of the gain would not matter


def multiply_by(module, factor: float) -> None:
    """Divide the weights of a module by a factor, and multiply its output by it."""
    with torch.no_grad():
        module.weight /= factor
    module.register_forward_hook(lambda module, inputs, output: output * factor)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3", "multiply by 1 + weight"), ("olmo_hybrid", "not derived for the linear attention")],
)
def test_norms_that_multiply_by_1_plus_weight_and_linear_attention_are_refused(name, reason):
    """The weights of such norms start at 0: a factor of the initial weights is no multiplier."""
    family = FAMILIES[name]
    (problem,) = check_mup_base(MupConfig(BASE), family, family.flavors["debugmodel"])
    assert reason in problem.message
