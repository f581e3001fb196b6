"""The TensorBoard and Weights & Biases sinks; their packages are imported where they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.metrics.jsonl import MEASUREMENTS, ROLLBACK_EVENT

_GROUPS = {  # of keys of step records; a prefix groups the charts. The others are in train/
    "tokens_per_second": "speed",
    "tokens_per_second_per_device": "speed",
    "tflops_per_device": "speed",
    "mfu": "speed",
    "step_seconds": "speed",
    "data_seconds": "speed",
    "peak_memory_gib": "memory",
}


class TensorBoardSink:
    """Scalars such as train/loss, speed/mfu and validation/NAME/loss; see `_event_scalars`."""

    def __init__(self, folder: Path, completed_steps: int):
        self._folder = folder
        self._open(completed_steps)

    def _open(self, completed_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides earlier entries whose step is purge_step or later.
        self.writer = SummaryWriter(str(self._folder), purge_step=completed_steps + 1)

    def roll_back(self, step: int, rollbacks: int) -> None:
        self.close()
        self._open(step)

    def step(self, record: dict[str, Any]) -> None:
        self._write(record["step"], _scalars(record))

    def event(self, record: dict[str, Any]) -> None:
        self._write(record["step"], _event_scalars(record))

    def _write(self, step: int, scalars: Iterator[tuple[str, float]]) -> None:
        for name, value in scalars:
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # the writer buffers ten entries, which a kill would lose

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """The same scalars, sent to W&B; WANDB_PROJECT, WANDB_RUN_ID, WANDB_MODE … apply."""

    def __init__(self, folder: Path, job: dict[str, Any]):
        # The name is imported because a folder called wandb would import as a module, too.
        from wandb import init  # type: ignore[import-not-found]  # an optional package

        self.run = init(
            project=os.environ.get("WANDB_PROJECT", "titanlite"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            config=job,
            resume="allow",  # continues the run WANDB_RUN_ID, if that is set
        )
        self._last_step = 0  # the highest that was sent; W&B drops records of earlier steps

    def step(self, record: dict[str, Any]) -> None:
        self._log(record, dict(_scalars(record)))

    def event(self, record: dict[str, Any]) -> None:
        if scalars := dict(_event_scalars(record)):
            if record["event"] == ROLLBACK_EVENT:  # of an earlier checkpoint
                record = {**record, "step": max(record["step"], self._last_step)}
            self._log(record, scalars)

    def _log(self, record: dict[str, Any], scalars: dict[str, float]) -> None:
        self._last_step = max(record["step"], self._last_step)
        self.run.log(scalars, step=record["step"])

    def roll_back(self, step: int, rollbacks: int) -> None:
        pass  # W&B cannot go back: it drops records until the run has passed its last step again

    def close(self) -> None:
        self.run.finish()


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name not in ("step", "time") and value is not None:
            yield f"{_GROUPS.get(name, 'train')}/{name}", value


def _event_scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    event = record["event"]
    if event == "validation":
        for key in ("loss", "perplexity", "bits_per_byte"):
            if record.get(key) is not None:
                yield f"validation/{record['name']}/{key}", record[key]
    elif event == ROLLBACK_EVENT:
        yield "rollback/from_step", record["from_step"]
    elif event in MEASUREMENTS:
        for key, value in record.items():
            table = value if isinstance(value, dict) else {"": value}
            for name, number in table.items():
                if isinstance(number, float) and key != "time":
                    yield "/".join(filter(None, (event, key, name))), number
