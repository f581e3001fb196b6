"""Context parallel, the plan: the tokens of each rank, and the tiles of attention it computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ALL = slice(None)


@dataclass(frozen=True)
class SequenceShard:
    """The tokens that a rank has of every sequence: one chunk, or two if balanced.

    A causal query near the end of a sequence attends to more keys than one near its start. With the
    i-th chunk from the front and the i-th from the back, every rank has the same work.
    """

    rank: int
    ranks: int
    balanced: bool

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Positions [length / ranks] of this rank's tokens in sequences of `length` tokens."""
        return self.select(torch.arange(length, device=device)[None])[0]

    def select(self, batch: Tensor) -> Tensor:
        """This rank's tokens [B, T / ranks] of a batch of full sequences [B, T]."""
        if self.ranks == 1:
            return batch
        chunks = self._chunks_of_sequence(batch.shape[1])
        return torch.cat([batch[:, chunk] for chunk in chunks], dim=1)

    def chunks(self, tokens: int) -> list[tuple[int, slice]]:
        """(position in the sequence, indices in this rank's `tokens`) of each chunk."""
        chunks = self._chunks_of_sequence(tokens * self.ranks)
        size = tokens // len(chunks)
        return [(c.start, slice(n * size, (n + 1) * size)) for n, c in enumerate(chunks)]

    def _chunks_of_sequence(self, length: int) -> list[slice]:
        count = self.ranks * (2 if self.balanced else 1)
        size = length // count
        assert size * count == length, f"{length} tokens do not divide into {count} chunks"
        numbers = [self.rank, count - 1 - self.rank] if self.balanced else [self.rank]
        return [slice(n * size, (n + 1) * size) for n in numbers]


class AttentionTile(NamedTuple):
    """Queries of this rank that all attend to the same keys of one rank."""

    sequences: slice  # of the batch
    queries: slice
    keys: slice
    causal: bool  # queries and keys are the same tokens; each attends to those up to itself
    offset: int = 0  # position of the first query, counted from the first key; see `clip_to_window`


# Rank -> the tiles of this rank's queries with the keys of that rank. Every query is in exactly one
# causal tile, which has keys of this rank, and comes before the other tiles of its queries.
TilesWithKeysOf = Callable[[int], Sequence[AttentionTile]]


def causal_tiles(shard: SequenceShard, tokens: int, source: int) -> list[AttentionTile]:
    """Tiles of a causal mask with the keys of rank `source`; `tokens` of a rank, per sequence."""
    rank, half = shard.rank, tokens // 2
    if source == rank:
        return [AttentionTile(ALL, ALL, ALL, causal=True)]
    if not shard.balanced:
        return [AttentionTile(ALL, ALL, ALL, causal=False)] if source < rank else []
    # The first chunk of `source` precedes both chunks of this rank, its second chunk neither.
    if source < rank:
        return [AttentionTile(ALL, ALL, slice(0, half), causal=False)]
    # Both chunks of `source` precede the second chunk of this rank, and follow the first.
    return [AttentionTile(ALL, slice(half, tokens), ALL, causal=False)]


def window_tiles(
    shard: SequenceShard, tokens: int, window: int, source: int
) -> list[AttentionTile]:
    """As `causal_tiles`, with a sliding window: positions are consecutive in each tile."""
    tiles, queries = [], shard.chunks(tokens)
    if source == shard.rank:
        tiles = [AttentionTile(ALL, chunk, chunk, causal=True) for _, chunk in queries]
    for start, chunk in queries:
        for key_start, keys in replace(shard, rank=source).chunks(tokens):
            if key_start < start:
                tile = AttentionTile(ALL, chunk, keys, False, start - key_start)
                tiles += clip_to_window(tile, window)
    return tiles


def clip_to_window(tile: AttentionTile, window: int) -> list[AttentionTile]:
    """A tile without the queries and keys that are further apart than a window; [] if all are.

    Every query that is left attends to a key. `window` 0: no limit.
    """
    if not window or tile.causal:
        return [tile]
    n_queries = tile.queries.stop - tile.queries.start
    n_keys = tile.keys.stop - tile.keys.start
    n_queries = min(n_queries, window - tile.offset + n_keys - 1)  # the last sees the last key only
    first_key = max(0, tile.offset - window + 1)  # the first that the first query sees
    if n_queries <= 0:
        return []
    queries = slice(tile.queries.start, tile.queries.start + n_queries)
    keys = slice(tile.keys.start + first_key, tile.keys.stop)
    return [tile._replace(queries=queries, keys=keys, offset=tile.offset - first_key)]


def decode_document_tiles(table: Tensor, window: int) -> dict[int, list[AttentionTile]]:
    """Source rank -> tiles of a causal mask within each document; see `encode_document_tiles`."""
    by_source: dict[int, list[AttentionTile]] = defaultdict(list)
    for source, causal, *bounds, offset in table.tolist():
        sequences, queries, keys = (slice(*bounds[n : n + 2]) for n in (0, 2, 4))
        tile = AttentionTile(sequences, queries, keys, bool(causal), offset)
        by_source[source] += clip_to_window(tile, window)
    return by_source


def encode_document_tiles(shard: SequenceShard, positions: Tensor) -> Tensor:
    """Table [N, 9] of the tiles of all documents, on the CPU; as a tensor it can enter a graph.

    Columns: source rank, causal, start and stop of the sequences, of the queries and of the keys,
    and the tile's offset. `positions` [B, T] are those of this rank's tokens in their documents.

    The tokens of a document within one chunk form a causal tile. If the document began before the
    chunk, they also attend to its tokens in earlier chunks, on any rank. Waits for `positions`.
    """
    tokens, table = positions.shape[1], []
    chunks_of_all_ranks = [
        (rank, start, chunk)
        for rank in range(shard.ranks)
        for start, chunk in replace(shard, rank=rank).chunks(tokens)
    ]
    for row, row_positions in enumerate(positions.cpu()):
        earlier_tiles = []
        for start, chunk in shard.chunks(tokens):
            begins = (row_positions[chunk] == 0).nonzero().flatten().add(chunk.start).tolist()
            bounds = [*dict.fromkeys([chunk.start, *begins]), chunk.stop]  # of documents
            table += [(shard.rank, 1, row, row + 1, *own, *own, 0) for own in pairwise(bounds)]
            # Position in the sequence where the first document of this chunk begins.
            document_start = start - row_positions[chunk.start].item()
            for rank, other_start, other in chunks_of_all_ranks:
                first = max(document_start, other_start)
                stop = min(start, other_start + other.stop - other.start)
                if first < stop:
                    offset = other.start - other_start
                    keys = (first + offset, stop + offset)
                    tile = (rank, 0, row, row + 1, *bounds[:2], *keys, start - first)
                    earlier_tiles.append(tile)
        table += earlier_tiles
    return torch.tensor(table, dtype=torch.int64)
