"""Llama 3 (https://arxiv.org/abs/2407.21783) on one device, then the facts about it as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.errors import CheckpointError
from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.models.embedding import TokenEmbedding
from titanlite.models.loss import OutputLayer
from titanlite.models.rope import RopeScaling, apply_rope, rope_cos_sin
from titanlite.models.spec import HuggingFaceMapping, ModelSpec


@dataclass(frozen=True)
class Llama3Sizes:
    """The sizes of one Llama."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128_256
    head_dim: int = 0  # 0: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling_factor: float = 1.0
    qk_norm: bool = False
    tied_embeddings: bool = False

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.n_heads

    @property
    def rope_scaling(self) -> RopeScaling | None:
        return RopeScaling(self.rope_scaling_factor) if self.rope_scaling_factor > 1 else None


class Attention(nn.Module):
    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.head_width = sizes.head_width
        query, key = sizes.n_heads * self.head_width, sizes.n_kv_heads * self.head_width
        self.wq = nn.Linear(sizes.dim, query, bias=False)
        self.wk = nn.Linear(sizes.dim, key, bias=False)
        self.wv = nn.Linear(sizes.dim, key, bias=False)
        self.wo = nn.Linear(query, sizes.dim, bias=False)
        self.attend = CausalAttention()
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        heads = (-1, self.head_width)  # counted from the data: a tensor-parallel rank has fewer
        q = self.q_norm(self.wq(x).unflatten(-1, heads))  # [B, T, H*K] -> [B, T, H, K]
        k = self.k_norm(self.wk(x).unflatten(-1, heads))
        v = self.wv(x).unflatten(-1, heads)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, T, H, K] -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, K] -> [B, T, H*K]


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, documents, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [B, T] to logits [B, T, V], or with labels [B, T] to their summed loss.

    A part that a pipeline stage does not own is None.
    """

    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.sizes = sizes
        self.index_documents: Callable[[Tensor], Tensor] | None = None
        self.tok_embeddings = TokenEmbedding(sizes.vocab_size, sizes.dim)
        self.layers = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.n_layers)})
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.output = OutputLayer(sizes.dim, sizes.vocab_size)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def use_document_mask(self, index_documents: Callable[[Tensor], Tensor]) -> None:
        """Attend within documents only, see `SupportsDocuments`."""
        self.index_documents = index_documents

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        caches: dict[str, KeyValueCache] | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """`positions` [T] or [B, T] count from the start of the sequence, or of each document in
        it; 0, 1, 2, … where unset."""
        sizes = self.sizes
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rope = rope_cos_sin(positions, sizes.head_width, sizes.rope_theta, sizes.rope_scaling)
        documents = None  # found once for all blocks
        if self.index_documents is not None:
            documents = self.index_documents(positions.expand(len(tokens), -1))
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for name, block in self.layers.items():
            x = block(x, rope, documents, None if caches is None else caches[name])
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x, labels=labels)


# --- facts ---------------------------------------------------------------------------------------

FLAVORS = {
    "debugmodel": Llama3Sizes(256, 6, 16, 16, 768, vocab_size=2048),
    "quickstart": Llama3Sizes(256, 4, 4, 2, 768, vocab_size=4096, rope_theta=10_000.0),
    # Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B, as published on their model cards
    "1B": Llama3Sizes(2048, 16, 32, 8, 8192, tied_embeddings=True, rope_scaling_factor=32.0),
    "3B": Llama3Sizes(3072, 28, 24, 8, 8192, tied_embeddings=True, rope_scaling_factor=32.0),
    "8B": Llama3Sizes(4096, 32, 32, 8, 14_336, rope_scaling_factor=8.0),
    "70B": Llama3Sizes(8192, 80, 64, 8, 28_672, rope_scaling_factor=8.0),
    "405B": Llama3Sizes(16_384, 126, 128, 8, 53_248, rope_scaling_factor=8.0),
}

SPLIT = {
    "tok_embeddings": "vocab_in",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise_kv",
    "layers.*.attention.wv": "colwise_kv",
    "layers.*.attention.q_norm": "heads",
    "layers.*.attention.k_norm": "heads",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "vocab_out",
}

START = {
    "*norm.weight": "ones",
    "*.wo.weight": "residual",  # smaller with depth, so that the residual stream does not grow
    "*.w2.weight": "residual",
    "*": "normal",
}


def _count_parameters(sizes: Llama3Sizes) -> int:
    vocabularies = 1 if sizes.tied_embeddings else 2
    ends = vocabularies * sizes.vocab_size * sizes.dim + sizes.dim
    return sizes.n_layers * _count_block_parameters(sizes) + ends


def _count_block_parameters(sizes: Llama3Sizes) -> int:
    heads = (sizes.n_heads * 2 + sizes.n_kv_heads * 2) * sizes.head_width
    norms = 2 * sizes.dim + (2 * sizes.head_width if sizes.qk_norm else 0)
    return sizes.dim * (heads + 3 * sizes.hidden_dim) + norms


def _kept_by_block(sizes: Llama3Sizes) -> int:
    """Numbers a token that autograd holds for a block, as counted in fp32; in bf16 a CPU, whose
    norms compute in fp32, holds up to a third more."""
    queries, keys = (heads * sizes.head_width for heads in (sizes.n_heads, sizes.n_kv_heads))
    normed = 2 * (queries + keys) if sizes.qk_norm else 0
    return 5 * sizes.dim + 3 * queries + 2 * keys + normed + 4 * sizes.hidden_dim


def _flops_per_token(sizes: Llama3Sizes, seq_len: int, full_attention: bool = False) -> float:
    """Forward and backward FLOPs a token: 6 for each weight in a matrix product, and attention.

    Attention costs 12 L H K T counted in full (PaLM, https://arxiv.org/abs/2204.02311, appendix B),
    half of that counted causally.
    """
    head = 6 * sizes.vocab_size * sizes.dim
    return sizes.n_layers * _block_flops(sizes, seq_len, 1.0 if full_attention else 0.5) + head


def _block_flops(sizes: Llama3Sizes, seq_len: int, seen: float) -> float:
    """FLOPs a token of one block whose attention sees `seen` of the sequence."""
    heads = (sizes.n_heads * 2 + sizes.n_kv_heads * 2) * sizes.head_width
    products = sizes.dim * (heads + 3 * sizes.hidden_dim)
    return 6 * products + 12 * sizes.n_heads * sizes.head_width * seq_len * seen


def _costs(sizes: Llama3Sizes, seq_len: int) -> dict[str, float]:
    """What each module costs, in FLOPs a token of forward and backward.

    Where there is no matrix product, operations on numbers are counted: an embedding copies its
    row and adds its gradient; the loss, which runs with the output, takes about ten a logit.
    """
    block = _block_flops(sizes, seq_len, 0.5)
    blocks = {f"layers.{number}": block for number in range(sizes.n_layers)}
    output = sizes.vocab_size * (6 * sizes.dim + 10)
    return {"tok_embeddings": 2.0 * sizes.dim, **blocks, "norm": 10.0 * sizes.dim, "output": output}


def _tied(sizes: Llama3Sizes) -> list[tuple[str, str]]:
    return [("output.weight", "tok_embeddings.weight")] if sizes.tied_embeddings else []


# --- Hugging Face's words -------------------------------------------------------------------------

_THEIR_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # the numbers in them are the same: rotary pairs too are (i, i + K/2) in both

_THEIR_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling_factor": "factor",
    "tied_embeddings": "tie_word_embeddings",
}

_THEIR_CHOICES = {  # what else would change the numbers, and the only value that we compute
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "auto_map": None,  # code of its own
}

_THEIR_STRETCH = {
    "rope_type": "llama3",
    "low_freq_factor": RopeScaling.low_frequency_factor,
    "high_freq_factor": RopeScaling.high_frequency_factor,
    "original_max_position_embeddings": RopeScaling.original_context,
}


def _config_of(sizes: Llama3Sizes, context: int) -> dict[str, Any]:
    """In the words of transformers 4, which 5 knows too."""
    if sizes.qk_norm:
        raise CheckpointError(
            "model.qk_norm = true: Hugging Face's LlamaForCausalLM has no such norm, and would"
            " compute something else from these weights."
        )
    config = {theirs: getattr(sizes, ours) for ours, theirs in _THEIR_FIELDS.items()}
    factor, scaled = config.pop("factor"), sizes.rope_scaling is not None
    reach = int(factor * RopeScaling.original_context) if scaled else 0
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config,
        **{key: only for key, only in _THEIR_CHOICES.items() if only in ("silu", False)},
        "head_dim": sizes.head_width,
        "max_position_embeddings": max(context, reach),
        "rope_scaling": {"factor": factor, **_THEIR_STRETCH} if scaled else None,
    }


def _shape_of(config: Mapping[str, Any]) -> Llama3Sizes:
    """From the words of transformers 4 or 5; what is left out is as LlamaConfig has it."""
    said = {key: value for key, value in config.items() if value is not None}
    rope = said.get("rope_scaling") or said.get("rope_parameters") or {}  # in 5's order
    rope = rope if isinstance(rope, dict) else {"rope_scaling": rope}
    given = {
        "num_key_value_heads": said.get("num_attention_heads"),
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_type": rope.get("type", "default"),
        "tie_word_embeddings": False,
        **said,
        **rope,
    }
    scaled = given["rope_type"] == "llama3"
    given["factor"] = rope.get("factor") if scaled else 1.0
    only = _THEIR_CHOICES | (_THEIR_STRETCH if scaled else {"rope_type": "default"})
    sizes = {ours: given.get(theirs) for ours, theirs in _THEIR_FIELDS.items()}
    wrong = [
        *(key for key in only if given.get(key, _THEIR_CHOICES.get(key)) != only[key]),
        *(rope.keys() - _THEIR_STRETCH.keys() - {"type", "rope_theta", "factor"}),
        *(key for key in said.keys() & rope.keys() if said[key] != rope[key]),
        *(_THEIR_FIELDS[ours] for ours, value in sizes.items() if not _can_be(ours, value)),
    ]
    if not wrong:
        heads, width = sizes["n_heads"], sizes["head_dim"] or sizes["dim"] / sizes["n_heads"]
        if heads % sizes["n_kv_heads"]:
            wrong += ["num_attention_heads", "num_key_value_heads"]
        if width % 2:  # no whole number, or no pairs to turn
            wrong += ["head_dim"] if sizes["head_dim"] else ["hidden_size", "num_attention_heads"]
        sizes["head_dim"] = 0 if width * heads == sizes["dim"] else width  # as the flavors say it
    if wrong:
        known = {key: f" (only {json.dumps(value)} is known)" for key, value in only.items()}
        found = {key: f"{key} = {json.dumps(given.get(key)):.80}" for key in wrong}
        each = ", ".join(words + known.get(key, "") for key, words in found.items())
        raise CheckpointError(f"config.json describes what model llama3 is not: {each}.")
    return Llama3Sizes(**sizes)


def _can_be(field: str, value: Any) -> bool:
    """Whether a field of the shape can have this value."""
    kind = type(getattr(Llama3Sizes, field, 1))
    if kind is bool or isinstance(value, bool):
        return type(value) is kind
    least = 0 if field in ("head_dim", "norm_eps") else 1
    return isinstance(value, (int, kind)) and least <= value <= 1 << 40  # JSON has no largest one


LLAMA = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    build=Llama,
    tp_plan=SPLIT,
    init_roles=START,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    count_parameters=_count_parameters,
    count_block_parameters=_count_block_parameters,
    activations_per_block=_kept_by_block,
    flops_per_token=_flops_per_token,
    module_flops=_costs,
    tied_parameters=_tied,
    hugging_face=HuggingFaceMapping(
        architecture="LlamaForCausalLM",
        names=_THEIR_NAMES,
        derived="*.rotary_emb.inv_freq",
        to_config=_config_of,
        from_config=_shape_of,
    ),
)
