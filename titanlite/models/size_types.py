"""Sizes that several families have: the bounds of each, and what it means, for users.

The fields of a family's dataclass of sizes have these types, or one of the same kind of its own.
They are the keys of [model] under that family.
"""

from __future__ import annotations

from typing import Annotated

from titanlite.settings import Range

Dim = Annotated[int, Range(1), "width of the residual stream"]
Layers = Annotated[int, Range(1, 10_000), "transformer blocks"]
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
