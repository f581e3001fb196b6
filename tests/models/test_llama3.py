"""The model is Llama 3, and the facts in its spec are true."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titanlite.kernels.attention import KeyValueCache
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.models.mtp import PREDICTION_PLAN
from titanlite.models.rope import Llama3Scaling, apply_rope, rope_cos_sin, rope_frequencies

FAMILY = FAMILIES["llama3"]
SMALL = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)


def build_model(sizes=SMALL):
    torch.manual_seed(0)
    return FAMILY.build(sizes)


@pytest.mark.parametrize(
    "sizes", [SMALL, replace(SMALL, qk_norm=True, tied_embeddings=True, head_dim=16)]
)
def test_count_parameters_matches_the_module(sizes):
    assert FAMILY.count_parameters(sizes) == sum(p.numel() for p in build_model(sizes).parameters())


@pytest.mark.parametrize(
    "flavor, billions",
    [("1B", 1.236), ("3B", 3.213), ("8B", 8.030), ("70B", 70.554), ("405B", 405.9)],
)
def test_flavors_have_the_published_parameter_counts(flavor, billions):
    assert FAMILY.count_parameters(FAMILY.flavors[flavor]) / 1e9 == pytest.approx(
        billions, rel=1e-3
    )


def test_flops_per_token_matches_torchs_flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    sizes, length = SMALL, 16
    model, tokens = build_model(sizes), torch.randint(0, 61, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    matmuls = FAMILY.flops_per_token(sizes, 0) * length
    # the embeddings have no matmul, so all FLOPs are 6 per matmul weight
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]  # torch 2.15 counts attention
    assert counted == pytest.approx(matmuls, rel=1e-6)
    attention = FAMILY.flops_per_token(sizes, length, full_attention=True) * length - matmuls
    assert attention == 12 * sizes.n_layers * sizes.dim * length * length
    assert FAMILY.flops_per_token(sizes, length) * length - matmuls == attention / 2


def test_no_token_attends_to_a_later_one():
    model, tokens = build_model(), torch.randint(0, 61, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 61
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :7], after[0, :7], atol=1e-6)
    assert not torch.allclose(before[0, 7:], after[0, 7:], atol=1e-3)


def test_grouped_heads_equal_repeated_key_value_heads():
    grouped, repeated = build_model(), build_model(replace(SMALL, n_kv_heads=4))
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("wk.weight", "wv.weight")):
            heads = state[name].unflatten(0, (2, -1))
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    tokens = torch.randint(0, 61, (2, 9))
    assert torch.allclose(grouped(tokens), repeated(tokens), atol=1e-6)


def test_attention_scores_depend_on_the_distance_only():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(first, second):
        ropes = [rope_cos_sin(torch.tensor([p]), 16, 1e4) for p in (first, second)]
        return (apply_rope(q, ropes[0]) * apply_rope(k, ropes[1])).sum()

    assert torch.allclose(score(5, 3), score(105, 103), atol=1e-4)
    assert not torch.allclose(score(5, 3), score(5, 4), atol=1e-4)


def test_llama_3_1_scaling_divides_only_low_frequencies():
    plain = rope_frequencies(torch.device("cpu"), 128, 500_000.0, None)
    scaled = rope_frequencies(torch.device("cpu"), 128, 500_000.0, Llama3Scaling(factor=8.0))
    wavelength = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    assert torch.allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any() and torch.all(scaled[between] <= plain[between])


def test_generation_with_a_cache_gives_the_same_logits():
    model, tokens = build_model(replace(SMALL, qk_norm=True)).eval(), torch.randint(0, 61, (1, 10))
    caches = {name: KeyValueCache(10) for name in model.layers}
    with torch.no_grad():
        expected = model(tokens)
        parts = [model(tokens[:, :4], torch.arange(4), caches)]
        for index in range(4, 10):
            parts.append(model(tokens[:, index : index + 1], torch.tensor([index]), caches))
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5)


def test_every_module_with_parameters_has_a_tensor_parallel_role():
    from fnmatch import fnmatchcase

    model = build_model(replace(SMALL, qk_norm=True))
    for pattern in FAMILY.tp_plan.keys() - PREDICTION_PLAN.keys():  # of multi-token prediction
        assert any(fnmatchcase(name, pattern) for name, _ in model.named_modules()), pattern
    leaves = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    for leaf in leaves:
        assert any(fnmatchcase(leaf, pattern) for pattern in FAMILY.tp_plan), leaf
