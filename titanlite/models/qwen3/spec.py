"""Qwen3's dense models as a model family."""

from __future__ import annotations

from titanlite.models.decoder import check_heads, decoder_shape, tied_output
from titanlite.models.llama3.spec import INIT_ROLES, ROLES, TP_PLAN
from titanlite.models.qwen3.huggingface import HUGGING_FACE
from titanlite.models.qwen3.model import Qwen3, Qwen3Sizes
from titanlite.models.spec import ModelSpec

FLAVORS = {
    "debugmodel": Qwen3Sizes(256, 8, 16, 8, 3072, vocab_size=2048, tied_embeddings=True),
    # https://arxiv.org/abs/2505.09388, table 1; widths from the models' config.json, such as
    # https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    "0.6B": Qwen3Sizes(1024, 28, 16, 8, 3072, tied_embeddings=True),
    "1.7B": Qwen3Sizes(2048, 28, 16, 8, 6144, tied_embeddings=True),
    "4B": Qwen3Sizes(2560, 36, 32, 8, 9728, tied_embeddings=True),
    "8B": Qwen3Sizes(4096, 36, 32, 8, 12_288),
    "14B": Qwen3Sizes(5120, 40, 40, 8, 17_408),
    "32B": Qwen3Sizes(5120, 64, 64, 8, 25_600),
}

QWEN3 = ModelSpec(
    name="qwen3",
    flavors=FLAVORS,
    flavor_hints=dict.fromkeys(  # torchtitan has them in one family
        ("debugmodel_moe", "30B-A3B", "235B-A22B"),
        'Set model.name = "qwen3_moe": this flavor has experts.',
    ),
    build=Qwen3,
    tp_plan=TP_PLAN,
    init_roles=INIT_ROLES,
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=lambda sizes: decoder_shape("qwen3", sizes, qk_norm=True),
    tied_parameters=tied_output,
    hugging_face=HUGGING_FACE,
    check_sizes=check_heads,
    head_projections=["layers.*.attention.w[qkv]"],
)
