"""Qwen3-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): three blocks of linear
attention, Gated DeltaNet (https://arxiv.org/abs/2412.06464), and one of gated attention, in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.kernels.attention import KeyValueCache
from titanlite.kernels.delta_rule import DecayGate, DeltaCache, DeltaRule, ShortConvolution
from titanlite.kernels.documents import DocumentIndex
from titanlite.models import sizes as size
from titanlite.models.config_json import (
    COMMON_DEFAULTS,
    SAME_AS_LLAMA,
    HuggingFaceMapping,
    StoredPart,
)
from titanlite.models.decoder import CosSin, Decoder, RopeSettings, ZeroCentredNorm, check_heads
from titanlite.models.llama import LLAMA3, Attention, LlamaSizes, TransformerBlock
from titanlite.models.llama import NAMES as LLAMA_NAMES
from titanlite.models.mixtral import hugging_face_balancing
from titanlite.models.mtp import OnePredictionLayer, with_prediction_names
from titanlite.models.rope import apply_rope
from titanlite.models.router import NO_BALANCING, ExpertSizes, LoadBalancing
from titanlite.settings import Range

KeyHeads = Annotated[int, Range(1), "query and key heads of linear attention"]
ValueHeads = Annotated[int, Range(1), "value heads of linear attention"]
KeyDim = Annotated[int, Range(1), "elements of such a query or key head"]
ValueDim = Annotated[int, Range(1), "elements of such a value head"]
SharedHidden = Annotated[int, Range(1), "width of the expert that computes every token"]


@dataclass(frozen=True)
class LinearAttentionSizes:
    """The sizes of linear attention."""

    _: KW_ONLY
    full_attention_every: Annotated[
        int, Range(1), "every n-th block has full attention, the others linear attention"
    ] = 4
    linear_key_heads: KeyHeads = 16
    linear_value_heads: ValueHeads = 32
    linear_key_dim: KeyDim = 128
    linear_value_dim: ValueDim = 128
    conv_width: Annotated[int, Range(2), "tokens that linear attention's convolution sees"] = 4


@dataclass(frozen=True)
class HybridSizes(LinearAttentionSizes, LlamaSizes):
    """What Qwen's models with these two kinds of attention have in common."""

    _: KW_ONLY
    vocab_size: size.VocabSize = 151_936
    head_dim: Annotated[int, Range(1), "elements per head of full attention"] = 256
    partial_rotary_factor: Annotated[float, Range(0, 1), "fraction of them that is rotated"] = 0.25
    rope_theta: size.RopeTheta = 10_000_000.0
    tied_embeddings: size.TiedEmbeddings = False

    # class attributes: a dense model does not have these keys
    n_experts = n_active_experts = expert_hidden_dim = shared_hidden_dim = 0
    qk_norm = True

    def is_full(self, block: int) -> bool:
        """Whether a block has full attention; the one for multi-token prediction has."""
        return size.is_every(self.full_attention_every, block) or block >= self.n_layers

    @property
    def experts(self) -> ExpertSizes | None:
        if not self.n_experts:
            return None
        return ExpertSizes(
            self.n_experts,
            self.n_active_experts,
            self.expert_hidden_dim,
            shared_dim=self.shared_hidden_dim,
            shared_gate=True,
        )

    def rotary_of(self, block: int) -> RopeSettings | None:
        if not self.is_full(block):
            return None
        return int(self.head_dim * self.partial_rotary_factor), self.rope_theta, None


@dataclass(frozen=True)
class Qwen3NextSizes(HybridSizes):
    """The sizes of one model: its keys of [model]."""

    hidden_dim: Annotated[int, Range(1), "width of the feed-forward layer; unused with experts"]
    _: KW_ONLY
    n_experts: Annotated[int, Range(0), "routed experts per block; 0: a feed-forward layer"] = 512
    n_active_experts: size.ActiveExperts = 10
    expert_hidden_dim: size.ExpertHiddenDim = 512
    shared_hidden_dim: SharedHidden = 512
    mtp_layers: OnePredictionLayer = 0  # published: 1


class GatedAttention(Attention):
    """Llama's attention with a norm on each query and key head, and a gate on each output.

    A head's queries and gates are projected by one matrix, as in the published tensors.
    """

    def __init__(self, sizes: HybridSizes, block: int):
        super().__init__(sizes, block)
        self.wq = nn.Linear(sizes.dim, 2 * sizes.n_heads * self.head_width, bias=False)
        self.q_norm = ZeroCentredNorm(self.head_width, eps=sizes.norm_eps)
        self.k_norm = ZeroCentredNorm(self.head_width, eps=sizes.norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: CosSin | None,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        assert rope is not None
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_width)).chunk(2, -1)
        k, v = (w(x).unflatten(-1, (-1, self.head_width)) for w in (self.wk, self.wv))
        q, k = apply_rope(self.q_norm(q), rope), apply_rope(self.k_norm(k), rope)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache).transpose(1, 2) * gate.sigmoid()
        return self.wo(out.flatten(-2))  # [B, T, H, K] -> [B, T, H*K]


class DeltaNet(nn.Module):
    """Linear attention by the gated delta rule, after a short convolution; subclasses project.

    With a `max_strength` above 1, the eigenvalues of a token's change of the state may be negative.
    """

    def __init__(self, sizes: Any, norm_eps: float, max_strength: float = 1.0):
        super().__init__()
        heads, self.max_strength = sizes.linear_value_heads, max_strength
        self.key_dim, self.value_dim = sizes.linear_key_dim, sizes.linear_value_dim
        keys, values = sizes.linear_key_heads * self.key_dim, heads * self.value_dim
        self.convolve = ShortConvolution(keys, values, sizes.conv_width)
        self.decay = DecayGate(heads)
        self.delta_rule = DeltaRule(heads * self.key_dim * self.value_dim)
        self.out_norm = nn.RMSNorm(self.value_dim, eps=norm_eps)
        self.w_out = nn.Linear(values, sizes.dim, bias=False)

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Queries, keys and values; output gates; strengths before their sigmoid; inputs of the
        decay gate: [B, T, X] each.

        A tensor-parallel rank has only those of some of the heads.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        rope: CosSin | None,
        documents: DocumentIndex | None = None,
        cache: DeltaCache | None = None,
    ) -> Tensor:
        qkv, gate, strength, decay_input = self.project(x)
        mixed = self.convolve(torch.cat(qkv, -1), documents, cache)
        q, k, v = mixed.split([part.shape[-1] for part in qkv], -1)
        q, k = (_unit_length(part.unflatten(-1, (-1, self.key_dim))) for part in (q, k))
        v = v.unflatten(-1, (-1, self.value_dim))  # -> [B, T, H, V]
        log_decay, strength = self.decay(decay_input), strength.float().sigmoid()
        if self.max_strength != 1:
            strength = self.max_strength * strength
        scaled = q * self.key_dim**-0.5
        out = self.delta_rule(scaled, k, v, log_decay, strength, documents, cache)
        gate = F.silu(gate.unflatten(-1, (-1, self.value_dim)).float())
        out = self.out_norm(out.to(v.dtype)) * gate
        return self.w_out(out.to(v.dtype).flatten(-2))


class GatedDeltaNet(DeltaNet):
    """Linear attention with joined projections.

    A matrix projects to the queries, keys, values and output gates of a key head, then to those of
    the next, and another to the strengths and decays, as in the published tensors.
    """

    def __init__(self, sizes: HybridSizes, norm_eps: float):
        super().__init__(sizes, norm_eps)
        key_heads, value_heads = sizes.linear_key_heads, sizes.linear_value_heads
        self.shared_by = value_heads // key_heads  # value heads with the same query and key
        self.widths = [self.key_dim] * 2 + [self.shared_by * self.value_dim] * 2
        self.wqkvz = nn.Linear(sizes.dim, key_heads * sum(self.widths), bias=False)
        self.wba = nn.Linear(sizes.dim, 2 * value_heads, bias=False)

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        # -1: a tensor-parallel rank has only some of the heads; [B, T, D] -> [B, T, Hk, X]
        joined = self.wqkvz(x).unflatten(-1, (-1, sum(self.widths))).split(self.widths, -1)
        *qkv, gate = (part.flatten(-2) for part in joined)
        strength, decay = self.wba(x).unflatten(-1, (-1, 2, self.shared_by)).unbind(-2)
        return qkv, gate, strength.flatten(-2), decay.flatten(-2)


def _unit_length(x: Tensor) -> Tensor:
    """x divided by its length over the last dimension, in fp32; the epsilon is transformers'."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Qwen3NextBlock(TransformerBlock):
    """Llama's block with zero-centred norms and one of the two kinds of attention."""

    def __init__(self, sizes: Any, block: int, linear: type[DeltaNet]):
        is_full = sizes.is_full(block)
        attention = GatedAttention(sizes, block) if is_full else linear(sizes, sizes.norm_eps)
        super().__init__(sizes, attention, sizes.experts)
        self.attention_norm = ZeroCentredNorm(sizes.dim, eps=sizes.norm_eps)
        self.ffn_norm = ZeroCentredNorm(sizes.dim, eps=sizes.norm_eps)


class Qwen3Next(Decoder):
    """The transformer of Qwen3-Next; `linear` builds the linear attention of a block."""

    def __init__(self, sizes: Any, linear: type[DeltaNet] = GatedDeltaNet):
        def build_block(index: int) -> nn.Module:
            return Qwen3NextBlock(sizes, index, linear)

        norm = ZeroCentredNorm(sizes.dim, eps=sizes.norm_eps)
        super().__init__(sizes, build_block, sizes.rotary_of, norm)


# --- Hugging Face ---------------------------------------------------------------------------------

NAMES = {
    **LLAMA_NAMES,
    "layers.*.attention.wqkvz.weight": "model.layers.*.linear_attn.in_proj_qkvz.weight",
    "layers.*.attention.wba.weight": "model.layers.*.linear_attn.in_proj_ba.weight",
    "layers.*.attention.convolve.q": "model.layers.*.linear_attn.conv1d.weight",
    "layers.*.attention.convolve.k": "model.layers.*.linear_attn.conv1d.weight",
    "layers.*.attention.convolve.v": "model.layers.*.linear_attn.conv1d.weight",
    "layers.*.attention.decay.A_log": "model.layers.*.linear_attn.A_log",
    "layers.*.attention.decay.dt_bias": "model.layers.*.linear_attn.dt_bias",
    "layers.*.attention.out_norm.weight": "model.layers.*.linear_attn.norm.weight",
    "layers.*.attention.w_out.weight": "model.layers.*.linear_attn.out_proj.weight",
    "layers.*.moe.shared_gate.weight": "model.layers.*.mlp.shared_expert_gate.weight",
    "layers.*.moe.shared_experts.w1.weight": "model.layers.*.mlp.shared_expert.gate_proj.weight",
    "layers.*.moe.shared_experts.w3.weight": "model.layers.*.mlp.shared_expert.up_proj.weight",
    "layers.*.moe.shared_experts.w2.weight": "model.layers.*.mlp.shared_expert.down_proj.weight",
}

MTP_NAMES = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "proj": "mtp.fc.weight",
    "norm": "mtp.norm.weight",
}

PARTS = {
    f"layers.*.attention.convolve.{part}": StoredPart(index=index, unit_columns=True)
    for index, part in enumerate("qkv")
}

HUGGING_FACE = HuggingFaceMapping(
    family="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    sizes=Qwen3NextSizes,
    names=with_prediction_names(NAMES, "mtp.layers.0.", MTP_NAMES),
    parts=PARTS,
    own_keys={
        "n_experts": "num_experts",
        "expert_hidden_dim": "moe_intermediate_size",
        "shared_hidden_dim": "shared_expert_intermediate_size",
        "full_attention_every": "layer_types",
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_dim": "linear_key_head_dim",
        "linear_value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
        "partial_rotary_factor": "partial_rotary_factor",
    },
    fixed={
        "hidden_act": SAME_AS_LLAMA["hidden_act"],
        "attention_bias": SAME_AS_LLAMA["attention_bias"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    defaults={
        **COMMON_DEFAULTS,
        "head_dim": 256,
        "layer_types": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
    },
    # as published: transformers 5 writes the list
    implied=lambda config: {"layer_types": config.get("full_attention_interval")},
    intervals={"layer_types": ("linear_attention", "full_attention")},
)


# --- the family -----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "linear_key_heads": 4,
    "linear_value_heads": 8,
    "linear_key_dim": 32,
    "linear_value_dim": 32,
}
DEBUG: dict[str, Any] = {"vocab_size": 2048, "head_dim": 64, **SMALL}
DEBUG_EXPERTS: dict[str, Any] = {
    "n_experts": 16,
    "n_active_experts": 4,
    "expert_hidden_dim": 192,
    "shared_hidden_dim": 192,
}
FLAVORS = {
    "debugmodel": Qwen3NextSizes(256, 4, 8, 2, 768, **DEBUG_EXPERTS, **DEBUG),
    # https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct/blob/main/config.json
    "80B-A3B": Qwen3NextSizes(2048, 48, 16, 2, 5120),
}

TP_PLAN = {
    **LLAMA3.tp_plan,
    "layers.*.attention.wqkvz": "colwise",
    "layers.*.attention.wba": "colwise",
    "layers.*.attention.convolve": "per_head",
    "layers.*.attention.decay": "per_head",
    "layers.*.attention.out_norm": "heads",
    "layers.*.attention.w_out": "rowwise",
}

INIT_ROLES = {
    "*.out_norm.weight": "ones",
    "*norm.weight": "zeros",  # multiply by 1 + weight
    "*.A_log": "decay",
    "*.dt_bias": "ones",
    "*": "normal",
}

PARAMETER_ROLES = {
    "*.A_log": "gain",
    "*.dt_bias": "gain",
    "*.convolve.?": "gain",
    **LLAMA3.parameter_roles,
}


def check_linear_heads(sizes: Any) -> Iterator[ConfigError]:
    """Reject heads that do not fit together."""
    yield from check_heads(sizes)
    if sizes.linear_value_heads % sizes.linear_key_heads:
        yield ConfigError(
            f"model.linear_key_heads = {sizes.linear_key_heads}: does not divide"
            f" model.linear_value_heads = {sizes.linear_value_heads}; each key head serves the same"
            " number of value heads.",
            fix=f"Use a divisor of {sizes.linear_value_heads}.",
        )


def check_qwen3_next_sizes(sizes: Any) -> Iterator[ConfigError]:
    """Reject heads that do not fit together, and an odd number of rotated features."""
    yield from check_linear_heads(sizes)
    rotated = int(sizes.head_dim * sizes.partial_rotary_factor)
    if rotated % 2 or not rotated:
        yield ConfigError(
            f"model.partial_rotary_factor = {sizes.partial_rotary_factor:g}: rotates {rotated} of"
            f" model.head_dim = {sizes.head_dim} features; RoPE rotates pairs of them, at least"
            " one.",
            fix=f"Use {2 * max(1, rotated // 2) / sizes.head_dim:g}.",
        )


def _load_balancing(sizes: HybridSizes) -> LoadBalancing:
    return hugging_face_balancing(0.001, sizes) if sizes.n_experts else NO_BALANCING


QWEN3_NEXT = replace(
    LLAMA3,
    name="qwen3_next",
    flavors=FLAVORS,
    build=Qwen3Next,
    tp_plan=TP_PLAN,
    init_roles=INIT_ROLES,
    parameter_roles=PARAMETER_ROLES,
    hugging_face=HUGGING_FACE,
    check_sizes=check_qwen3_next_sizes,
    load_balancing=_load_balancing,
)
