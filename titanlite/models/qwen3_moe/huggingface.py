"""Qwen3's models with experts as Hugging Face's Qwen3MoeForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.models.config_json import SAME_AS_LLAMA, ConfigFormat
from titanlite.models.llama3.huggingface import DERIVED
from titanlite.models.mixtral.huggingface import DENSE_KEYS, DENSE_NAMES
from titanlite.models.qwen3.huggingface import NORM_NAMES
from titanlite.models.qwen3_moe.model import Qwen3MoESizes
from titanlite.models.spec import HuggingFaceMapping

NAMES = {
    **DENSE_NAMES,
    **NORM_NAMES,
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.{expert}.gate_proj.weight",
    "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.{expert}.up_proj.weight",
    "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.{expert}.down_proj.weight",
}

QWEN3_MOE_CONFIG = ConfigFormat(
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    sizes=Qwen3MoESizes,
    keys={
        **DENSE_KEYS,
        "expert_hidden_dim": "moe_intermediate_size",
        "n_experts": "num_experts",
        "n_active_experts": "num_experts_per_tok",
    },
    fixed={
        **SAME_AS_LLAMA,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)


def write_qwen3_moe_config(sizes: Qwen3MoESizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    dense_width = sizes.n_active_experts * sizes.expert_hidden_dim  # of no block; HF requires it
    return QWEN3_MOE_CONFIG.for_experts(sizes.n_active_experts).write(
        sizes, max_position_embeddings=context, intermediate_size=dense_width
    )


def read_qwen3_moe_config(config: Mapping[str, Any]) -> Qwen3MoESizes:
    """The sizes in a config.json; raises CheckpointError."""
    if "num_local_experts" in config:  # as transformers 5 writes it
        config = {"num_experts": config["num_local_experts"], **config}
    return QWEN3_MOE_CONFIG.for_experts(config.get("num_experts_per_tok")).read(config)


HUGGING_FACE = HuggingFaceMapping(
    architecture=QWEN3_MOE_CONFIG.architecture,
    names=NAMES,
    derived=DERIVED,
    to_config=write_qwen3_moe_config,
    from_config=read_qwen3_moe_config,
)
