"""The sizes of a model: what other packages read of them, and the keys that several families have.

A family has a frozen dataclass of sizes, whose fields are its keys of [model]. Their types say the
bounds of each, and what it means, for users.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from titanlite.settings import Range

Dim = Annotated[int, Range(1), "width of the residual stream"]
Layers = Annotated[int, Range(1, 1_000), "transformer blocks"]
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


class ModelSizes(Protocol):
    """The sizes of one model that other packages read; each family has a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def dim(self) -> int:
        """Width of the residual stream."""

    @property
    def n_layers(self) -> int:
        """Transformer blocks."""

    @property
    def n_heads(self) -> int:
        """Query heads per block."""

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads per block."""

    @property
    def head_width(self) -> int:
        """Elements per head."""

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layer."""

    @property
    def vocab_size(self) -> int:
        """Token ids that the model has embeddings for."""

    @property
    def norm_eps(self) -> float:
        """Epsilon of the norms."""

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer shares its weights with the embedding."""


SizesT = TypeVar("SizesT", bound=ModelSizes)
