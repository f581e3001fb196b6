"""A checked job: its configuration, and the values derived from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint import checkpoint_folder
from titanlite.data import SampleStream
from titanlite.distributed.mesh import Degrees
from titanlite.elastic.rows import rank_rows
from titanlite.job.checks import build_job_schedule
from titanlite.job.config import JobConfig
from titanlite.kernels.backend import AttentionShape
from titanlite.log import pluralize
from titanlite.metrics import cpu_has_bf16_units
from titanlite.models import ModelSizes, ModelSpec
from titanlite.models.load_balancing import resolve_load_balancing
from titanlite.models.mup import WidthScale, width_scales
from titanlite.models.sizes import prediction_layers
from titanlite.optim import LossScale, RateSchedule
from titanlite.parallelize import DTYPES, ModelTransforms
from titanlite.parallelize.pipeline_plan import PipelinePlan
from titanlite.settings import to_toml
from titanlite.storage import StorageFolder
from titanlite.training.batch_schedule import BatchSchedule, build_batch_schedule

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Job:
    """A job that passed every check."""

    config: JobConfig
    spec: ModelSpec
    sizes: ModelSizes  # of the model
    degrees: Degrees
    pipeline: PipelinePlan  # which rank runs which stage
    global_batch: int  # sequences of a step, over all ranks, after training.batch_size_ramp
    configured: JobConfig | None = None  # before an elastic layout was applied; None: without one
    cost: str = ""  # of an elastic layout: spare ranks and idle sequences, as text

    @property
    def folder(self) -> Path:
        """The run's folder, job.dump_folder."""
        return Path(self.config.job.dump_folder)

    @property
    def rank_batch(self) -> int:
        """Sequences of a step on one data-parallel rank, after training.batch_size_ramp."""
        local_batch = self.config.training.local_batch_size
        return rank_rows(self.global_batch, self.degrees.batch, local_batch)

    @property
    def transforms(self) -> ModelTransforms:
        """The transformations of the model other than parallelism."""
        config, training = self.config, self.config.training
        return ModelTransforms(
            activation_checkpoint=config.activation_checkpoint,
            loss=config.loss,
            like_torchtitan=config.model.initialization == "torchtitan",
            load_balancing=resolve_load_balancing(config.experts, self.spec, self.sizes),
            compile=config.compile,
            float8=config.float8,
            lora=config.lora,
            param_dtype=DTYPES[training.dtype],
            compute_dtype=DTYPES[training.mixed_precision_param],
            cpu_offload=training.enable_cpu_offload,
            document_mask=config.attention.mask == "document",
            linear_backend=config.attention.linear_backend,
        )

    @property
    def attention_shape(self) -> AttentionShape:
        """Size of one attention call on a rank, before context parallel shards the sequence."""
        sizes, tensor = self.sizes, self.degrees.tensor
        return AttentionShape(
            batch=self.pipeline.microbatch_size,
            n_heads=sizes.n_heads // tensor,
            n_kv_heads=max(1, sizes.n_kv_heads // tensor),
            seq_len=self.config.training.seq_len,
            head_dim=sizes.head_width,
            windows=tuple(dict.fromkeys(b.window for b in self.spec.counts(sizes).blocks)),
            sinks=self.spec.attention_sinks,
        )

    @property
    def loss_scale(self) -> LossScale | None:
        """The initial loss scale; None unless the compute dtype is float16."""
        if self.config.training.mixed_precision_param != "float16":
            return None
        return LossScale(self.config.loss_scale.initial, self.config.loss_scale.growth_steps)

    @property
    def widths(self) -> dict[str, WidthScale]:
        """The muP scale of each parameter, by name; empty without muP."""
        return width_scales(self.config.mup, self.spec, self.sizes)

    @property
    def flops_per_token(self) -> float:
        """Forward and backward FLOPs per token, without recomputation."""
        return self.spec.flops_per_token(self.sizes, self.config.training.seq_len)

    @property
    def batches(self) -> BatchSchedule:
        """The global batch size of each step."""
        return build_batch_schedule(self.config.training, self.global_batch)

    @property
    def rate_schedule(self) -> RateSchedule:
        return build_job_schedule(self.config, self.batches)

    @property
    def warnings(self) -> list[str]:
        """Warnings about settings that probably do not do what was meant."""
        steps, batches = self.config.training.steps, self.batches
        warnings = [self.rate_schedule.warning(), self._whole_backward_warning()]
        if (last := batches.batch_at(batches.tokens_after(steps - 1))) < batches.largest:
            warnings.append(
                f"training.batch_size_ramp: the ramp is longer than training.steps = {steps}; the"
                f" last batch has {last} sequences, not training.global_batch_size ="
                f" {batches.largest}"
            )
        return [warning for warning in warnings if warning]

    def _whole_backward_warning(self) -> str | None:
        """A warning if a schedule with split backwards is run without splitting them."""
        predicts = prediction_layers(self.sizes) > 0
        if self.degrees.pipeline == 1 or (self.transforms.splits_backward and not predicts):
            return None
        kinds = {action.kind for actions in self.pipeline.order() for action in actions}
        if "weight" not in kinds:
            return None
        compiled, without = self.config.compile.compiles("model"), "compiled blocks"
        reason = "blocks are compiled" if compiled else "blocks are recomputed"
        if predicts:
            reason, without = "the model predicts further tokens", f"{without} and model.mtp_layers"
        return (
            f"{self.pipeline}: gradients of weights do not fill the bubble, because {reason}: they"
            f" are computed together with those of inputs. The schedule is followed as written with"
            f' activation_checkpoint.mode = "none" and without {without}'
        )

    def properties(self, stream: SampleStream) -> dict[str, Any]:
        """Properties of the job that its checkpoints record."""
        return {
            "model": dataclasses.asdict(self.sizes),
            "mup.base": dataclasses.asdict(self.config.mup)["base"],
            "lora": dataclasses.asdict(self.config.lora) if self.config.lora.rank else None,
            "optimizer.name": self.config.optimizer.name,
            "optimizer.state_dtype": self.config.optimizer.state_dtype,
            "training.dtype": self.config.training.dtype,
            "training.global_batch_size": self.global_batch,
            "training.batch_size_ramp": self.config.training.batch_size_ramp,
            "attention.mask": self.config.attention.mask,  # decides what a token attends to
            **stream.properties,  # decide which sample each position is
        }

    def properties_to_check(self, stream: SampleStream) -> dict[str, Any]:
        """Properties that must equal those of a checkpoint for this run to resume from it."""
        properties = self.properties(stream)
        if self.config.training.global_batch_size != -1:  # set explicitly, so a change is intended
            del properties["training.global_batch_size"], properties["training.batch_size_ramp"]
        return properties

    @property
    def checkpoint_folder(self) -> StorageFolder:
        return checkpoint_folder(self.folder, self.config.checkpoint)

    def summary(self, device: torch.device, peak_flops: float | None) -> str:
        """The job in a few lines, logged when it starts."""
        config, training, sizes = self.config, self.config.training, self.sizes
        compute, base = SHORT_DTYPES[training.mixed_precision_param], config.mup.base
        measured = "measured " if device.type == "cpu" else ""  # a GPU's is published
        peak = (
            f"{measured}peak {peak_flops / 1e12:.3g} TFLOP/s each" if peak_flops else "peak unknown"
        )
        tokens, batches = self.global_batch * training.seq_len, self.batches
        lacks_bf16 = device.type == "cpu" and not cpu_has_bf16_units()
        cpu_note = " (this CPU has no bf16 units)" if lacks_bf16 else ""
        lines = {
            "model": f"{self.spec.name} {config.model.flavor}:"
            f" {self.spec.count_parameters(sizes):,} parameters,"
            f" {pluralize(sizes.n_layers, 'block')}, dim {sizes.dim}",
            "experts": self._describe_experts(),
            "lora": str(config.lora) if config.lora.rank else "",
            "mup": f"tuned at dim {base.dim}; width x{sizes.dim / base.dim:g}" if base else "",
            "layout": f"{self.degrees} on {self.degrees.ranks} x {device.type.upper()}"
            f" ({peak} in {compute})",
            "stages": str(self.pipeline) if self.degrees.pipeline > 1 else "",
            "batch": f"{self.global_batch} sequences x {training.seq_len} tokens = {tokens:,}"
            f" tokens/step: micro-batch {training.local_batch_size} x"
            f" {pluralize(self.rank_batch // training.local_batch_size, 'accumulation step')} x"
            f" {pluralize(self.degrees.batch, 'data-parallel rank')}",
            "elastic": self.cost,
            "ramp": str(batches) if training.batch_size_ramp else "",
            "length": f"{pluralize(training.steps, 'step')},"
            f" {batches.tokens_after(training.steps):,} tokens",
            "optimizer": str(config.optimizer),
            "schedule": str(self.rate_schedule),
            "guard": str(config.guard),
            "average": str(config.weight_average) if config.weight_average.decay else "",
            "precision": f"compute {compute}{cpu_note}, reduce fp32,"
            f" params {SHORT_DTYPES[training.dtype]}",
            "float8": str(config.float8),
            "compile": str(config.compile) if config.compile.enable else "",
            "recompute": str(config.activation_checkpoint) + self._describe_repeated_flops(),
            "output": str(self.folder),
        }
        shown = [f"  {name:<11}{text}" for name, text in lines.items() if text]
        return "\n".join([config.job.description, *shown])

    def _describe_repeated_flops(self) -> str:
        """What recomputing whole blocks adds to the FLOPs of a step."""
        costs = self.spec.module_flops(self.sizes, self.config.training.seq_len)
        section, path = self.config.activation_checkpoint, self.spec.blocks_path
        again = [costs[f"{path}.{n}"] for n in range(self.sizes.n_layers) if section.recomputes(n)]
        return f"; {sum(again) / 3 / self.flops_per_token:.0%} more FLOPs" if again else ""

    def _describe_experts(self) -> str:
        if (experts := self.spec.experts(self.sizes)) is None:
            return ""
        shared = f" and shared ones of width {experts.shared_dim}" if experts.shared_dim else ""
        ranks = self.degrees.expert
        owned = f"; {experts.count // ranks} on each of {ranks} ranks" if ranks > 1 else ""
        return (
            f"{experts.count} of width {experts.hidden_dim} per block, {experts.active} per"
            f" token{shared}{owned}; balancing: {self.transforms.load_balancing}"
        )

    def as_toml(self) -> str:
        """The effective configuration as a TOML that `read_job` accepts."""
        config = self.configured or self.config
        section = dataclasses.replace(
            config.job, config_file=None, print_config=False, check=False, check_ranks=None
        )
        return to_toml(dataclasses.replace(config, job=section))
