"""The sizes of a model: what other packages read of them, and the keys that several families have.

The fields of a family's dataclass are its keys of [model]; their types say bounds and meaning.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from titanlite.settings import Range

Dim = Annotated[int, Range(1), "width of the residual stream"]
MAX_LAYERS = 1_000  # each takes memory before any weight is read, also of a stranger's file
Layers = Annotated[int, Range(1, MAX_LAYERS), "transformer blocks"]
Heads = Annotated[int, Range(1), "query heads per block"]
KeyValueHeads = Annotated[int, Range(1), "key-value heads per block; must divide n_heads"]
HeadDim = Annotated[int, Range(0), "elements per head; 0: dim / n_heads"]
HiddenDim = Annotated[int, Range(1), "width of the feed-forward layer"]
VocabSize = Annotated[int, Range(1), "token ids that the model has embeddings for"]
NormEps = Annotated[float, Range(0), "epsilon of the norms"]
RopeTheta = Annotated[float, Range(1), "base of the RoPE frequencies"]
TiedEmbeddings = Annotated[bool, "the output layer shares its weights with the embedding"]
Experts = Annotated[int, Range(1), "routed experts per block"]
ActiveExperts = Annotated[int, Range(1), "routed experts that compute a token"]
ExpertHiddenDim = Annotated[int, Range(1), "width of the hidden layer of one expert"]
Window = Annotated[int, Range(0), "tokens that a token attends to, itself too; 0: all"]
OwnWindow = Annotated[int, Range(1), "tokens that a token attends to, itself too"]
FullAttentionEvery = Annotated[
    int, Range(0), "every n-th block attends to all tokens, the others to model.window; 0: none"
]


def is_every(interval: int, block: int) -> bool:
    """Whether block number `block` is one of every `interval` blocks; never, if that is 0."""
    return interval > 0 and (block + 1) % interval == 0


def prediction_layers(sizes: Any) -> int:
    """Blocks for multi-token prediction, behind the others; 0 in families that have none."""
    return getattr(sizes, "mtp_layers", 0)


class ModelSizes(Protocol):
    """The sizes of one model that other packages read; each family has a frozen dataclass.

    `head_width` is the elements of a query or key head; the keys of the others are above.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def dim(self) -> int: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def n_heads(self) -> int: ...

    @property
    def n_kv_heads(self) -> int: ...

    @property
    def head_width(self) -> int: ...

    @property
    def hidden_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def tied_embeddings(self) -> bool: ...


SizesT = TypeVar("SizesT", bound=ModelSizes)
