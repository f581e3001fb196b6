"""What decoder-only families share: SwiGLU, and everything around their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.kernels.attention import KeyValueCache
from titanlite.kernels.delta_rule import DeltaCache, DeltaRule
from titanlite.kernels.documents import DocumentIndex, IndexDocuments
from titanlite.models import mtp
from titanlite.models.loss import OutputLayer
from titanlite.models.rope import RopeScaling, rope_cos_sin
from titanlite.models.sizes import ModelSizes, prediction_layers

CosSin = tuple[Tensor, Tensor]  # cosines and sines of `rope_cos_sin`
RopeSettings = tuple[int, float, RopeScaling | None]
# features of a head that are rotated, base of the frequencies, extension of the context


class TokenEmbedding(nn.Embedding):
    """Token ids [B, T] to embeddings [B, T, D]."""

    def forward(self, tokens: Tensor) -> Tensor:
        return look_up(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """Add the learned vectors of `positions` [T] or [B, T] to hidden states [B, T, D]."""

    def __init__(self, positions: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(positions, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + look_up(positions, self.weight)


def look_up(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight` [V, D] at `ids` [...]."""
    if weight.is_cuda or weight.dtype == torch.float32:
        return F.embedding(ids, weight)
    return _LowPrecisionLookup.apply(ids, weight)


class _LowPrecisionLookup(torch.autograd.Function):
    """F.embedding in bf16 or fp16 on a CPU, with a backward that rounds only the final sum.

    Torch's backward adds the gradients of a token one by one in the dtype of the weights: for 2,000
    occurrences of one token the result was off by 6 to 48 % in bfloat16, for 16,384 by 93 %. Its
    CUDA kernels already sum in fp32; the one for at most 3,072 tokens rounds after every 32 of
    them, which causes errors of about 1 %.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab_size = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        # This operator has a DTensor sharding rule, as F.embedding has.
        embedding_backward = torch.ops.aten.embedding_dense_backward
        weight_grad = embedding_backward(grad.float(), tokens, ctx.vocab_size, -1, False)
        return None, weight_grad.to(grad.dtype)


class ZeroCentredNorm(nn.RMSNorm):
    """RMSNorm with a factor of 1 + weight, so that weight decay draws the factor to 1."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm with another weight [D]."""
        return _ZeroCentredNorm.apply(x, weight, self.eps)


class _ZeroCentredNorm(torch.autograd.Function):
    """In fp32, because 1 + weight would be rounded in bf16, but saves x in its dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * (1 + weight.float())).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normalized, grad = x.float() * scale, grad.float()
        weight_grad = (grad * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * (1 + weight.float())
        inner = (grad * normalized).mean(-1, keepdim=True)
        return (scale * (grad - normalized * inner)).to(x.dtype), weight_grad, None


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202), or with another activation."""

    def __init__(self, dim: int, hidden_dim: int, activate: Callable[[Tensor], Tensor] = F.silu):
        super().__init__()
        self.activate = activate
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activate(self.w1(x)) * self.w3(x))


class Decoder(nn.Module):
    """Tokens [B, T] to logits [B, T, V], or, with labels [B, T], to their summed loss.

    `build_block` builds the block of an index, which is called with (hidden states [B, T, D], rope,
    documents, cache). `rotary` gives the settings of a block's RoPE, or None for none. `norm`,
    after the blocks, is an RMSNorm by default. A pipeline stage has only its own blocks in
    `layers`; other modules that it does not own are None.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        build_block: Callable[[int], nn.Module],
        rotary: Callable[[int], RopeSettings | None] = lambda block: None,
        norm: nn.Module | None = None,
        pos_embeddings: nn.Module | None = None,
    ):
        super().__init__()
        self.sizes = sizes
        blocks = range(sizes.n_layers + prediction_layers(sizes))
        self.rotary = {str(index): rotary(index) for index in blocks}
        self.index_documents: IndexDocuments | None = None
        self.embedding_factor = 1.0  # of the embeddings, but not of the output's weights
        self.tok_embeddings = TokenEmbedding(sizes.vocab_size, sizes.dim)
        self.pos_embeddings = pos_embeddings  # before the blocks, as in execution
        self.register_module(mtp.EMBEDDING_COPY, None)  # of pipeline stages
        self.layers = nn.ModuleDict({str(i): build_block(i) for i in range(sizes.n_layers)})
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps) if norm is None else norm
        mtp.add_predictors(self.layers, sizes, build_block, self.norm)
        self.output = OutputLayer(sizes.dim, sizes.vocab_size)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def use_document_mask(self, index_documents: IndexDocuments) -> None:
        """Attend within documents only; see `SupportsDocuments`."""
        self.index_documents = index_documents

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        caches: Mapping[str, KeyValueCache | DeltaCache] | None = None,
        labels: Tensor | None = None,
        documents: DocumentIndex | None = None,
        ahead: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """`positions` [T] or [B, T] count from the start of each sequence, or of each document in
        it; default: 0, 1, 2, … To derive missing `documents` from them, the host waits for a GPU.
        `ahead`: see `shift_ahead`; with it, the loss is also that of multi-token prediction.
        `weights` [B, T]: of the labels, see `OutputLayer.forward`.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        ropes = self._compute_ropes(positions)
        if documents is None and self.index_documents is not None:
            documents = self.index_documents(positions.expand(len(tokens), -1)).to(tokens.device)
        predictors = {} if labels is None or ahead is None else mtp.find_predictors(self.layers)
        if predictors and ahead is not None:
            x, *embedded = mtp.embed_ahead(self, tokens, ahead)
        else:
            x = tokens if self.tok_embeddings is None else self.embed(tokens)
        x = x if self.pos_embeddings is None else self.pos_embeddings(x, positions)
        for name, block in self.layers.items():
            if not isinstance(block, mtp.PredictionBlock):
                cache = None if caches is None else caches[name]
                x = block(x, ropes.get(self.rotary[name]), documents, cache)
        x = x if self.norm is None else self.norm(x)
        if predictors and ahead is not None and labels is not None:
            rope = [ropes.get(self.rotary[name]) for name in predictors]
            x = mtp.predict_ahead(predictors.values(), x, embedded, rope, documents)
            labels = torch.cat((labels, *ahead[..., 1].unbind(-1)))
        if self.output is None:
            return x
        return self.output(x, labels=labels, depths=len(predictors), weights=weights)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [B, T, D] of tokens [B, T]."""
        assert self.tok_embeddings is not None
        x = self.tok_embeddings(tokens)
        if self.embedding_factor == 1:
            return x
        # rounded to the dtype of the embeddings, as the published models do
        return x * torch.tensor(self.embedding_factor, dtype=x.dtype, device="cpu").item()

    def _compute_ropes(self, positions: Tensor) -> dict[RopeSettings | None, CosSin]:
        """Cosines and sines for each of the settings that blocks have; most models have one."""
        settings = dict.fromkeys(self.rotary[name] for name in self.layers)
        return {rotary: rope_cos_sin(positions, *rotary) for rotary in settings if rotary}


def build_caches(layers: nn.ModuleDict, capacity: int) -> dict[str, KeyValueCache | DeltaCache]:
    """An empty cache for each block, for the generation of at most `capacity` tokens."""

    def build(block: nn.Module) -> KeyValueCache | DeltaCache:
        is_linear = any(isinstance(module, DeltaRule) for module in block.modules())
        return DeltaCache() if is_linear else KeyValueCache(capacity)

    return {name: build(block) for name, block in layers.items()}


def check_heads(sizes: ModelSizes) -> Iterator[ConfigError]:
    """Reject numbers of heads that do not fit together, and odd head widths."""
    if sizes.n_heads % sizes.n_kv_heads:
        yield ConfigError(
            f"model.n_kv_heads = {sizes.n_kv_heads}: does not divide model.n_heads ="
            f" {sizes.n_heads}; each key-value head serves the same number of query heads.",
            fix=f"Use a divisor of {sizes.n_heads}.",
        )
    if sizes.head_width * sizes.n_heads != sizes.dim and not getattr(sizes, "head_dim", 0):
        settable = ", or set model.head_dim" if "head_dim" in sizes.__dataclass_fields__ else ""
        yield ConfigError(
            f"model.dim = {sizes.dim}: is not a multiple of model.n_heads = {sizes.n_heads}.",
            fix=f"Change one of them{settable}.",
        )
    elif sizes.head_width % 2 and "rope_theta" in sizes.__dataclass_fields__:
        key = "model.head_dim" if getattr(sizes, "head_dim", 0) else "model.dim / model.n_heads"
        yield ConfigError(
            f"{key} = {sizes.head_width}: RoPE rotates pairs of channels, so it must be even."
        )
