"""Llama 2 (https://arxiv.org/abs/2307.09288) as a model family: Llama 3's blocks in other sizes."""

from __future__ import annotations

from dataclasses import replace

from titanlite.models.decoder import decoder_shape
from titanlite.models.llama3.model import Llama3Sizes
from titanlite.models.llama3.spec import LLAMA3

FLAVORS = {
    "debugmodel": Llama3Sizes(256, 4, 4, 4, 768, vocab_size=2048, rope_theta=10_000.0),
    # config.json of https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf
    "7B": Llama3Sizes(4096, 32, 32, 32, 11_008, vocab_size=32_000, rope_theta=10_000.0),
    "13B": Llama3Sizes(5120, 40, 40, 40, 13_824, vocab_size=32_000, rope_theta=10_000.0),
    "70B": Llama3Sizes(8192, 80, 64, 8, 28_672, vocab_size=32_000, rope_theta=10_000.0),
}

LLAMA2 = replace(
    LLAMA3,
    name="llama2",
    flavors=FLAVORS,
    shape=lambda sizes: decoder_shape("llama2", sizes, qk_norm=sizes.qk_norm),
)
