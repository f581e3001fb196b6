"""Qwen3's models with experts as a model family."""

from __future__ import annotations

from titanlite.models.decoder import check_heads, decoder_shape, tied_output
from titanlite.models.llama3.spec import ROLES
from titanlite.models.mixtral.spec import (
    EXPERT_INIT_ROLES,
    EXPERT_TP_PLAN,
    expert_facts,
    hugging_face_balancing,
)
from titanlite.models.qwen3_moe.huggingface import HUGGING_FACE
from titanlite.models.qwen3_moe.model import Qwen3MoE, Qwen3MoESizes
from titanlite.models.spec import ModelSpec

FLAVORS = {
    "debugmodel": Qwen3MoESizes(
        256, 4, 8, 4, 192, n_experts=16, n_active_experts=4, vocab_size=2048, head_dim=64
    ),
    # that of torchtitan v0.2.2, which has it under the name qwen3
    "debugmodel_moe": Qwen3MoESizes(256, 8, 16, 8, 768, n_experts=64, vocab_size=2048),
    # https://arxiv.org/abs/2505.09388, table 2; widths from the models' config.json, such as
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "30B-A3B": Qwen3MoESizes(2048, 48, 32, 4, 768),
    "235B-A22B": Qwen3MoESizes(4096, 94, 64, 4, 1536),
}

QWEN3_MOE = ModelSpec(
    name="qwen3_moe",
    flavors=FLAVORS,
    build=Qwen3MoE,
    tp_plan=EXPERT_TP_PLAN,
    init_roles=EXPERT_INIT_ROLES,
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=lambda sizes: decoder_shape(
        "qwen3_moe", sizes, qk_norm=True, experts=expert_facts(sizes)
    ),
    tied_parameters=tied_output,
    hugging_face=HUGGING_FACE,
    check_sizes=check_heads,
    head_projections=["layers.*.attention.w[qkv]"],
    experts=lambda sizes: sizes.experts,
    load_balancing=lambda sizes: hugging_face_balancing(0.001, sizes),
)
