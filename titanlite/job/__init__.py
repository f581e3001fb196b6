"""The whole job: what a TOML says, checked, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint import Place, checkpoint_place
from titanlite.data import Stream, ValidationSet
from titanlite.distributed.mesh import Degrees, degrees_of
from titanlite.distributed.session import launched_ranks
from titanlite.job.config import FACTS, MOVED, JobConfig
from titanlite.job.inputs import stream_of, texts_of, tokenizer_of
from titanlite.job.rules import global_batch_of, outside_problems, pipeline_of, problems_of
from titanlite.models import FAMILIES, Family
from titanlite.optim import LossScale, schedule_warning
from titanlite.parallelize import DTYPES, Passes
from titanlite.parallelize.attention import AttentionSizes
from titanlite.parallelize.pipeline import PipelinePlan
from titanlite.settings import load, raise_together, to_toml

__all__ = ["FACTS", "MOVED", "Job", "JobConfig", "open_data", "problems_of", "read_job"]


@dataclass(frozen=True)
class Job:
    """A job that passed every check, with what follows from it."""

    config: JobConfig
    family: Family
    shape: Any  # the family's sizes
    degrees: Degrees
    pipeline: PipelinePlan  # who runs which part of the model
    global_batch: int  # samples of a step, over all ranks

    @property
    def folder(self) -> Path:
        return Path(self.config.job.dump_folder)

    @property
    def rows(self) -> int:
        """Samples of a step that one rank reads."""
        return self.global_batch // self.degrees.data

    @property
    def passes(self) -> Passes:
        """What is done to the model beside spreading it."""
        config, training = self.config, self.config.training
        return Passes(
            recompute=config.activation_checkpoint,
            loss=config.loss,
            compile=config.compile,
            float8=config.float8,
            keep=DTYPES[training.dtype],
            compute=DTYPES[training.mixed_precision_param],
            reduce=DTYPES[training.mixed_precision_reduce],
            offload=training.enable_cpu_offload,
            documents=config.attention.mask == "document",
        )

    @property
    def attention_sizes(self) -> AttentionSizes:
        """What one rank's attention computes at once, where context parallel does not cut it."""
        shape, tensor = self.shape, self.degrees.tensor
        return AttentionSizes(
            rows=self.pipeline.microbatch,
            heads=shape.n_heads // tensor,
            key_heads=max(1, shape.n_kv_heads // tensor),
            tokens=self.config.training.seq_len,
            width=shape.head_width,
        )

    @property
    def loss_scale(self) -> LossScale | None:
        """Where it starts, in the precision that needs one."""
        if self.config.training.mixed_precision_param != "float16":
            return None
        return LossScale(self.config.loss_scale.initial, self.config.loss_scale.growth_steps)

    @property
    def schedule_steps(self) -> int:
        return self.config.lr_scheduler.total_steps or self.config.training.steps

    @property
    def warning(self) -> str:
        """What of the job is not followed to the letter, or nothing."""
        return schedule_warning(self.config.lr_scheduler, self.config.training.steps)

    def facts(self, stream: Stream) -> dict[str, Any]:
        """What a checkpoint says of the job that saved it, beyond its tensors."""
        return {
            "model": dataclasses.asdict(self.shape),
            "optimizer.name": self.config.optimizer.name,  # whose moments are another's nonsense
            "optimizer.state_dtype": self.config.optimizer.state_dtype,
            "training.dtype": self.config.training.dtype,
            "training.global_batch_size": self.global_batch,
            "attention.mask": self.config.attention.mask,  # which says what positions count
            **stream.facts,  # what a position means
        }

    def facts_to_hold(self, stream: Stream) -> dict[str, Any]:
        """Those that a checkpoint must agree with for this run to go on from it."""
        facts = self.facts(stream)
        if self.config.training.global_batch_size != -1:  # written down, so changed on purpose
            del facts["training.global_batch_size"]
        return facts

    @property
    def checkpoints(self) -> Place:
        """Where this run's checkpoints are."""
        return checkpoint_place(self.folder, self.config.checkpoint)

    @property
    def other_folders(self) -> dict[str, Place]:
        """The folders that this run writes to and job.dump_folder does not hold, by their keys.

        The checkpoints' among them wherever it is: it may be another job's by an absolute path.
        """
        config = self.config
        named = {
            "metrics.save_tb_folder": config.metrics.enable_tensorboard,
            "profiling.save_traces_folder": config.profiling.enable_profiling,
            "profiling.save_memory_snapshot_folder": config.profiling.enable_memory_snapshot,
            "comm.save_traces_folder": config.comm.trace_buf_size > 0,
        }
        found = {}
        for key, is_written in named.items():
            section, name = key.split(".")
            folder = self.folder / getattr(getattr(config, section), name)
            if is_written and not folder.resolve().is_relative_to(self.folder.resolve()):
                found[key] = Place(folder)
        if config.checkpoint.enable and not config.checkpoint.load_only:
            found["checkpoint.folder"] = self.checkpoints
        return found

    def summary(self, device, peak_flops: float | None) -> str:
        """The job in a few lines, for whoever watches it start."""
        training, shape = self.config.training, self.shape
        parameters = self.family.count_parameters(shape)
        accumulated = self.rows // training.local_batch_size
        peak = f"{peak_flops / 1e12:.3g} TFLOP/s at most" if peak_flops else "peak unknown"
        return "\n".join(
            [
                f"{self.config.job.description}",
                f"  model   {self.family.name} {self.config.model.flavor}:"
                f" {parameters:,} parameters, {shape.n_layers} blocks of {shape.dim}",
                f"  layout  {self.degrees} on {self.degrees.ranks} x {device.type} ({peak})",
                *([f"  stages  {self.pipeline}"] if self.degrees.pipeline > 1 else []),
                f"  batch   {self.global_batch} sequences of {training.seq_len}:"
                f" {self.global_batch * training.seq_len:,} tokens a step"
                f" ({training.local_batch_size} at once, {accumulated} times, on"
                f" {self.degrees.data} ranks)",
                f"  types   {training.mixed_precision_param} to compute,"
                f" {training.mixed_precision_reduce} to reduce, {training.dtype} to keep",
                *([f"  float8  {self.config.float8}"] if self.config.float8.recipe_name else []),
                *([f"  compile {self.config.compile}"] if self.config.compile.enable else []),
                f"  again   {self.config.activation_checkpoint}, computed in backward",
                f"  output  {self.folder}",
            ]
        )

    def as_toml(self) -> str:
        """The effective job, loadable again."""
        section = dataclasses.replace(
            self.config.job, config_file=None, print_config=False, check=False, check_ranks=None
        )
        return to_toml(dataclasses.replace(self.config, job=section))


def read_job(argv: Sequence[str], ranks: int, *, with_data: bool = True) -> Job:
    """The job argv asks for on `ranks` ranks; raises every problem of it together.

    `with_data` false: what it reads need not be there yet, nor the device; it cannot be run then.
    """
    config, problems = load(JobConfig, argv, MOVED)
    refused = {key for problem in problems for key in problem.keys}
    ranks = config.job.check_ranks or ranks
    found = [*problems_of(config, ranks), *(outside_problems(config) if with_data else ())]
    problems += [p for p in found if not refused.intersection(p.keys)]
    raise_together(problems)
    family = FAMILIES[config.model.name]
    shape, degrees = family.shape_of(config.model), degrees_of(config.parallelism, ranks)
    plan, _ = pipeline_of(config, family, shape)
    assert plan is not None, "checked: nothing stands against it"
    return Job(config, family, shape, degrees, plan, global_batch_of(config, degrees))


def open_data(job: Job) -> tuple[Stream, list[ValidationSet]]:
    """What a job learns from and what it is measured on; raises DataError, or Problems."""
    tokenizer, vocab_size = tokenizer_of(job.config), job.shape.vocab_size
    part = launched_ranks()  # of a full verification, which the ranks divide among them
    stream = stream_of(job.config, vocab_size, tokenizer, part)
    assert stream is not None, "checked: there are sources"
    return stream, texts_of(job.config, vocab_size, tokenizer, part)
