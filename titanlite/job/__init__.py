"""The whole job: what a TOML says, checked, and what follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint import checkpoint_folder
from titanlite.data import SampleStream, ValidationSet
from titanlite.distributed.mesh import Degrees, resolve_degrees
from titanlite.distributed.process_group import launched_rank_and_world_size
from titanlite.job.checks import (
    outside_problems,
    plan_job_pipeline,
    problems_of,
    resolve_global_batch,
)
from titanlite.job.config import FACTS, MOVED, JobConfig
from titanlite.job.inputs import open_job_stream, open_job_tokenizer, open_job_validation
from titanlite.kernels.backend import AttentionShape
from titanlite.models import FAMILIES, ModelSpec
from titanlite.optim import LossScale, schedule_warning
from titanlite.parallelize import DTYPES, ModelTransforms
from titanlite.parallelize.pipeline import PipelinePlan
from titanlite.settings import load_config, raise_together, to_toml
from titanlite.storage import StorageFolder

__all__ = [
    "AttentionShape",
    "DTYPES",
    "Degrees",
    "FACTS",
    "FAMILIES",
    "Job",
    "JobConfig",
    "LossScale",
    "MOVED",
    "ModelSpec",
    "ModelTransforms",
    "PipelinePlan",
    "SampleStream",
    "StorageFolder",
    "ValidationSet",
    "checkpoint_folder",
    "global_batch_of",
    "launched_rank_and_world_size",
    "load",
    "open_data",
    "outside_problems",
    "pipeline_of",
    "problems_of",
    "raise_together",
    "read_job",
    "resolve_degrees",
    "schedule_warning",
    "stream_of",
    "texts_of",
    "to_toml",
    "tokenizer_of",
]


@dataclass(frozen=True)
class Job:
    """A job that passed every check, with what follows from it."""

    config: JobConfig
    spec: ModelSpec
    sizes: Any  # the family's sizes
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
    def transforms(self) -> ModelTransforms:
        """What is done to the model beside spreading it."""
        config, training = self.config, self.config.training
        return ModelTransforms(
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
    def attention_sizes(self) -> AttentionShape:
        """What one rank's attention computes at once, where context parallel does not cut it."""
        sizes, tensor = self.sizes, self.degrees.tensor
        return AttentionShape(
            rows=self.pipeline.microbatch,
            heads=sizes.n_heads // tensor,
            key_heads=max(1, sizes.n_kv_heads // tensor),
            tokens=self.config.training.seq_len,
            width=sizes.head_width,
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

    def facts(self, stream: SampleStream) -> dict[str, Any]:
        """What a checkpoint says of the job that saved it, beyond its tensors."""
        return {
            "model": dataclasses.asdict(self.sizes),
            "optimizer.name": self.config.optimizer.name,  # whose moments are another's nonsense
            "optimizer.state_dtype": self.config.optimizer.state_dtype,
            "training.dtype": self.config.training.dtype,
            "training.global_batch_size": self.global_batch,
            "attention.mask": self.config.attention.mask,  # which says what positions count
            **stream.facts,  # what a position means
        }

    def facts_to_hold(self, stream: SampleStream) -> dict[str, Any]:
        """Those that a checkpoint must agree with for this run to go on from it."""
        facts = self.facts(stream)
        if self.config.training.global_batch_size != -1:  # written down, so changed on purpose
            del facts["training.global_batch_size"]
        return facts

    @property
    def checkpoints(self) -> StorageFolder:
        """Where this run's checkpoints are."""
        return checkpoint_folder(self.folder, self.config.checkpoint)

    @property
    def other_folders(self) -> dict[str, StorageFolder]:
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
                found[key] = StorageFolder(folder)
        if config.checkpoint.enable and not config.checkpoint.load_only:
            found["checkpoint.folder"] = self.checkpoints
        return found

    def summary(self, device, peak_flops: float | None) -> str:
        """The job in a few lines, for whoever watches it start."""
        training, sizes = self.config.training, self.sizes
        parameters = self.spec.count_parameters(sizes)
        accumulated = self.rows // training.local_batch_size
        peak = f"{peak_flops / 1e12:.3g} TFLOP/s at most" if peak_flops else "peak unknown"
        return "\n".join(
            [
                f"{self.config.job.description}",
                f"  model   {self.spec.name} {self.config.model.flavor}:"
                f" {parameters:,} parameters, {sizes.n_layers} blocks of {sizes.dim}",
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
    config, problems = load_config(JobConfig, argv, MOVED)
    refused = {key for problem in problems for key in problem.keys}
    ranks = config.job.check_ranks or ranks
    found = [*problems_of(config, ranks), *(outside_problems(config) if with_data else ())]
    problems += [p for p in found if not refused.intersection(p.keys)]
    raise_together(problems)
    spec = FAMILIES[config.model.name]
    sizes, degrees = spec.sizes_of(config.model), resolve_degrees(config.parallelism, ranks)
    plan, _ = plan_job_pipeline(config, spec, sizes)
    assert plan is not None, "checked: nothing stands against it"
    return Job(config, spec, sizes, degrees, plan, resolve_global_batch(config, degrees))


def open_data(job: Job) -> tuple[SampleStream, list[ValidationSet]]:
    """What a job learns from and what it is measured on; raises DataError, or Problems."""
    tokenizer, vocab_size = open_job_tokenizer(job.config), job.sizes.vocab_size
    part = (
        launched_rank_and_world_size()
    )  # of a full verification, which the ranks divide among them
    stream = open_job_stream(job.config, vocab_size, tokenizer, part)
    assert stream is not None, "checked: there are sources"
    return stream, open_job_validation(job.config, vocab_size, tokenizer, part)
