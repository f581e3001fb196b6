"""Multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2): blocks after a model
that predict further tokens, to train it; nothing else uses them.

With h_0, the output of the last norm, and depth k = 1, 2, …

    h_k = block_k(proj_k([norm_k(embedding(t_{i+k})); norm'_k(h_{k-1})]))
    logits of t_{i+k+1} = output(norm''_k(h_k))

at position i. All depths use the model's embedding and output layer, its positions and documents.
The embedding comes first, as in the published weights (vLLM's deepseek_mtp.py), not in the report.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.documents import DocumentIndex, document_positions
from titanlite.labels import IGNORE_INDEX
from titanlite.models.sizes import ModelSizes, prediction_layers
from titanlite.settings import Range

PredictionLayers = Annotated[
    int, Range(0, 16), "blocks for multi-token prediction, each of a further token; for training"
]  # bounded: a stranger's file can set it, and each block takes memory before a weight is read
OnePredictionLayer = Annotated[int, Range(0, 1), "block for multi-token prediction; for training"]
EMBEDDING_COPY = "mtp_embeddings"  # module of the last pipeline stage, tied to the embedding
PREDICTION_PLAN = {
    EMBEDDING_COPY: "vocab_in",
    "layers.*.embedding_norm": "sequence",
    "layers.*.hidden_norm": "sequence",
    "layers.*.proj": "sequence_linear",
    "layers.*.norm": "sequence",
}


def shift_ahead(inputs: Tensor, labels: Tensor, depths: int, document_end: int | None) -> Tensor:
    """[B, T, depths, 2]: for each depth k, the inputs and labels [B, T] k tokens further on.

    A label is ignored after the end, and where it is in another document than the token at its
    position; documents end with the id `document_end`, or are packed. None: there is one.
    """
    pairs, place = [], None
    if document_end is not None:  # of each target, and of the first token, in their documents
        padded = F.pad(inputs, (0, 1)), document_end, F.pad(labels, (0, 1), value=IGNORE_INDEX)
        place = document_positions(*padded)
    for depth in range(1, depths + 1):
        targets = labels[:, depth:]
        if place is not None:
            targets = targets.where(place[:, depth + 1 :] > depth, IGNORE_INDEX)
        targets = F.pad(targets, (0, depth), value=IGNORE_INDEX)
        pairs.append(torch.stack((F.pad(inputs[:, depth:], (0, depth)), targets), -1))
    return torch.stack(pairs, 2)


class JoiningLinear(nn.Linear):
    """Projects hidden states and embeddings, side by side, to hidden states; never in Float8."""


class PredictionBlock(nn.Module):
    """One depth: hidden states [B, T, D] and the embeddings of tokens further on to hidden states.

    Returns those of the block, for the next depth, and their norm, for the output layer.
    """

    def __init__(self, dim: int, block: nn.Module, norm: nn.Module):
        super().__init__()
        self.embedding_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.proj = JoiningLinear(2 * dim, dim, bias=False)
        self.block = block
        self.norm = copy.deepcopy(norm)

    def forward(
        self,
        x: Tensor,
        embeddings: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        documents: DocumentIndex | None,
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat((self.embedding_norm(embeddings), self.hidden_norm(x)), -1)
        x = self.block(self.proj(joined), rope, documents)
        return x, self.norm(x)


def add_predictors(
    layers: nn.ModuleDict,
    sizes: ModelSizes,
    build_block: Callable[[int], nn.Module],
    norm: nn.Module,
) -> None:
    """Add the prediction blocks after the others."""
    for index in range(sizes.n_layers, sizes.n_layers + prediction_layers(sizes)):
        layers[str(index)] = PredictionBlock(sizes.dim, build_block(index), norm)


def find_predictors(layers: nn.ModuleDict) -> dict[str, PredictionBlock]:
    """The prediction blocks of a model or stage, in order."""
    return {name: block for name, block in layers.items() if isinstance(block, PredictionBlock)}


def embed_ahead(model: Any, x: Tensor, ahead: Tensor) -> Sequence[Tensor]:
    """The embeddings of tokens x [B, T], or x if they are hidden states, then those of `ahead`.

    In one call, as FSDP gathers the weights in each.
    """
    further = ahead[..., 0].unbind(-1)
    if model.tok_embeddings is None:
        return [x, *model.mtp_embeddings(torch.cat(further)).split(len(x))]
    return model.embed(torch.cat((x, *further))).split(len(x))


def predict_ahead(
    blocks: Iterable[PredictionBlock],
    x: Tensor,
    embedded: Sequence[Tensor],
    ropes: Sequence[tuple[Tensor, Tensor] | None],
    documents: DocumentIndex | None,
) -> Tensor:
    """What the output layer reads: the model's hidden states x [B, T, D], then each depth's.

    `embedded`: the embeddings of the tokens of each depth. Returns [(1 + depths) * B, T, D].
    """
    outputs, hidden = [x], x
    for block, embeddings, rope in zip(blocks, embedded, ropes, strict=True):
        hidden, out = block(hidden, embeddings, rope, documents)
        outputs.append(out)
    return torch.cat(outputs)


def chunks_of_depths(
    labels: Tensor, chunk: int, weight: float
) -> Iterator[tuple[slice, float | None]]:
    """(rows of one chunk of tokens, factor of its loss; None: that of the model itself).

    `labels` [1 + depths, N]: the model's own, then those of each depth.
    """
    parts, tokens = labels.shape
    chunk = chunk or max(1, tokens)
    for depth in range(parts):
        factor, end = weight / (parts - 1) if depth else None, (depth + 1) * tokens
        for start in range(depth * tokens, end, chunk):
            yield slice(start, min(start + chunk, end)), factor


def scale_depth_(factor: float | None, *tensors: Tensor | None) -> None:
    """Multiply tensors by a factor of `chunks_of_depths`, in place."""
    for tensor in tensors:
        if factor is not None and tensor is not None:
            tensor.mul_(factor)


def sums_of_depths(token_losses: Tensor, labels: Tensor) -> Tensor | None:
    """[2, depths] in fp32: the loss and the valid labels of each depth, of all [1 + depths, N]."""
    if len(labels) == 1:
        return None
    return torch.stack((token_losses.view_as(labels), (labels >= 0).float())).sum(2)[:, 1:]


def with_prediction_names(
    names: Mapping[str, str], block: str, own: Mapping[str, str]
) -> dict[str, str]:
    """Hugging Face's `names` of parameters, with those of prediction blocks.

    `block` replaces "model.layers.*." in the names of the inner block; `own`: module -> its name.
    """
    path, stored = "layers.*.", "model.layers.*."
    inner = {
        name.replace(path, f"{path}block."): theirs.replace(stored, block)
        for name, theirs in names.items()
        if name.startswith(path)
    }
    return {**names, **inner, **{f"{path}{name}.weight": theirs for name, theirs in own.items()}}


DEEPSEEK_NAMES = {  # of DeepSeek-V3 and GLM-4.5, whose folders repeat the embedding and the output
    "embedding_norm": "model.layers.*.enorm.weight",
    "hidden_norm": "model.layers.*.hnorm.weight",
    "proj": "model.layers.*.eh_proj.weight",
    "norm": "model.layers.*.shared_head.norm.weight",
    "tok_embeddings": "model.layers.*.embed_tokens.weight",
    "output": "model.layers.*.shared_head.head.weight",
}
