"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral's blocks with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace

from titanlite.errors import ConfigError
from titanlite.models import sizes as size
from titanlite.models.config_json import HuggingFaceMapping
from titanlite.models.decoder import check_heads
from titanlite.models.llama import LLAMA3, LlamaSizes
from titanlite.models.llama import NAMES as LLAMA_NAMES
from titanlite.models.router import ExpertSizes, LoadBalancing


@dataclass(frozen=True)
class MixtralSizes(LlamaSizes):
    """The sizes of one Mixtral model: its keys of [model]."""

    expert_hidden_dim: size.ExpertHiddenDim
    _: KW_ONLY
    n_experts: size.Experts = 8
    n_active_experts: size.ActiveExperts = 2
    vocab_size: size.VocabSize = 32_000
    head_dim: size.HeadDim = 0
    norm_eps: size.NormEps = 1e-5
    tied_embeddings: size.TiedEmbeddings = False

    @property
    def hidden_dim(self) -> int:
        """Width of a feed-forward layer: of an expert."""
        return self.expert_hidden_dim

    @property
    def experts(self) -> ExpertSizes:
        return ExpertSizes(self.n_experts, self.n_active_experts, self.expert_hidden_dim)


NAMES = {
    **LLAMA_NAMES,
    "layers.*.moe.router.gate.weight": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.moe.experts.w1": "model.layers.*.block_sparse_moe.experts.{expert}.w1.weight",
    "layers.*.moe.experts.w2": "model.layers.*.block_sparse_moe.experts.{expert}.w2.weight",
    "layers.*.moe.experts.w3": "model.layers.*.block_sparse_moe.experts.{expert}.w3.weight",
}

HUGGING_FACE = HuggingFaceMapping(
    family="mixtral",
    architecture="MixtralForCausalLM",
    sizes=MixtralSizes,
    names=NAMES,
    own_keys={"expert_hidden_dim": "intermediate_size", "n_experts": "num_local_experts"},
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    defaults={
        "head_dim": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
)

FLAVORS = {
    "debugmodel": MixtralSizes(256, 4, 8, 4, 384, vocab_size=2048),
    # https://arxiv.org/abs/2401.04088, table 1; 8x22B as in
    # https://huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json
    "8x7B": MixtralSizes(4096, 32, 32, 8, 14_336),
    "8x22B": MixtralSizes(6144, 56, 48, 8, 16_384),
}


def hugging_face_balancing(router_aux_loss_coef: float, sizes) -> LoadBalancing:
    """The balancing that the coefficient in a published config.json stands for.

    transformers' loss is one for all blocks, and its f_i sum to the number of active experts.
    """
    return LoadBalancing(router_aux_loss_coef * sizes.n_active_experts / sizes.n_layers)


def check_mixtral_sizes(sizes: MixtralSizes) -> Iterator[ConfigError]:
    """Reject heads that do not fit, and a router that would not be trained."""
    yield from check_heads(sizes)
    if sizes.n_active_experts == 1:
        yield ConfigError(
            "model.n_active_experts = 1: the weights of a token's experts are divided by their"
            " sum, so that of a single expert is always 1, and the router is not trained.",
            fix='Use at least 2, or model.name = "qwen3_moe".',
        )


MIXTRAL = replace(
    LLAMA3,
    name="mixtral",
    flavors=FLAVORS,
    hugging_face=HUGGING_FACE,
    check_sizes=check_mixtral_sizes,
    load_balancing=lambda sizes: hugging_face_balancing(0.02, sizes),
)
