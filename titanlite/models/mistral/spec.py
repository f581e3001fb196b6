"""Mistral 7B as a model family."""

from __future__ import annotations

from titanlite.models.decoder import check_heads, decoder_shape
from titanlite.models.llama3.spec import INIT_ROLES, ROLES, TP_PLAN
from titanlite.models.mistral.huggingface import HUGGING_FACE
from titanlite.models.mistral.model import Mistral, MistralSizes
from titanlite.models.spec import ModelSpec

FLAVORS = {
    "debugmodel": MistralSizes(256, 4, 8, 2, 768, vocab_size=2048, window=64),
    # https://arxiv.org/abs/2310.06825, table 1, and the config.json of
    # https://huggingface.co/mistralai/Mistral-7B-v0.1 and -v0.3
    "7B-v0.1": MistralSizes(
        4096, 32, 32, 8, 14_336, vocab_size=32_000, rope_theta=10_000.0, window=4096
    ),
    "7B-v0.3": MistralSizes(4096, 32, 32, 8, 14_336),
}

MISTRAL = ModelSpec(
    name="mistral",
    flavors=FLAVORS,
    build=Mistral,
    tp_plan=TP_PLAN,
    init_roles=INIT_ROLES,
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=lambda sizes: decoder_shape("mistral", sizes, window=sizes.window),
    tied_parameters=lambda sizes: [],
    hugging_face=HUGGING_FACE,
    check_sizes=check_heads,
    head_projections=["layers.*.attention.w[qkv]"],
)
