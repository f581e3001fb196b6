"""Cross-entropy as a sum, because only a sum means the same however tokens are spread."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a label that is not learned from


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The summed loss in nats, fp32, of logits [B, T, V] at labels [B, T] that are not IGNORED."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def valid_tokens(labels: Tensor) -> Tensor:
    """How many labels are learned from, as a 0-d integer tensor: no host synchronisation."""
    return (labels != IGNORED).sum()
