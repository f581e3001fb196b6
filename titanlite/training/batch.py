"""One rank's sequences of a step: their tokens, and where their documents are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.elastic.rows import RankSlice
from titanlite.kernels.documents import DocumentIndex, IndexDocuments, document_positions
from titanlite.models.mtp import shift_ahead
from titanlite.parallelize.context_tiles import SequenceShard


@dataclass(frozen=True)
class Batch:
    """Full sequences [B, T], the same on all ranks that split these sequences."""

    inputs: Tensor
    labels: Tensor
    documents: tuple[DocumentIndex, ...] = ()  # of each micro-batch, for this rank's tokens
    # empty: the mask is causal, or the model finds the documents itself, but waits for the device
    own: RankSlice | None = None  # the sequences that are not idle, which come first; None: all

    @property
    def counted(self) -> tuple[int, int] | None:
        """(sequences that are not idle, all sequences), or None."""
        return self.own and (self.own.sequences, len(self.inputs))

    def pin_memory(self) -> Batch:
        """A copy in pinned memory, from which `to` copies to a GPU without waiting for it."""
        documents = tuple(index.pin_memory() for index in self.documents)
        return Batch(self.inputs.pin_memory(), self.labels.pin_memory(), documents, self.own)

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        inputs, labels = (x.to(device, non_blocking=True) for x in (self.inputs, self.labels))
        return Batch(inputs, labels, tuple(index.to(device) for index in self.documents), self.own)

    def split(self, sequences: int) -> list[Batch]:
        """Parts of `sequences` sequences, which are one micro-batch or several."""
        tokens = list(zip(self.inputs.split(sequences), self.labels.split(sequences), strict=True))
        count = -(-len(self.documents) // len(tokens))  # micro-batches in a part
        own = [self.own and self.own.part(n * sequences, sequences) for n in range(len(tokens))]
        return [
            Batch(inputs, labels, self.documents[n * count : (n + 1) * count], own[n])
            for n, (inputs, labels) in enumerate(tokens)
        ]


@dataclass(frozen=True)
class TokenSelector:
    """Which tokens of a batch this rank computes, their positions and their documents."""

    sequence: SequenceShard
    document_end_id: int | None = None
    index_documents: IndexDocuments | None = None  # None: causal mask
    prediction_layers: int = 0  # depths of multi-token prediction

    def prepare(self, inputs: Tensor, labels: Tensor, microbatch_size: int) -> Batch:
        """A batch with the documents of each micro-batch, from tensors in host memory."""
        if self.index_documents is None:
            return Batch(inputs, labels)
        positions = self.positions(inputs, labels).expand(len(inputs), -1)
        documents = map(self.index_documents, positions.split(microbatch_size))
        return Batch(inputs, labels, tuple(documents))

    def select(self, tokens: Tensor) -> Tensor:
        """This rank's part of `tokens`: [B, T] -> [B, T / cp]."""
        return self.sequence.select(tokens)

    def look_ahead(self, batch: Batch) -> dict[str, Tensor]:
        """The argument `ahead` of a model that predicts further tokens; else nothing."""
        end, depths = self.document_end_id, self.prediction_layers
        ahead = shift_ahead(batch.inputs, batch.labels, depths, end) if depths else None
        return {} if ahead is None else {"ahead": self.select(ahead)}

    def positions(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Positions of this rank's tokens of `inputs` [B, T]; `labels` mark packed documents.

        [T / cp] if all sequences have the same positions, else [B, T / cp].
        """
        if self.document_end_id is None:
            return self.sequence.positions(inputs.shape[1], inputs.device)
        return self.sequence.select(document_positions(inputs, self.document_end_id, labels))
