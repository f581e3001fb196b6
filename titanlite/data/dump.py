"""Write the samples of a batch to a file: their sources, tokens and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titanlite.data.stream import SampleStream
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import UserError
from titanlite.files import write_file_atomically
from titanlite.log import logger

MAX_FILES = 100  # in the folder; enough to find the cause, and a limit for the disk
MAX_TOKENS = 1 << 18  # of a file; later samples are listed without tokens and text


class BatchDump:
    """Writes batches to `folder/step-N.json`."""

    def __init__(self, folder: Path, stream: SampleStream):
        self._folder, self._stream = folder, stream

    def write(self, step: int, position: int, samples: int) -> str:
        """Write the batch of `samples` from `position` on; returns the path; "" if not written."""
        path = self._folder / f"step-{step}.json"
        try:
            if not path.exists() and len(list(self._folder.glob("step-*.json"))) >= MAX_FILES:
                return ""
            self._folder.mkdir(parents=True, exist_ok=True)
            described = self._describe(position, samples)
            content = {"step": step, "position": position, "samples": described}
            write_file_atomically(path, json.dumps(content, ensure_ascii=False, indent=1).encode())
        except (OSError, UserError) as error:
            logger.warning("%s: the batch of step %d was not written: %s", path, step, error)
            return ""
        return str(path)

    def _describe(self, position: int, count: int) -> list[dict[str, Any]]:
        stream = self._stream
        samples = stream.locate(position, count)
        shown = max(1, MAX_TOKENS // stream.seq_len)
        shown = stream.count_near(position, min(shown, count))
        inputs, labels = stream.read(position, shown)
        for sample, ids, targets in zip(samples, inputs, labels, strict=False):
            add_content(sample, ids.tolist(), targets.tolist(), stream.tokenizer)
        return samples


def add_content(
    sample: dict[str, Any], inputs: list[int], labels: list[int], tokenizer: Tokenizer | None
) -> None:
    """Add the ids and the text of a sample, and how many of its labels are ignored, if any.

    The ids are the inputs and the last label, unless that is ignored.
    """
    sample["tokens"] = inputs + [label for label in labels[-1:] if label >= 0]
    if ignored := sum(label < 0 for label in labels):
        sample["ignored_labels"] = ignored
    if tokenizer is not None:
        sample["text"] = tokenizer.decode(sample["tokens"])
