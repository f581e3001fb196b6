"""The facts in the spec of every family are true."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

from conftest import ROOT
from tests.checkpoint.test_families import CASES
from tests.distributed.recipes import CHANGES, UNPLANNED
from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.documents import index_documents
from titanlite.kernels.flash import window_mask
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.models.decoder import build_caches
from titanlite.optim import MatrixFacts, OptimizerConfig
from titanlite.optim.recipe import matches_any
from titanlite.parallelize.weight_init import init_weights
from titanlite_planner.memory.model_parts import parts_of_shape
from titanlite_planner.model_shape import count_active_parameters, shape_of


def smallest(family):
    """The first flavor, made for tests."""
    return next(iter(family.flavors.values()))


PUBLISHED = {  # family -> flavor -> billions of parameters on its model card or in its paper
    # https://huggingface.co/Qwen/Qwen3-0.6B and so on: rounded as there
    "qwen3": {"0.6B": 0.6, "1.7B": 1.7, "4B": 4.0, "8B": 8.2, "14B": 14.8, "32B": 32.8},
    # the safetensors of https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf
    "llama2": {"7B": 6.738, "13B": 13.016, "70B": 68.977},
    "mistral": {"7B-v0.1": 7.242, "7B-v0.3": 7.248},  # likewise, of mistralai/Mistral-7B-v0.x
    "gpt2": {"124M": 0.1244, "355M": 0.3548, "774M": 0.774, "1.5B": 1.5576},
    # arXiv 2401.04088, section 2; https://mistral.ai/news/mixtral-8x22b
    "mixtral": {"8x7B": 46.7, "8x22B": 140.6},
    "qwen3_moe": {"30B-A3B": 30.5, "235B-A22B": 235},  # arXiv 2505.09388, table 2 and model cards
    "deepseek_v3": {"moonlight-16B": 16, "V3-671B": 671},  # arXiv 2502.16982; arXiv 2412.19437
    "gpt_oss": {"20B": 20.91, "120B": 116.83},  # arXiv 2508.10925, table 1
    # its page says 80B; 79.67B without the block for multi-token prediction, as transformers counts
    "qwen3_next": {"80B-A3B": 80},
    # their names say so; text only
    "qwen3_5": {"0.8B": 0.8, "2B": 2, "4B": 4, "9B": 9, "27B": 27},
    "qwen3_5_moe": {"35B-A3B": 35, "122B-A10B": 122},
    "olmo2": {"1B": 1.48, "7B": 7.3, "13B": 13.7, "32B": 32.2},
    "olmo3": {"7B": 7.3, "32B": 32.2},  # arXiv 2512.13961
    # the safetensors of https://huggingface.co/Qwen/Qwen2.5-0.5B and so on
    "qwen2": {"0.5B": 0.494, "1.5B": 1.54, "3B": 3.09, "7B": 7.62, "14B": 14.8, "72B": 72.7},
    "smollm3": {"3B": 3.08},  # the safetensors of HuggingFaceTB/SmolLM3-3B-Base
    "gemma3": {"270M": 0.268, "1B": 1.0},  # the safetensors of google/gemma-3-270m and -1b-pt
}


COMPARED = {case.split()[0] for case in CASES}  # with transformers
PREDICTING = [f for f in FAMILIES.values() if "mtp_layers" in smallest(f).__dataclass_fields__]


def with_all_parts(family):
    """The first flavor, with multi-token prediction if the family has it."""
    sizes = smallest(family)
    return replace(sizes, mtp_layers=1) if family in PREDICTING else sizes


@pytest.mark.parametrize("name", FAMILIES)
def test_count_parameters_matches_the_module_and_the_published_sizes(name):
    family = FAMILIES[name]
    for flavor, sizes in family.flavors.items():
        if sizes.dim <= 2048:  # with at most eight blocks: each kind is among them
            shallow = replace(sizes, n_layers=min(sizes.n_layers, 8))
            with torch.device("meta"):
                parameters = family.build(shallow).parameters()
            assert family.count_parameters(shallow) == sum(p.numel() for p in parameters)
        if published := PUBLISHED.get(name, {}).get(flavor):
            billions = family.count_parameters(sizes) / 1e9
            digits = len(str(published).partition(".")[2])
            assert round(billions, digits) == published, (flavor, billions)


def test_no_family_is_forgotten():
    """Each is compared with transformers and with one process, and is on the pages."""
    models, readme = (
        (ROOT / page).read_text("utf-8") for page in ("docs/reference/models.md", "README.md")
    )
    listed = re.sub(r"[^a-z0-9]", "", readme.lower())
    lacks: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        has = {
            "a case of test_families.py, or of test_huggingface.py": name in {*COMPARED, "llama3"},
            # all others train Llama 3, whose module Llama 2 is
            "a row of the oracle": name in CHANGES or type(smallest(family)) is Llama3Sizes,
            "a debug flavor": {"debugmodel", "tiny"} & family.flavors.keys(),
            "a row of docs/reference/models.md": f"\n| `{name}` |" in models,
            "a name in README.md": name.removesuffix("_moe").replace("_", "") in listed,
        }
        if missing := [what for what, found in has.items() if not found]:
            lacks[name] = missing
    assert not lacks


@pytest.mark.parametrize("family", PREDICTING, ids=lambda f: f.name)
def test_multi_token_prediction_counts_as_a_block_with_a_projection_and_an_output(family):
    *_, sizes = family.flavors.values()
    assert not any(flavor.mtp_layers for flavor in family.flavors.values())
    further, deeper = replace(sizes, mtp_layers=1), replace(sizes, n_layers=sizes.n_layers + 1)
    if family.name in UNPLANNED:  # whose last block is not of the same kind
        sizes, deeper = (replace(s, full_attention_every=1) for s in (sizes, deeper))
        further = replace(further, full_attention_every=1)
    joined = 2 * sizes.dim**2
    vectors = 3 * sizes.dim  # norms of both inputs and of the output
    count, flops = family.count_parameters, partial(family.flops_per_token, seq_len=4096)
    assert count(further) == count(deeper) + joined + vectors
    assert flops(further) == pytest.approx(
        flops(deeper) + 6 * (joined + sizes.vocab_size * sizes.dim)
    )
    costs = sum(family.module_flops(further, 4096).values())
    assert costs == pytest.approx(flops(further), rel=1e-2)


@pytest.mark.parametrize(
    "name, flavor, billions",  # that a token is multiplied with, from the same sources
    [
        ("mixtral", "8x7B", 12.9),
        ("mixtral", "8x22B", 39.2),
        ("qwen3_moe", "30B-A3B", 3.3),
        ("qwen3_moe", "235B-A22B", 22),
        ("deepseek_v3", "V3-671B", 37),
    ],
)
def test_active_parameters_are_the_published_ones(name, flavor, billions):
    family = FAMILIES[name]
    active = count_active_parameters(shape_of(family, family.flavors[flavor])) / 1e9
    assert active == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_module_with_parameters_has_a_role_and_a_hugging_face_name(name):
    family = FAMILIES[name]
    with torch.device("meta"):
        model = family.build(with_all_parts(family))
    names = [name for name, _ in model.named_parameters()]
    # experts are sharded by their own rules
    for leaf in {name.rpartition(".")[0] for name in names if ".moe." not in name}:
        assert any(fnmatchcase(leaf, pattern) for pattern in family.tp_plan), leaf
    assert all(map(family.hugging_face.name_of, names))
    costs = family.module_flops(model.sizes, 16)  # in execution order, as a pipeline splits them
    modules = [child for child, _ in model.named_children() if child != "layers"]
    assert [part for part in costs if not part.startswith("layers.")] == modules


@pytest.mark.parametrize("name", FAMILIES)
def test_weight_decay_is_that_of_matrices(name):
    with torch.device("meta"):
        model = FAMILIES[name].build(smallest(FAMILIES[name]))
    section = OptimizerConfig.of(name="AdamW")
    for parameter, weight in model.named_parameters():
        is_vector = weight.dim() == 1 or weight.shape[-1] == 1  # a stack of biases is [E, N, 1]
        assert matches_any(parameter, section.no_decay) == is_vector, parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_with_a_cache_gives_the_same_logits(name):
    family, torch_state = FAMILIES[name], torch.manual_seed(0)
    changes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 88, "vocab_size": 61}
    changes |= {"window": 5, "full_attention_every": 2, "no_rope_every": 2}
    changes |= {"n_kv_heads": 2}
    changes |= {"mtp_layers": 1}  # which generation does not compute
    known = {field.name for field in fields(smallest(family))}
    changes = {name: value for name, value in changes.items() if name in known}
    model = family.build(replace(smallest(family), **changes)).eval()
    init_weights(model, family, model.sizes, 0)
    tokens = torch.randint(0, 61, (1, 16), generator=torch_state)
    caches = build_caches(model.layers, 16)
    with torch.no_grad():
        expected = model(tokens)
        parts = [model(tokens[:, :7], torch.arange(7), caches)]
        for index in range(7, 16):
            parts.append(model(tokens[:, index : index + 1], torch.tensor([index]), caches))
    assert torch.allclose(torch.cat(parts, dim=1), expected, atol=1e-5)


@pytest.mark.parametrize("window", [1, 4, 30])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_a_window_hides_what_is_further_away(window, documents):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 24, heads, 8).transpose(1, 2) for heads in (4, 2, 2))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    positions = torch.arange(24) % 9 if documents else torch.arange(24)
    starts = torch.arange(24) - positions
    mask = window_mask(q, k, 0, window) & (starts.unsqueeze(1) == starts)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = probabilities @ v.repeat_interleave(2, 1)
    assert int(mask.sum(1).max()) == min(window, 9 if documents else 24)
    index = index_documents(positions.expand(2, -1)) if documents else None
    out, grad = CausalAttention(window=window)(q, k, v, index), torch.randn_like(q)
    assert torch.allclose(out, expected, atol=1e-5)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_the_planner_knows_every_parameter(family):
    for flavor, sizes in family.flavors.items():
        if family.name in UNPLANNED:
            with pytest.raises(ConfigError, match="linear attention"):
                shape_of(family, sizes)
            continue
        shape = shape_of(family, sizes)
        parts = parts_of_shape(shape)
        with_experts = sum(shape.has_experts(block) for block in range(shape.n_layers))
        dense = shape.n_layers - with_experts
        counts = [(parts.embedding, 1), (parts.norm, 1), (parts.output, 1)]
        counts += [(parts.block, shape.n_layers if not shape.experts else with_experts)]
        counts += [(parts.dense_block, dense if shape.experts else 0)]
        elements = sum(n * sum(p.elements for p in part) for part, n in counts)
        assert elements == family.count_parameters(sizes), flavor


def test_muon_does_not_orthogonalize_the_weights_of_a_convolution():
    """Each row multiplies one channel: it is no matrix between hidden states."""
    family = FAMILIES["qwen3_next"]
    facts = MatrixFacts(family, family.flavors["debugmodel"])
    assert not facts.is_hidden("layers.0.attention.convolve.q", (128, 4))
    assert facts.is_hidden("layers.0.attention.wqkvz.weight", (768, 256))
