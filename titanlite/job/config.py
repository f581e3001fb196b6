"""The sections of a job composed, and where keys of torchtitan went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titanlite.checkpoint import CheckpointConfig
from titanlite.data import DataConfig
from titanlite.distributed.mesh import ParallelismConfig
from titanlite.distributed.process_group import CommConfig, DebugConfig
from titanlite.kernels.backend import AttentionConfig
from titanlite.metrics import MetricsConfig, ProfilingConfig
from titanlite.models import LossConfig, ModelConfig
from titanlite.optim import LossScaleConfig, LRSchedulerConfig, OptimizerConfig
from titanlite.parallelize.activation_checkpoint import ActivationCheckpointConfig
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.float8 import Float8Config, QuantizeConfig, resolve_float8
from titanlite.settings import NotNegative, Positive, Range
from titanlite.training import TrainingConfig, ValidationConfig


@dataclass(frozen=True)
class JobSection:
    """[job] The run as a whole."""

    config_file: str | None = None  # the TOML to read; what follows it overrides it
    dump_folder: str = "./outputs"  # everything the run writes is under it
    description: str = "default job"  # a line for whoever looks at it later
    print_config: bool = False  # print the effective job, then go on
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is one
    check: bool = False  # stop after all checks, having built nothing
    check_ranks: Positive | None = None  # check for this many ranks; those launched if unset
    time_limit_minutes: Annotated[float, Range(0)] = 0.0
    # save and leave before this has passed since the start; 0: no limit
    max_crashes: NotNegative = 5
    # refuse to start after so many deaths in a row without a newer checkpoint; 0: never refuse


@dataclass(frozen=True)
class JobConfig:
    """Everything a TOML can say."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled: the model, the loss, or kernels of an optimizer of ours."""
        lean = self.optimizer.lean and self.optimizer.implementation == "fused"
        return self.compile.enable or lean

    @property
    def float8(self) -> Float8Config:
        return resolve_float8(self.quantize.linear.float8, self.model.converters)


_IN_DATA = "is now in [data]: tokenizer, sources = [{ name, path, weight }], validation = […]."
_PREFETCHED = "is gone: the stream reads ahead by itself, and its state is one integer."
_CUSTOM = "is gone: a job runs the code of this repository and no other."

MOVED = {  # keys of torchtitan up to v0.2.2 that are elsewhere, or nowhere, here
    "model.tokenizer_path": _IN_DATA,
    "model.hf_assets_path": _IN_DATA,
    "training.dataset": _IN_DATA,
    "training.dataset_path": _IN_DATA,
    "training.dataloader": _PREFETCHED,
    "training.batch_size": "is now training.local_batch_size.",
    "training.compile": "is now compile.enable.",
    "training.seed": "is now debug.seed.",
    "training.deterministic": "is now debug.deterministic.",
    "training.warmup_steps": "is now lr_scheduler.warmup_steps.",
    "training.data_parallel_degree": "is now parallelism.data_parallel_shard_degree.",
    "training.tensor_parallel_degree": "is now parallelism.tensor_parallel_degree.",
    "validation.dataset": _IN_DATA,
    "validation.dataset_path": _IN_DATA,
    "validation.dataloader": _PREFETCHED,
    "lr_scheduler.lr_min": "is now lr_scheduler.min_lr_factor.",
    "checkpoint.enable_checkpoint": "is now checkpoint.enable.",
    "checkpoint.create_seed_checkpoint": "is gone: every layout starts from the same weights.",
    "checkpoint.enable_ft_dataloader_checkpoints": _PREFETCHED,
    "parallelism.pipeline_parallel_split_points": (
        "is now parallelism.module_fqns_per_model_part."
    ),
    "parallelism.enable_compiled_autograd": "is gone: blocks are compiled one by one.",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "is not available in this version.",
    "job.save_config_file": "is gone: the effective job is always in dump_folder/config.toml.",
    "job.custom_config_module": _CUSTOM,
    "job.print_args": "is now job.print_config.",
    "experimental": _CUSTOM,
    "fault_tolerance": "is not available in this version.",
    "memory_estimation": "is not available in this version.",
    "quantize.linear.mx": "is not available in this version.",
    "quantize.grouped_mm": "is not available in this version.",
    "float8": "is now [quantize.linear.float8].",
}


FACTS = (  # what a checkpoint says of its job, by the names that allow it to change
    "model",
    "optimizer.name",
    "optimizer.state_dtype",
    "training.dtype",
    "training.global_batch_size",
    "training.seq_len",
    "attention.mask",
    "debug.seed",
    "data.tokenizer",
    "data.bos",
    "data.sources",
    "data.content",
)
