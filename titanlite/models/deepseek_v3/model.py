"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437) as a single-device module.

Its multi-token prediction, an extra block used in training only, is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models.decoder import Rope, RotaryDecoder
from titanlite.models.llama3.model import TransformerBlock
from titanlite.models.mixtral.model import ExpertBlock
from titanlite.models.rope import YarnScaling, apply_rope, pair_halves
from titanlite.models.router import ExpertSizes

# Whatever the epsilon of the other norms: so does DeepseekV3Attention of transformers 5.23.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeepSeekV3Sizes:
    """The sizes of one model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    hidden_dim: int  # of the dense layers
    vocab_size: int
    n_experts: int
    n_active_experts: int
    expert_hidden_dim: int
    n_dense_layers: int = 0
    n_shared_experts: int = 1
    n_expert_groups: int = 1
    n_active_groups: int = 1
    route_scale: float = 1.0
    q_lora_rank: int = 0  # 0: queries are projected from the hidden states
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling_factor: float = 1.0

    qk_norm = tied_embeddings = False

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads: every query head has its own."""
        return self.n_heads

    @property
    def head_width(self) -> int:
        """Query and key elements per head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_scaling(self) -> YarnScaling | None:
        return YarnScaling(self.rope_scaling_factor) if self.rope_scaling_factor > 1 else None

    @property
    def experts(self) -> ExpertSizes:
        return ExpertSizes(
            count=self.n_experts,
            active=self.n_active_experts,
            hidden_dim=self.expert_hidden_dim,
            shared_dim=self.n_shared_experts * self.expert_hidden_dim,
            score="sigmoid",
            route_scale=self.route_scale,
            groups=self.n_expert_groups,
            active_groups=self.n_active_groups,
            selection_bias=True,
        )


class DeepSeekAttention(nn.Module):
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

    A head's query and key are features without a position, then rotated ones; all heads share the
    rotated features of the key.
    """

    def __init__(self, sizes: DeepSeekV3Sizes):
        super().__init__()
        self.head_width, self.rotary_dim = sizes.head_width, sizes.qk_rope_head_dim
        self.latent_dim, self.value_dim = sizes.kv_lora_rank, sizes.v_head_dim
        scaling = sizes.rope_scaling
        self.score_factor = scaling.score_factor if scaling else 1.0
        q_dim = sizes.n_heads * sizes.head_width
        if sizes.q_lora_rank:
            self.wq_a = nn.Linear(sizes.dim, sizes.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(sizes.q_lora_rank, eps=LATENT_NORM_EPS)
            self.wq_b = nn.Linear(sizes.q_lora_rank, q_dim, bias=False)
        else:
            self.wq = nn.Linear(sizes.dim, q_dim, bias=False)
        self.wkv_a = nn.Linear(sizes.dim, self.latent_dim + self.rotary_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.latent_dim, eps=LATENT_NORM_EPS)
        key_value_dim = sizes.qk_nope_head_dim + sizes.v_head_dim
        self.wkv_b = nn.Linear(self.latent_dim, sizes.n_heads * key_value_dim, bias=False)
        self.shared_key = SharedKey()
        self.attend = CausalAttention()
        self.wo = nn.Linear(sizes.n_heads * sizes.v_head_dim, sizes.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q = self._queries(x).unflatten(-1, (-1, self.head_width))  # -> [B, T, H, K]
        q_plain, q_rotary = q.split([self.head_width - self.rotary_dim, self.rotary_dim], -1)
        q_rotary = apply_rope(pair_halves(q_rotary), rope)
        latent, k_rotary = self.wkv_a(x).split([self.latent_dim, self.rotary_dim], -1)
        k_rotary = self.shared_key(k_rotary, rope).expand(-1, -1, q.shape[2], -1)
        plain_dim = q_plain.shape[-1]
        keys_values = self.wkv_b(self.kv_norm(latent)).unflatten(
            -1, (-1, plain_dim + self.value_dim)
        )
        k_plain, v = keys_values.split([plain_dim, self.value_dim], -1)
        q = torch.cat([q_plain, q_rotary], -1)
        if self.score_factor != 1:
            q = q * self.score_factor
        k = torch.cat([k_plain, k_rotary], -1)
        # Few kernels take values of another width than the keys. Zeros change no output.
        v = F.pad(v, (0, self.head_width - self.value_dim))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)[..., : self.value_dim]
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, V] -> [B, T, H*V]

    def _queries(self, x: Tensor) -> Tensor:
        return self.wq_b(self.q_norm(self.wq_a(x))) if hasattr(self, "wq_a") else self.wq(x)


class SharedKey(nn.Module):
    """Rotates the key features that all heads share: [B, T, K] to [B, T, 1, K].

    A module, so that tensor parallelism can sum its gradient over the heads of all ranks.
    """

    def forward(self, k: Tensor, rope: Rope) -> Tensor:
        return apply_rope(pair_halves(k.unsqueeze(2)), rope)


class DeepSeekV3(RotaryDecoder):
    """The transformer of DeepSeek-V3."""

    def __init__(self, sizes: DeepSeekV3Sizes):
        def build_block(index: int) -> nn.Module:
            block = TransformerBlock if index < sizes.n_dense_layers else ExpertBlock
            return block(sizes, DeepSeekAttention(sizes))

        super().__init__(sizes, build_block, rotary_dim=sizes.qk_rope_head_dim)
