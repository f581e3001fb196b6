"""OLMo 2 as a model family."""

from __future__ import annotations

from titanlite.models.decoder import check_heads, decoder_shape, tied_output
from titanlite.models.llama3.spec import ROLES
from titanlite.models.llama3.spec import TP_PLAN as LLAMA_PLAN
from titanlite.models.olmo2.huggingface import HUGGING_FACE
from titanlite.models.olmo2.model import Olmo2, Olmo2Sizes
from titanlite.models.spec import ModelSpec

FLAVORS = {
    "debugmodel": Olmo2Sizes(256, 4, 8, 4, 768, vocab_size=2048),
    # config.json of https://huggingface.co/allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, -13B and
    # OLMo-2-0325-32B
    "1B": Olmo2Sizes(2048, 16, 16, 16, 8192),
    "7B": Olmo2Sizes(4096, 32, 32, 32, 11_008),
    "13B": Olmo2Sizes(5120, 40, 40, 40, 13_824),
    "32B": Olmo2Sizes(5120, 64, 40, 8, 27_648),
}

TP_PLAN = {
    **LLAMA_PLAN,
    "layers.*.attention.q_norm": "projection",
    "layers.*.attention.k_norm": "projection",
}

OLMO2 = ModelSpec(
    name="olmo2",
    flavors=FLAVORS,
    build=Olmo2,
    tp_plan=TP_PLAN,
    init_roles={"*norm.weight": "ones", "*": "normal"},  # arXiv 2501.00656, section 3.2
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=lambda sizes: decoder_shape("olmo2", sizes, qk_norm="projections"),
    tied_parameters=tied_output,
    hugging_face=HUGGING_FACE,
    check_sizes=check_heads,
    head_projections=["layers.*.attention.w[qkv]"],
)
