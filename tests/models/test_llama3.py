"""The model is Llama 3, and its facts are true of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from titanlite.kernels.attention import KeyValueCache
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.models.rope import RopeScaling, apply_rope, rope_cos_sin, rope_frequencies

FAMILY = FAMILIES["llama3"]
SMALL = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)


def built(shape=SMALL):
    torch.manual_seed(0)
    return FAMILY.build(shape)


@pytest.mark.parametrize(
    "shape", [SMALL, replace(SMALL, qk_norm=True, tied_embeddings=True, head_dim=16)]
)
def test_the_counted_parameters_are_those_it_has(shape):
    assert FAMILY.count_parameters(shape) == sum(p.numel() for p in built(shape).parameters())


@pytest.mark.parametrize(
    "flavor, billions",
    [("1B", 1.236), ("3B", 3.213), ("8B", 8.030), ("70B", 70.554), ("405B", 405.9)],
)
def test_the_flavors_have_the_published_sizes(flavor, billions):
    assert FAMILY.count_parameters(FAMILY.flavors[flavor]) / 1e9 == pytest.approx(
        billions, rel=1e-3
    )


def test_the_counted_flops_are_those_of_its_matrix_products():
    from torch.utils.flop_counter import FlopCounterMode

    shape, length = SMALL, 16
    model, tokens = built(shape), torch.randint(0, 61, (1, length))
    with FlopCounterMode(display=False) as counter:  # does not count the CPU's attention kernel
        model(tokens).sum().backward()
    products = FAMILY.flops_per_token(shape, 0) * length
    # the first layer's input needs no gradient, so nothing else is missing from 6 a weight
    assert counter.get_total_flops() == pytest.approx(products, rel=1e-6)
    attention = FAMILY.flops_per_token(shape, length, full_attention=True) * length - products
    assert attention == 12 * shape.n_layers * shape.dim * length * length
    assert FAMILY.flops_per_token(shape, length) * length - products == attention / 2


def test_no_token_sees_a_later_one():
    model, tokens = built(), torch.randint(0, 61, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 61
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :7], after[0, :7], atol=1e-6)
    assert not torch.allclose(before[0, 7:], after[0, 7:], atol=1e-3)


def test_grouped_heads_attend_as_if_they_were_copied():
    shape = replace(SMALL, n_kv_heads=4)
    grouped, whole = built(), built(shape)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("wk.weight", "wv.weight")):
            heads = state[name].unflatten(0, (2, -1))
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    tokens = torch.randint(0, 61, (2, 9))
    assert torch.allclose(grouped(tokens), whole(tokens), atol=1e-6)


def test_rotary_attention_depends_on_distance_alone():
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(first, second):
        ropes = [rope_cos_sin(torch.tensor([p]), 16, 1e4) for p in (first, second)]
        return (apply_rope(q, ropes[0]) * apply_rope(k, ropes[1])).sum()

    assert torch.allclose(score(5, 3), score(105, 103), atol=1e-4)
    assert not torch.allclose(score(5, 3), score(5, 4), atol=1e-4)


def test_llama_3_1_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    plain = rope_frequencies(128, 500_000.0, None)
    scaled = rope_frequencies(128, 500_000.0, RopeScaling(factor=8.0))
    wavelength = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    assert torch.allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.any() and torch.all(scaled[between] <= plain[between])


def test_generation_with_a_cache_gives_the_logits_of_the_whole_sequence():
    model, tokens = built(replace(SMALL, qk_norm=True)).eval(), torch.randint(0, 61, (1, 10))
    caches = {name: KeyValueCache(10) for name in model.layers}
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(tokens[:, :4], torch.arange(4), caches)]
        for at in range(4, 10):
            parts.append(model(tokens[:, at : at + 1], torch.tensor([at]), caches))
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)


def test_every_parameter_has_a_word_for_its_start_and_every_module_one_for_its_split():
    from fnmatch import fnmatchcase

    model = built(replace(SMALL, qk_norm=True))
    for pattern in FAMILY.tp_plan:
        assert any(fnmatchcase(name, pattern) for name, _ in model.named_modules()), pattern
    leaves = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    for leaf in leaves:
        assert any(fnmatchcase(leaf, pattern) for pattern in FAMILY.tp_plan), leaf
