"""Qwen3's models with experts (https://arxiv.org/abs/2505.09388): Mixtral's blocks with a norm on
each query and key head, and many narrow experts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import check_heads
from titanlite.models.llama import NAMES
from titanlite.models.mixtral import MIXTRAL, MixtralSizes, hugging_face_balancing
from titanlite.settings import Range


@dataclass(frozen=True)
class Qwen3MoESizes(MixtralSizes):
    """The sizes of one model: its keys of [model]."""

    _: KW_ONLY
    n_experts: size.Experts = 128
    n_active_experts: size.ActiveExperts = 8
    vocab_size: size.VocabSize = 151_936
    head_dim: Annotated[int, Range(1), "elements per head"] = 128
    norm_eps: size.NormEps = 1e-6

    qk_norm = True


HUGGING_FACE = HuggingFaceMapping(
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    sizes=Qwen3MoESizes,
    names=NAMES,
    own_keys={"expert_hidden_dim": "moe_intermediate_size", "n_experts": "num_experts"},
    fixed={
        **SAME_AS_LLAMA,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    defaults={**COMMON_DEFAULTS, "norm_topk_prob": False},
    # as transformers 5 writes it
    implied=lambda config: {"num_experts": config.get("num_local_experts")},
    # the width of a dense block, of which there is none; transformers requires it
    further=lambda sizes: {"intermediate_size": sizes.n_active_experts * sizes.expert_hidden_dim},
)

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

QWEN3_MOE = replace(
    MIXTRAL,
    name="qwen3_moe",
    flavors=FLAVORS,
    hugging_face=HUGGING_FACE,
    check_sizes=check_heads,
    load_balancing=lambda sizes: hugging_face_balancing(0.001, sizes),
)
