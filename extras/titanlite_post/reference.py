"""The reference of preference losses: log-probabilities of all pairs under the initial weights.

They are measured once by the run itself, under its layout, and stored in its folder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.data import SampleStream
from titanlite.distributed.collectives import (
    all_gather_tensor,
    gather_from_all_ranks,
    run_on_all_ranks,
    run_on_rank_0,
)
from titanlite.distributed.mesh import Mesh
from titanlite.errors import ConfigError
from titanlite.files import write_file_atomically
from titanlite.log import logger
from titanlite.training.engine import Engine
from titanlite_post.preferences import sum_answers

REFERENCE_FILE = "reference.npz"
_PREFIX = "source "  # of the names of arrays in it
ReferenceReader = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of the answers in the windows of each source."""

    of_source: dict[str, np.ndarray]  # fp32 [windows, P, 2]
    made_of: dict[str, Any]  # hashes of the weights and the data

    def reader(self, stream: SampleStream) -> ReferenceReader:
        """A function that gives those of positions in the order of samples, [sequences, P, 2]."""
        largest = max(table.shape[1] for table in self.of_source.values())

        def read(position: int, sequences: int) -> Tensor:
            out = np.zeros((sequences, largest, 2), np.float32)
            for row, place in enumerate(stream.locate(position, sequences)):
                pairs = self.of_source[place["source"]][place["sample"]]
                out[row, : len(pairs)] = pairs
            return torch.from_numpy(out)

        return read

    def write(self, path: Path) -> None:
        buffer = io.BytesIO()
        tables: dict[str, Any] = {_PREFIX + name: table for name, table in self.of_source.items()}
        np.savez(buffer, made_of=np.array(json.dumps(self.made_of)), **tables)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, buffer.getvalue())


def read_reference(path: Path, stream: SampleStream) -> Reference:
    """Read what `Reference.write` wrote; raises ConfigError unless it is of these data."""
    try:
        with np.load(path, allow_pickle=False) as file:
            made_of = json.loads(str(file["made_of"]))
            names = [name for name in file.files if name.startswith(_PREFIX)]
            tables = {name.removeprefix(_PREFIX): file[name] for name in names}
            data = made_of["data"]
    except (OSError, ValueError, LookupError, EOFError, TypeError) as error:
        raise ConfigError(
            f"{path}: cannot be read as log-probabilities of a reference ({error!r:.100}).",
            fix="Remove it before step 1, so that the run measures them again; later, restore it.",
        ) from None
    shapes = {s.name: s.samples(stream.seq_len) for s in stream.sources}
    if data != _describe_data(stream) or {n: len(t) for n, t in tables.items()} != shapes:
        raise ConfigError(
            f"{path}: is the reference of other data than data.sources.",
            fix="Use the data that it was made of, or remove it before step 1.",
        )
    return Reference(tables, made_of)


def _describe_data(stream: SampleStream) -> dict[str, Any]:
    contents = {source.name: source.source.fingerprint for source in stream.sources}
    return {"seq_len": stream.seq_len, **contents}


def hash_weights(model: nn.Module, device: torch.device) -> str:
    """A hash of all weights, the same under every layout; a collective."""
    own = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(device)
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        content = full.cpu().contiguous().flatten().view(torch.uint8).numpy()
        own[name] = xxhash.xxh3_128_hexdigest(content.data)
    merged = {name: digest for part in gather_from_all_ranks(own) for name, digest in part.items()}
    return xxhash.xxh3_128_hexdigest(json.dumps(merged, sort_keys=True).encode())


@dataclass(frozen=True)
class AllPairs:
    """All pairs of a run, to be measured with the present weights."""

    engine: Engine
    stream: SampleStream
    mesh: Mesh
    device: torch.device
    rows: int  # windows of a rank in each forward
    begin_forward: Callable[[], None]

    def measure(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, table) of each source; a collective."""
        for number, source in enumerate(self.stream.sources):
            windows = source.samples(self.stream.seq_len)
            assert windows is not None, "text has no pairs"
            together = self.rows * self.mesh.batch.size()
            parts = [self._measure(number, at, windows) for at in range(0, windows, together)]
            largest = max(part.shape[1] for part in parts)
            padded = [F.pad(part, (0, 0, 0, largest - part.shape[1])) for part in parts]
            yield source.name, torch.cat(padded)[:windows].numpy()

    def _measure(self, number: int, first: int, windows: int) -> Tensor:
        """The log-probabilities [windows of all ranks, P, 2] from window `first` on."""
        self.begin_forward()
        start = first + self.mesh.batch_rank * self.rows
        samples = np.arange(start, start + self.rows).clip(max=windows - 1)
        tokens = self.stream.sources[number].read_samples(samples, self.stream.seq_len)
        batch = self.engine.prepare(*map(torch.from_numpy, tokens)).to(self.device)
        log_probs, counts, _ = sum_answers(self.engine.token_losses(batch), batch.labels)
        both = torch.stack((log_probs, counts))
        if self.mesh.batch.size() > 1:
            gathered = all_gather_tensor(self.mesh.batch.get_group(), both)
            both = gathered.transpose(0, 1).flatten(1, 2)
        log_probs, counts = both.cpu()
        pairs = int(counts.amax((0, 2)).count_nonzero())  # the first ones of each window
        return log_probs[:, :pairs]


def obtain_reference(
    all_pairs: AllPairs,
    model: nn.Module,
    step: int,
    own_file: Path,
    given: Path | None,
) -> Reference:
    """The reference of a run at `step`: of its folder, of the file `given`, or measured now.

    A collective. Raises ConfigError on all ranks.
    """
    stream = all_pairs.stream
    if step:
        return run_on_all_ranks(lambda: read_reference(own_file, stream))
    made_of = {"weights": hash_weights(model, all_pairs.device), "data": _describe_data(stream)}

    def find() -> Reference | None:
        for path in filter(None, (given, own_file)):
            if path.exists():
                reference = read_reference(path, stream)
                if reference.made_of == made_of:
                    return reference
                if path == given:
                    raise ConfigError(
                        f"dpo.reference = {path}: was made of other weights.",
                        fix="Use the checkpoint.initial_load_path that it was made of, or another"
                        " file.",
                    )
        return None

    found = run_on_all_ranks(find)
    if found is None:
        logger.info("measuring the log-probabilities of the reference for all pairs, once")
    reference = found or Reference(dict(all_pairs.measure()), made_of)

    def store() -> None:
        for path in filter(None, (own_file, given)):
            reference.write(path)

    run_on_rank_0(store)
    return reference
