"""Which parameters are hidden matrices: weights of linear layers and experts inside the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titanlite.models import ModelSizes, ModelSpec
from titanlite.optim.groups import matches_any


@dataclass(frozen=True)
class MatrixFacts:
    """Facts about a model that optimizers of hidden matrices need."""

    spec: ModelSpec[Any]
    sizes: ModelSizes
    compute_dtype: torch.dtype = torch.float32  # of the model's matmuls

    def is_hidden(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a parameter is a matrix inside a block, or a stack of them: experts."""
        return len(shape) in (2, 3) and name.startswith(f"{self.spec.blocks_path}.")

    def head_rows(self, name: str) -> int:
        """Rows of a matrix that belong to one head; 0 if its rows are not heads."""
        patterns = [f"{layer}.weight" for layer in self.spec.head_projections]
        return self.sizes.head_width if matches_any(name, patterns) else 0
