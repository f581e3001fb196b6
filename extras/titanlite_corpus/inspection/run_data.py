"""The data of a run, opened from its configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from titanlite.data import SampleStream
from titanlite.errors import ConfigError, DataError
from titanlite.job import JobConfig
from titanlite.job.data import open_job_stream, open_job_tokenizer
from titanlite.job.torchtitan_keys import MOVED, complete_table
from titanlite.models import FAMILIES
from titanlite.settings import load_config, raise_together
from titanlite_corpus.inspection.run_steps import ConsumedBatch, read_progress
from titanlite_corpus.inspection.samples import SampleRecord, describe_positions


@dataclass(frozen=True)
class RunData:
    """The training samples of a run."""

    path: Path  # its folder, or its TOML
    config: JobConfig
    stream: SampleStream

    def describe(self, position: int, count: int) -> list[SampleRecord]:
        """The samples of `count` positions; raises DataError."""
        if self.stream.tokenizes and self.path.is_dir():
            progress = read_progress(self.path, self.config)
            # otherwise all text before the position would be tokenized
            self.stream.restore_lanes(progress.lanes_before(position, self.stream.properties))
        formats = {source.name: source.format for source in self.config.data.sources}
        return describe_positions(self.stream, formats, position, count)

    def batch_of(self, step: int) -> ConsumedBatch:
        """The positions that a step consumed; raises ConfigError or DataError."""
        if not self.path.is_dir():
            raise ConfigError(
                f"{self.path}: is the TOML of a job; only a run has steps.",
                fix="Give the folder of the run, or a position.",
            )
        progress = read_progress(self.path, self.config)
        progress.check_data(step, self.stream.properties)
        return progress.batch_of(step)


def open_run_data(path: str) -> RunData:
    """Open the data of a run's folder or of a TOML, without verifying its content.

    Raises ConfigError or DataError.
    """
    place = Path(path)
    toml = place / "config.toml" if place.is_dir() else place
    if not toml.is_file():
        raise ConfigError(
            f"{path}: is not the folder of a run (it has no config.toml), nor a TOML.",
            fix="Give the run's job.dump_folder.",
        )
    config, problems = load_config(
        JobConfig, ["--job.config_file", str(toml)], MOVED, complete_table
    )
    raise_together(problems)
    data = dataclasses.replace(config.data, verify="off")
    sizes = FAMILIES[config.model.name].sizes_of(config.model)
    tokenizer = open_job_tokenizer(config)
    stream = open_job_stream(dataclasses.replace(config, data=data), sizes.vocab_size, tokenizer)
    if stream is None:
        raise DataError(f"{toml}: data.sources is empty: the job has no training data.")
    return RunData(place, config, stream)
