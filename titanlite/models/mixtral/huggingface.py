"""Mixtral as Hugging Face's MixtralForCausalLM: parameter names, and config.json both ways."""

from __future__ import annotations

from typing import Any

from titanlite.models.config_json import HEAD_KEYS, ConfigFormat
from titanlite.models.llama3.huggingface import DERIVED
from titanlite.models.llama3.huggingface import NAMES as LLAMA_NAMES
from titanlite.models.mixtral.model import MixtralSizes
from titanlite.models.spec import HuggingFaceMapping

DENSE_NAMES = {name: to for name, to in LLAMA_NAMES.items() if ".feed_forward." not in name}
NAMES = {
    **DENSE_NAMES,
    "layers.*.moe.router.gate.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.moe.experts.w1": "model.layers.*.block_sparse_moe.experts.{expert}.w1.weight",
    "layers.*.moe.experts.w2": "model.layers.*.block_sparse_moe.experts.{expert}.w2.weight",
    "layers.*.moe.experts.w3": "model.layers.*.block_sparse_moe.experts.{expert}.w3.weight",
}

DENSE_KEYS = {name: key for name, key in HEAD_KEYS.items() if name != "hidden_dim"}

MIXTRAL_CONFIG = ConfigFormat(
    family="mixtral",
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    sizes=MixtralSizes,
    keys={
        **DENSE_KEYS,
        "expert_hidden_dim": "intermediate_size",
        "n_experts": "num_local_experts",
        "n_active_experts": "num_experts_per_tok",
    },
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    defaults={
        "head_dim": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "router_jitter_noise": 0.0,
    },
)


def write_mixtral_config(sizes: MixtralSizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    return MIXTRAL_CONFIG.write(sizes, max_position_embeddings=context)


HUGGING_FACE = HuggingFaceMapping(
    architecture=MIXTRAL_CONFIG.architecture,
    names=NAMES,
    derived=DERIVED,
    to_config=write_mixtral_config,
    from_config=MIXTRAL_CONFIG.read,
)
