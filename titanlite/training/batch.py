"""One rank's sequences of a step: their tokens, and where their documents are."""

from __future__ import annotations

from collections.abc import Callable
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
    weights: Tensor | None = None  # [B, T] in fp32: of each label in the loss; None: 1

    @property
    def counted(self) -> tuple[int, int] | None:
        """(sequences that are not idle, all sequences), or None."""
        return self.own and (self.own.sequences, len(self.inputs))

    def pin_memory(self) -> Batch:
        """A copy in pinned memory, from which `to` copies to a GPU without waiting for it."""
        return self._convert(Tensor.pin_memory, DocumentIndex.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        return self._convert(lambda x: x.to(device, non_blocking=True), lambda x: x.to(device))

    def _convert(self, tensor: Callable[[Tensor], Tensor], index: Callable) -> Batch:
        weights = None if self.weights is None else tensor(self.weights)
        documents = tuple(map(index, self.documents))
        return Batch(tensor(self.inputs), tensor(self.labels), documents, self.own, weights)

    def split(self, sequences: int) -> list[Batch]:
        """Parts of `sequences` sequences, which are one micro-batch or several."""
        starts = range(0, len(self.inputs), sequences)
        count = -(-len(self.documents) // len(starts))  # micro-batches in a part
        return [
            Batch(
                self.inputs[start : start + sequences],
                self.labels[start : start + sequences],
                self.documents[n * count : (n + 1) * count],
                self.own and self.own.part(start, sequences),
                None if self.weights is None else self.weights[start : start + sequences],
            )
            for n, start in enumerate(starts)
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

    def select_targets(self, batch: Batch) -> dict[str, Tensor]:
        """The arguments `labels` and, if the batch has them, `weights` of a model."""
        weights = {} if batch.weights is None else {"weights": self.select(batch.weights)}
        return {"labels": self.select(batch.labels), **weights}

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
