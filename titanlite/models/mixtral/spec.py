"""Mixtral as a model family."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.errors import ConfigError
from titanlite.models.decoder import check_heads, decoder_shape, tied_output
from titanlite.models.llama3.spec import INIT_ROLES, ROLES, TP_PLAN
from titanlite.models.mixtral.huggingface import HUGGING_FACE
from titanlite.models.mixtral.model import Mixtral, MixtralSizes
from titanlite.models.router import LoadBalancing
from titanlite.models.shape import Experts
from titanlite.models.spec import ModelSpec

FLAVORS = {
    "debugmodel": MixtralSizes(256, 4, 8, 4, 384, vocab_size=2048),
    # https://arxiv.org/abs/2401.04088, table 1; 8x22B as in
    # https://huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json
    "8x7B": MixtralSizes(4096, 32, 32, 8, 14_336),
    "8x22B": MixtralSizes(6144, 56, 48, 8, 16_384),
}

# The dense feed-forward layer of Llama is not there, and experts are sharded by their own rules.
EXPERT_TP_PLAN = {name: role for name, role in TP_PLAN.items() if ".feed_forward" not in name}
EXPERT_INIT_ROLES = {"*.w2*": "residual", **INIT_ROLES}


def expert_facts(sizes) -> Experts:
    """The experts of a family with experts in every block."""
    return Experts(sizes.n_experts, sizes.n_active_experts, sizes.expert_hidden_dim)


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
            "model.n_active_experts = 1: a Mixtral divides the weights of a token's experts by"
            " their sum, so that of a single expert is always 1, and the router is not trained.",
            fix='Use at least 2, or model.name = "qwen3_moe".',
            keys=("model.n_active_experts",),
        )


MIXTRAL = ModelSpec(
    name="mixtral",
    flavors=FLAVORS,
    build=Mixtral,
    tp_plan=EXPERT_TP_PLAN,
    init_roles=EXPERT_INIT_ROLES,
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=lambda sizes: decoder_shape("mixtral", sizes, experts=expert_facts(sizes)),
    tied_parameters=tied_output,
    hugging_face=HUGGING_FACE,
    check_sizes=check_mixtral_sizes,
    head_projections=["layers.*.attention.w[qkv]"],
    experts=lambda sizes: sizes.experts,
    load_balancing=lambda sizes: hugging_face_balancing(0.02, sizes),
)
