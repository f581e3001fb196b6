"""Connected components of a graph of documents, by alternating large-star and small-star.

Kiveris, Lattanzi, Mirrokni, Rastogi, Vassilvitskii: Connected components in MapReduce and beyond,
SoCC 2014. An operation on a document needs only its neighbours, so the documents can be divided
over tasks. The graph converges to stars: the centre is the first document of a cluster, and every
other document has one edge, to the centre.

Edges are int64 [2, edges]: documents and neighbours, sorted, each once, each edge in both
directions unless noted.
"""

from __future__ import annotations

import numpy as np

from titanlite_corpus.deduplicate.key_files import group_starts


def sort_edges(edges: np.ndarray) -> np.ndarray:
    """Sort by document, then neighbour; each edge once."""
    edges = edges[:, np.lexsort((edges[1], edges[0]))]
    new = np.ones(edges.shape[1], bool)
    new[1:] = (edges[:, 1:] != edges[:, :-1]).any(axis=0)
    return edges[:, new]


def in_both_directions(edges: np.ndarray) -> np.ndarray:
    """Sorted edges, each in both directions."""
    return sort_edges(np.concatenate([edges, edges[::-1]], axis=1))


def large_star(edges: np.ndarray) -> np.ndarray:
    """Connect the later neighbours of each document to the first among it and its neighbours.

    The result has each edge once, from the later to the earlier document.
    """
    document, neighbour = edges
    starts, sizes = _document_groups(document)
    first = np.repeat(np.minimum(neighbour[starts], document[starts]), sizes)
    later = neighbour > document
    return sort_edges(np.stack([neighbour[later], first[later]]))


def small_star(edges: np.ndarray) -> np.ndarray:
    """Connect each document and its earlier neighbours to the first of these.

    `edges` has each edge once, from the later to the earlier document.
    """
    document, neighbour = edges
    starts, sizes = _document_groups(document)
    first = np.repeat(neighbour[starts], sizes)
    other = neighbour != first
    own = np.stack([document[starts], neighbour[starts]])
    return in_both_directions(
        np.concatenate([own, np.stack([neighbour[other], first[other]])], axis=1)
    )


def count_unsettled(edges: np.ndarray) -> int:
    """Documents with an earlier neighbour and one more neighbour; 0 if all clusters are stars."""
    document, neighbour = edges
    starts, sizes = _document_groups(document)
    if not len(starts):
        return 0
    earlier = np.add.reduceat((neighbour < document).astype(np.int64), starts)
    return int(np.count_nonzero((earlier > 0) & (sizes > 1)))


def connect(edges: np.ndarray) -> np.ndarray:
    """The stars of all clusters."""
    while count_unsettled(edges):
        edges = small_star(large_star(edges))
    return edges


def _document_groups(document: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    starts = group_starts(document)
    return starts, np.diff(np.append(starts, len(document)))
