"""Text that is tokenized while a run reads it: what checkpoints record of it, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite.data import SampleStream, merge_positions
from titanlite.distributed.collectives import gather_from_all_ranks
from titanlite.log import logger
from titanlite.training import TrainState

WAITING_SHARE = 0.1  # of the time of a step, spent waiting for the batch: from it on, advise


def gather_data_progress(stream: SampleStream, state: TrainState) -> dict[str, Any]:
    """What a checkpoint records of the data beside the position: how far text was tokenized.

    Collective if a source is tokenized while it is read; else it is empty.
    """
    if not stream.tokenizes:
        return {}
    return {"lanes": merge_positions(gather_from_all_ranks(stream.lane_positions(state.position)))}


class TokenizingAdvice:
    """A metric sink that logs once how to prepare the text, if steps wait for batches."""

    def __init__(self, sources: Sequence[tuple[str, str]], tokenizer: str):
        """`sources`: (name, path) of those that are tokenized while they are read."""
        self._sources, self._tokenizer, self._given = sources, tokenizer, False

    def step(self, record: dict[str, Any]) -> None:
        """Look at the times of a step record."""
        waited = record["data_seconds"]
        share = waited / max(waited + record["step_seconds"], 1e-9)
        # The first batch of a run waits for files to be opened.
        if self._given or record["step"] == 1 or share < WAITING_SHARE:
            return
        self._given = True
        for name, path in self._sources:
            logger.warning(
                'steps wait %.0f %% of their time for batches: "%s" is tokenized while it is read.'
                " To tokenize it once: python scripts/prepare_data.py '%s' --tokenizer %s --out"
                ' outputs/%s, then set its path = "outputs/%s/train" and remove format',
                100 * share,
                name,
                path,
                self._tokenizer,
                name,
                name,
            )

    def event(self, record: dict[str, Any]) -> None: ...

    def roll_back(self, step: int, rollbacks: int) -> None: ...

    def close(self) -> None: ...
