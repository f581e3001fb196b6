"""Every dense family is the model of that name in transformers, in both directions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from tests.checkpoint.test_huggingface import load_into_layout
from tests.distributed.oracle import ADAMW, Layout
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import recipe_of
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.checkpoint.huggingface_export import ModelToExport, write_hugging_face
from titanlite.checkpoint.saved_model import (
    check_model_size,
    describe_saved_model,
    parameter_shapes,
)
from titanlite.errors import CheckpointError
from titanlite.kernels.backend import set_attention_kernel
from titanlite.models import FAMILIES
from titanlite.storage import StorageFolder
from titanlite_lab.checkpoints import from_hugging_face
from titanlite_lab.generate import Sampling, generate

ROTARY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 88,
    "vocab_size": 61,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    **ROTARY,
    **EXPERTS,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MOE = {
    **ROTARY,
    **EXPERTS,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "rope_theta": 1e6,
}
OSS = {
    **ROTARY,
    "num_hidden_layers": 3,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "intermediate_size": 20,
    "head_dim": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
DEEP = {"num_hidden_layers": 7}  # so that every kind of block is there
OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}


def two_bases(theta: float) -> dict:
    table = {"rope_type": "default", "rope_theta": theta}
    return {"full_attention": table, "sliding_attention": table}


LINEAR = {
    **ROTARY,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
NO_IDS = {"pad_token_id": None, "eos_token_id": None}
HYBRID = {
    **LINEAR,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 20,
}
# family, and what is special -> (class in transformers, its config)
CASES = {
    "qwen3 tied": ("Qwen3", {**ROTARY, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**ROTARY, "head_dim": 16, "rope_theta": 1e6}),
    "llama2": ("Llama", {**ROTARY, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "mistral": ("Mistral", {**ROTARY, "sliding_window": None}),
    "mistral window": ("Mistral", {**ROTARY, "sliding_window": 9}),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64},
    ),
    "olmo2": ("Olmo2", ROTARY),
    "olmo3": ("Olmo3", {**ROTARY, **DEEP, "sliding_window": 9, "rope_parameters": two_bases(7e4)}),
    "olmo3 with YaRN": (
        "Olmo3",
        {**ROTARY, "num_hidden_layers": 4, "sliding_window": 9, "rope_scaling": OLMO3_YARN},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {**LINEAR, **NO_IDS, "rope_parameters": {"rope_theta": None}},
    ),
    "olmo_hybrid with RoPE": (
        "OlmoHybrid",
        {**LINEAR, **NO_IDS, "rope_theta": 7e4, "linear_allow_neg_eigval": False},
    ),
    "qwen2": ("Qwen2", {**ROTARY, "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    "smollm3": ("SmolLM3", {**ROTARY, **DEEP, "rms_norm_eps": 1e-5, "pad_token_id": None}),
    "smollm3 no RoPE": ("SmolLM3", {**ROTARY, "no_rope_layers": [0, 0], "pad_token_id": None}),
    "gemma3": (
        "Gemma3",
        {**ROTARY, **DEEP, "head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 9},
    ),
    "gemma3 long": (
        "Gemma3",
        {
            **ROTARY,
            "head_dim": 8,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 7e4,
            "rope_local_base_freq": 3e3,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**MOE, "attention_bias": True, "n_group": 3, "topk_group": 2, "head_dim": 12},
    ),
    "glm4_moe as 355B": (
        "Glm4Moe",
        {**MOE, "use_qk_norm": True, "first_k_dense_replace": 0, "head_dim": 8},
    ),
    "mixtral": ("Mixtral", {**ROTARY, "num_local_experts": 4}),
    "gpt_oss": ("GptOss", {**OSS, "sliding_window": 9}),
    "gpt_oss in full": (
        "GptOss",
        {
            **OSS,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**ROTARY, **EXPERTS, "num_experts": 5, "norm_topk_prob": True, "head_dim": 12},
    ),
    "qwen3_next": ("Qwen3Next", {**HYBRID, **EXPERTS, "num_experts": 5}),
    "qwen3_next without experts": (
        "Qwen3Next",
        {**HYBRID, **EXPERTS, "num_experts": 0, "tie_word_embeddings": True},
    ),
    "qwen3_5": ("Qwen3_5", {**HYBRID, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**HYBRID, **EXPERTS, "num_experts": 5}),
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 20, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    ),
    "deepseek_v3 as Moonlight": (
        "DeepseekV3",
        {
            **LATENT,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 0.01,  # not that of the latent norms
        },
    ),
    "deepseek_v3 with YaRN": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 40.0,
                "beta_fast": 1,  # as Kimi K2; 32 in DeepSeek-V3
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "gpt_oss")
TOKENS = torch.arange(2 * 40).view(2, 40) * 37 % 61


def family_of(case: str):
    return FAMILIES[case.split()[0]]


def export(folder, family, model, **options) -> StorageFolder:
    target, state = StorageFolder(folder), model.state_dict()
    exported = ModelToExport(
        family, model.sizes, lambda names: {name: state[name] for name in names}, 40, None
    )
    write_hugging_face(target, exported, **options)
    return target


def load(folder):
    """The plain module of a Hugging Face folder."""
    source = open_hugging_face(StorageFolder(folder))
    model = source.spec.build(source.sizes).eval()
    model.load_state_dict({name: source.read(name) for name in source.tensors})
    return model, source


def transformers_model(case: str):
    """A model of transformers whose logits depend on all parameters."""
    transformers = pytest.importorskip("transformers")
    name, options = CASES[case]
    model_class = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    has_text = name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
    config_name = f"{name}TextConfig" if has_text else f"{name}Config"
    config = getattr(transformers, config_name)(**copy.deepcopy(options))
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, parameter.dim() == 1, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            torch.nn.init.normal_(buffer, 0, 0.2)
    return model


def save(model, folder, **options) -> None:
    """Write a model of transformers as such models are published."""
    model.save_pretrained(folder, **options)
    if type(model).__name__ == "OlmoHybridForCausalLM":
        from safetensors.torch import save_file

        tensors = dict(model.state_dict())
        # transformers 5.23 divides the convolution of queries, keys and values into equal parts
        for name in [name for name in tensors if "conv1d" in name]:
            for part, weight in zip("qkv", tensors.pop(name).split([10, 10, 42]), strict=True):
                tensors[name.replace("conv1d", f"{part}_conv1d")] = weight.contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("case", "max_shard_size"), [*((case, "5GB") for case in CASES), ("gpt2", "15KB")]
)
def test_a_model_goes_from_transformers_and_back_with_equal_logits(tmp_path, case, max_shard_size):
    transformers = pytest.importorskip("transformers")
    expected = transformers_model(case)
    save(expected, tmp_path / "in", max_shard_size=max_shard_size)
    model, source = load(tmp_path / "in")
    assert source.spec.hugging_face is family_of(case).hugging_face
    with torch.no_grad():
        logits, wanted = model(TOKENS), expected(TOKENS).logits
    # With linear attention in fp32, for four batches of three families, transformers' logits are up
    # to 6e-5 of the largest away from fp64, ours 4e-5.
    digits = 1e-4 if "linear_num_key_heads" in CASES[case][1] else 1e-5
    tolerance = digits * max(1.0, float(wanted.abs().max()))
    assert torch.allclose(logits, wanted, rtol=0, atol=tolerance)
    limit = 5_000_000_000 if max_shard_size == "5GB" else 15_000
    export(tmp_path / "out", family_of(case), model, max_shard_bytes=limit)
    assert open_hugging_face(StorageFolder(tmp_path / "out")).sizes == model.sizes
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(back) is type(expected)
    with torch.no_grad():
        assert torch.allclose(back(TOKENS).logits, wanted, rtol=0, atol=tolerance)
    converted = StorageFolder(tmp_path / "step-0")
    manifest = from_hugging_face(StorageFolder(tmp_path / "in"), converted)
    assert describe_saved_model(converted, manifest) == (source.spec, model.sizes)
    prompt = TOKENS[:1, :5]
    mask = torch.ones_like(prompt)
    text = back.generate(
        prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    ours = list(generate(model, prompt[0].tolist(), 20, Sampling(temperature=0)))
    assert text[0, 5:].tolist() == ours  # the window of 9 moves past the prompt


def test_every_gradient_of_packed_documents_is_that_of_transformers(tmp_path):
    """Of a family whose linear attention has no counterpart in the other families."""
    expected, lengths = transformers_model("qwen3_next"), [1, 7, 24, 8]
    expected.save_pretrained(tmp_path / "weights")
    model, source = load(tmp_path / "weights")
    set_attention_kernel(model, source.spec.attention_pattern, "flash", documents=True)
    positions = torch.cat([torch.arange(length) for length in lengths])
    weights = torch.randn(2, 40, 61)
    (model(TOKENS, positions) * weights).sum().backward()
    documents = zip(TOKENS.split(lengths, 1), weights.split(lengths, 1), strict=True)
    sum((expected(tokens).logits * part).sum() for tokens, part in documents).backward()
    for parameter in expected.parameters():
        parameter.data = parameter.grad
    expected.save_pretrained(tmp_path / "gradients")  # as tensors of its format
    gradients = open_hugging_face(StorageFolder(tmp_path / "gradients"))
    for name, parameter in model.named_parameters():
        wanted = gradients.read(name)
        # The first token of a document reads little, and its norm divides by that: for six batches
        # in fp32, transformers' gradients were up to 6e-4 away from fp64, ours 4e-4. A reference in
        # fp64 must not cast to fp32, as transformers' rule does.
        assert (parameter.grad - wanted).norm() < 3e-3 * wanted.norm(), name


@pytest.mark.parametrize("case", ["gpt2", "olmo2", "qwen3_5_moe"])
def test_parts_of_a_tensor_are_read_as_a_rank_reads_its_shards(tmp_path, case):
    family = family_of(case)
    transformers_model(case).save_pretrained(tmp_path)
    model, source = load(tmp_path)
    for name, shape in parameter_shapes(family, model.sizes).items():
        half = [-(-shape[0] // 2), *shape[1:]]
        assert torch.equal(source.read(name, [0] * len(shape), half), source.read(name)[: half[0]])
        offsets = [half[0], *[1] * (len(shape) - 1)]
        lengths = [n - o for n, o in zip(shape, offsets, strict=True)]
        index = tuple(slice(o, None) for o in offsets)
        part = source.read(name, offsets, lengths)
        assert torch.equal(part, source.read(name)[index]) and part.is_contiguous()


@pytest.mark.parametrize("layout", [Layout(shard=2, tensor=2)], ids=str)
def test_ranks_read_their_shards_of_joined_and_transposed_tensors(tmp_path, layout):
    """And the norm of a projection, whose weight is sharded."""
    for name in ("gpt2", "olmo2", "gpt_oss"):
        transformers_model(name).save_pretrained(tmp_path / name)
        _, source = load(tmp_path / name)
        recipe = replace(ADAMW, batch=12, seq_len=24, sizes=source.sizes)
        run_on_ranks(load_into_layout, 4, layout, recipe, [str(tmp_path / name)])


PREDICTION_NAMES = {  # family -> what the names of the published tensors begin with, and some
    "deepseek_v3": ("model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "glm4_moe": ("model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "qwen3_next": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
    "qwen3_5": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}


@pytest.mark.parametrize("case", PREDICTION_NAMES)
def test_multi_token_prediction_is_exported_and_read_again_bit_by_bit(tmp_path, case, caplog):
    from safetensors.torch import load_file, save_file

    family, (prefix, own) = family_of(case), PREDICTION_NAMES[case]
    sizes = replace(recipe_of(case).sizes, vocab_size=61, mtp_layers=1)
    model = family.build(sizes)
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    export(tmp_path, family, model)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    inner = prefix if prefix != "mtp." else "mtp.layers.0."
    names = {name for name in stored if name.startswith(prefix)}
    gate = "mlp.gate_proj" if case == "qwen3_5" else "mlp.gate"  # no experts
    assert names >= {
        f"{inner}{name}.weight" for name in ("input_layernorm", "self_attn.o_proj", gate)
    }
    block = model.layers["2"]
    for name, module in zip(
        own, (block.embedding_norm, block.hidden_norm, block.proj, block.norm), strict=True
    ):
        assert torch.equal(stored[f"{prefix}{name}.weight"], module.weight), name
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for name, original in copies.items() if prefix != "mtp." else ():
        assert torch.equal(stored[f"{prefix}{name}.weight"], stored[f"{original}.weight"])
    source = open_hugging_face(StorageFolder(tmp_path), mtp_layers=1)
    assert source.sizes == sizes
    for name, tensor in model.state_dict().items():
        assert torch.equal(source.read(name), tensor), name
    with caplog.at_level("INFO"):
        without, source = load(tmp_path)
    assert f"{len(names)} tensors of multi-token prediction are left out" in caplog.text
    assert without.sizes.mtp_layers == 0 and torch.equal(without(TOKENS), model(TOKENS))
    if prefix != "mtp.":  # trained apart
        save_file({**stored, f"{prefix}embed_tokens.weight": torch.ones(61, 32)}, file)
        with pytest.raises(CheckpointError, match=r"differs from .*, but multi-token .* shares"):
            open_hugging_face(StorageFolder(tmp_path), mtp_layers=1)
    save_file({name: tensor for name, tensor in stored.items() if name not in names}, file)
    with pytest.raises(CheckpointError, match="has 0 blocks for multi-token prediction"):
        open_hugging_face(StorageFolder(tmp_path), mtp_layers=1)


@pytest.mark.parametrize("case", ["gpt2"])
def test_a_folder_without_the_prefix_is_read(tmp_path, case):
    """As openai-community/gpt2 is published, with the causal masks as tensors."""
    from safetensors.torch import load_file, save_file

    expected = transformers_model(case)
    expected.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    save_file(bare, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = load(tmp_path)
    with torch.no_grad():
        assert torch.allclose(model(TOKENS), expected(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["qwen3_5_moe"])
def test_the_text_model_of_a_multimodal_folder_is_read(tmp_path, case):
    """As Qwen/Qwen3.5-35B-A3B is published: another prefix, stacked experts, and other parts."""
    from safetensors.torch import save_file

    expected = transformers_model(case)
    expected.save_pretrained(tmp_path / "text")
    _, source = load(tmp_path / "text")
    tensors = {  # of the module, whose experts are stacked
        name.replace("model.", "model.language_model."): tensor.clone()
        for name, tensor in expected.state_dict().items()
    }
    assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 48, 32)
    others = {"model.visual.pos_embed.weight": torch.ones(4, 4), "mtp.fc.weight": torch.ones(4, 8)}
    others["mtp.pre_fc_norm_embedding.weight"] = torch.ones(4)
    save_file(tensors | others, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    text["tie_word_embeddings"] = True  # the key beside it counts
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 1]}
    config = {"tie_word_embeddings": False, "text_config": text, "vision_config": {"depth": 2}}
    config |= {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = open_hugging_face(StorageFolder(tmp_path))
    assert whole.sizes == source.sizes
    for name, shape in parameter_shapes(source.spec, source.sizes).items():
        assert torch.equal(whole.read(name), source.read(name)), name
        offsets, lengths = [1, *[0] * (len(shape) - 1)], [shape[0] - 1, *shape[1:]]
        assert torch.equal(whole.read(name, offsets, lengths), source.read(name)[1:]), name
    double = {"model.norm.weight": torch.ones(32)}
    save_file(tensors | others | double, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="not part of the model: model.language_model.norm"):
        open_hugging_face(StorageFolder(tmp_path))


@pytest.mark.parametrize("name", FAMILIES)
def test_flavors_are_written_to_config_json_and_back(name):
    family = FAMILIES[name]
    for flavor, sizes in family.flavors.items():
        config = json.loads(json.dumps(family.hugging_face.to_config(sizes, 4096)))
        assert family.hugging_face.from_config(config) == sizes, flavor


def written_config(family: str, **changes) -> dict:
    """The config.json of a small model, with some of its keys changed."""
    spec = FAMILIES[family]
    return spec.hugging_face.to_config(next(iter(spec.flavors.values())), 64) | changes


YARN = written_config("gpt_oss")["rope_scaling"]
REFUSED = {  # family -> changes of config.json, each with what the error names
    "qwen3": [
        ({"use_sliding_window": True}, "use_sliding_window = true (only false is supported)"),
        ({"layer_types": ["sliding_attention"]}, 'layer_types = ["sliding_attention"]'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type = "yarn"'),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"is_causal": None}, "is_causal = false (only true is supported)"),
        ({"hidden_size": None}, "hidden_size = null"),
    ],
    "mistral": [
        ({"sliding_window": -1}, "sliding_window = -1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true"),
    ],
    "gpt2": [
        ({"activation_function": "relu"}, 'activation_function = "relu"'),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({"n_positions": "many"}, 'n_positions = "many"'),
    ],
    "olmo2": [({"clip_qkv": 8}, "clip_qkv = 8")],
    "olmo3": [
        (
            {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            'only "sliding_attention" for each block and "full_attention" for every n-th is',
        ),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types ="),
        ({"layer_types": 4}, "layer_types = [4]"),
        ({"sliding_window": None}, "sliding_window = null"),
        ({"head_dim": 16}, "head_dim = 16"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"rope_scaling": {**OLMO3_YARN, "attention_factor": 1.0}}, "attention_factor"),
        ({"rope_scaling": {**OLMO3_YARN, "beta_fast": 16}}, "beta_fast = 16"),
        ({"rope_scaling": {**OLMO3_YARN, "truncate": False}}, "truncate"),
        ({"rope_scaling": None, "rope_parameters": OLMO3_YARN}, "rope_parameters"),
        ({"sliding_window": 0}, "sliding_window = 0"),
    ],
    "qwen2": [
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"head_dim": 16}, "head_dim = 16"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type = "yarn"'),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0, 1, 1]}, "no_rope_layers = [1, 0, 1, 1]"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers = [1, 1]"),
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"mlp_bias": True}, "mlp_bias = true"),
    ],
    "gemma3": [
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "layer_types"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({"hidden_activation": "gelu"}, 'hidden_activation = "gelu"'),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"sliding_window": None}, "sliding_window = null"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, 'rope_type = "yarn"'),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, 'type = "linear"'),
        (
            {
                "rope_local_base_freq": None,
                "rope_parameters": {
                    **two_bases(7e4),
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                },
            },
            "sliding_attention",
        ),
    ],
    "glm4_moe": [
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor = 1.0"),
        ({"partial_rotary_factor": None}, "partial_rotary_factor = 1.0"),
        ({"norm_topk_prob": False}, "norm_topk_prob = false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
    ],
    "gpt_oss": [
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"attention_bias": False}, "attention_bias = false (only true is supported)"),
        ({"attention_bias": None}, "attention_bias = false"),
        ({"swiglu_limit": 6.0}, "swiglu_limit = 6.0 (only 7.0 is supported)"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ({"sliding_window": None}, "sliding_window = null"),
        ({"sliding_window": 0}, "sliding_window = 0"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"layer_types": ["sliding_attention", "chunked_attention"] * 2}, "layer_types"),
        ({"rope_scaling": None}, "factor = null"),
        ({"rope_scaling": {**YARN, "truncate": True}}, "truncate = true"),
        ({"rope_scaling": {**YARN, "truncate": None}}, "truncate = null"),
        ({"rope_scaling": {**YARN, "beta_fast": 16}}, "beta_fast = 16"),
        ({"rope_scaling": {**YARN, "beta_slow": 2}}, "beta_slow = 2"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 8192}}, "8192"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor = 1.0"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale = 1.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 'rope_type = "llama3"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config ="),
        ({"num_local_experts": None}, "num_local_experts = null"),
        ({"rope_scaling": {**YARN, "rope_theta": 1e4}}, "rope_theta = 150000.0 and"),
        (
            {
                "rope_scaling": None,
                "rope_parameters": {**two_bases(1e4), "full_attention": YARN},
            },
            "rope_local_base_freq",
        ),
    ],
    "qwen3_next": [
        ({"mlp_only_layers": [0]}, "mlp_only_layers = [0] (only [] is supported)"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"layer_types": ["full_attention", *["linear_attention"] * 3]}, "layer_types = ["),
    ],
    "olmo_hybrid": [
        ({"attention_bias": True}, "attention_bias = true (only false is supported)"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, 'rope_type = "yarn"'),
        ({"linear_num_value_heads": None}, "linear_num_value_heads = null"),
    ],
    "qwen3_5": [
        ({"attn_output_gate": False}, "attn_output_gate = false (only true is supported)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type = "yarn"'),
    ],
    "qwen3_5_moe": [({"num_experts_per_tok": 1}, "num_experts_per_tok = 1")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_does_not_implement_is_refused_with_the_key(name):
    family = FAMILIES[name]
    config = family.hugging_face.to_config(family.flavors["debugmodel"], 4096)
    family.hugging_face.from_config(config)
    for changes, text in REFUSED[name]:
        with pytest.raises(CheckpointError) as raised:
            family.hugging_face.from_config({**config, **changes})
        assert text in raised.value.message, raised.value.message
        assert f"{name} does not support" in raised.value.message


def test_a_missing_window_is_that_of_transformers_and_null_is_none():
    mapping = FAMILIES["mistral"].hugging_face
    sizes = FAMILIES["mistral"].flavors["7B-v0.3"]
    config = mapping.to_config(sizes, 0)
    assert config["sliding_window"] is None and mapping.from_config(config) == sizes
    del config["sliding_window"]
    assert mapping.from_config(config) == replace(sizes, window=4096)


def test_sizes_that_do_not_fit_together_are_refused(tmp_path):
    family = FAMILIES["deepseek_v3"]
    wrong = {"rope_theta": 1.0, "rope_scaling_factor": 40.0, "v_head_dim": 64}
    sizes = replace(family.flavors["tiny"], n_active_experts=5, **wrong)
    pattern = r"YaRN needs.*v_head_dim = 64.*n_active_experts = 5"
    with pytest.raises(CheckpointError, match=pattern):
        check_model_size(StorageFolder(tmp_path), family, sizes, 1000)


def test_selection_biases_stay_float32_in_an_export_of_another_dtype(tmp_path):
    """Rounded to bfloat16, biases that many updates of 0.001 have moved select other experts."""
    transformers = pytest.importorskip("transformers")
    family = FAMILIES["deepseek_v3"]
    sizes = replace(
        family.flavors["tiny"], dim=31, n_layers=2, n_heads=3, n_experts=6, vocab_size=61
    )  # odd: a tensor of 16 bits may end in the middle of 4 bytes
    model = family.build(sizes)
    for parameter in model.parameters():  # those of experts are not initialized: any number
        torch.nn.init.normal_(parameter)
    moe = model.layers["1"].moe
    moe.router.expert_bias.copy_(0.7 + 0.001 * torch.arange(6))
    folder = export(tmp_path / "hf", family, model, dtype=torch.bfloat16)
    loaded, source = load(tmp_path / "hf")
    assert torch.equal(loaded.layers["1"].moe.router.expert_bias, moe.router.expert_bias)
    dtypes = {tensor.dtype for name, tensor in source.tensors.items() if "expert_bias" not in name}
    assert dtypes == {torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    (bias,) = [b for name, b in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert torch.equal(bias, moe.router.expert_bias)
    shards = export(tmp_path / "shards", family, model, dtype=torch.bfloat16, max_shard_bytes=9000)
    index = json.loads(shards.read("model.safetensors.index.json"))
    values = sum(tensor.numel() for tensor in model.state_dict().values())
    assert index["metadata"]["total_size"] == 2 * values + 2 * 6
    assert folder.sizes()["model.safetensors"] > 2 * values + 2 * 6


def test_heads_of_latent_attention_need_not_divide_the_width():
    """Their widths are keys of their own: 31 channels and 3 heads are read again."""
    family = FAMILIES["deepseek_v3"]
    sizes = replace(family.flavors["tiny"], dim=31, n_heads=3)
    config = family.hugging_face.to_config(sizes, 64)
    assert family.hugging_face.from_config(config) == sizes


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("deepseek_v3", "norm_topk_prob"),
        ("deepseek_v3", "rope_interleave"),
        ("gpt2", "scale_attn_weights"),
    ],
)
def test_null_in_place_of_true_is_false_as_in_transformers(family, key):
    """As a missing value it would be true, and the model would compute something else."""
    mapping = FAMILIES[family].hugging_face
    config = written_config(family)
    assert mapping.from_config({k: v for k, v in config.items() if k != key})
    with pytest.raises(CheckpointError, match=f"{key} = false .only true is supported"):
        mapping.from_config({**config, key: None})
    if key == "norm_topk_prob":  # with one expert, true would be a weight of 1
        single = {**config, "num_experts_per_tok": 1}
        with pytest.raises(CheckpointError, match=f"{key} = true .only false is supported"):
            mapping.from_config(single)
        with pytest.raises(CheckpointError, match=f"{key} = true .only false is supported"):
            mapping.from_config({k: v for k, v in single.items() if k != key})
    tied = written_config("gpt2", tie_word_embeddings=None)
    assert not FAMILIES["gpt2"].hugging_face.from_config(tied).tied_embeddings


def test_a_mistral_with_layer_types_and_a_window_is_refused():
    """transformers computes it with a window or without, depending on the class that loads it."""
    mapping, types = FAMILIES["mistral"].hugging_face, ["full_attention"] * 4
    with pytest.raises(CheckpointError, match="layer_types, and sliding_window = 64") as refused:
        mapping.from_config(written_config("mistral", layer_types=types))
    assert "Set sliding_window = null" in refused.value.fix
    full = written_config("mistral", layer_types=types, sliding_window=None)
    assert mapping.from_config(full).window == 0
    heads = written_config("mistral", num_key_value_heads=None, num_attention_heads=4)
    assert mapping.from_config(heads).n_kv_heads == 4  # as many as query heads; 8 if it is missing
