"""The composed configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from titanlite.checkpoint import CheckpointConfig
from titanlite.data import DataConfig
from titanlite.distributed.mesh import ParallelismConfig
from titanlite.distributed.process_group import CommConfig, DebugConfig
from titanlite.elastic.layouts import ElasticConfig
from titanlite.errors import UserError
from titanlite.guard.policy import GuardConfig
from titanlite.kernels.backend import AttentionConfig
from titanlite.meters.metered_run import ReplicaCheckConfig, StragglerConfig
from titanlite.metrics import MetricsConfig, ProfilingConfig
from titanlite.models import LossConfig, ModelConfig
from titanlite.models.load_balancing import ExpertsConfig
from titanlite.models.mup import MupConfig
from titanlite.optim import LossScaleConfig, LRSchedulerConfig, OptimizerConfig
from titanlite.parallelize.activation_checkpoint import ActivationCheckpointConfig
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.float8 import Float8Config, QuantizeConfig, resolve_float8
from titanlite.parallelize.lora import LoraConfig
from titanlite.settings import NotNegative, Positive, Range
from titanlite.training.config import TrainingConfig
from titanlite.training.validation import ValidationConfig
from titanlite.training.weight_average import WeightAverageConfig


@dataclass(frozen=True)
class JobSection:
    """[job] The run as a whole."""

    config_file: str | None = None  # the TOML to read; other arguments override its keys
    dump_folder: str = "./outputs"  # folder for everything that the run writes
    description: str = "default job"  # one line, shown in the log
    print_config: bool = False  # print the effective configuration, then start
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if available
    check: bool = False  # run all checks, then exit without building anything
    check_ranks: Positive | None = None
    # with job.check: number of ranks to assume, which need not exist; none: the launched ranks
    time_limit_minutes: Annotated[float, Range(0)] = 0.0
    # save a checkpoint and exit before this many minutes have passed; 0: no limit
    max_crashes: NotNegative = 5
    # stop restarting after this many consecutive crashes without a new checkpoint; 0: never stop


@dataclass(frozen=True)
class JobConfig:
    """All sections of a TOML."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig = field(default_factory=ModelConfig.of)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig.of)
    mup: MupConfig = field(default_factory=MupConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    weight_average: WeightAverageConfig = field(default_factory=WeightAverageConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    replica_check: ReplicaCheckConfig = field(default_factory=ReplicaCheckConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def find_problems(self) -> Iterator[UserError]:
        """Problems of the sections that a subclass adds, which the other checks do not know."""
        return iter(())

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is used: by the model, the loss, or a low-memory optimizer."""
        return self.compile.enable or self.compiles_optimizer

    @property
    def compiles_optimizer(self) -> bool:
        """Whether the update of a low-memory optimizer is compiled."""
        return self.optimizer.low_memory and self.optimizer.implementation == "fused"

    @property
    def float8(self) -> Float8Config:
        return resolve_float8(self.quantize, self.model.converters)


# Job properties that must be the same in the job and in the checkpoint that it resumes from, unless
# checkpoint.allow_changes names them; for the batch size see `Job.properties_to_check`.
JOB_PROPERTIES = (
    "model",
    "mup.base",
    "lora",
    "base_weights",
    "optimizer.name",
    "optimizer.state_dtype",
    "training.dtype",
    "training.global_batch_size",
    "training.batch_size_ramp",
    "training.seq_len",
    "attention.mask",
    "debug.seed",
    "data.tokenizer",
    "data.bos",
    "data.sources",
    "data.phases",
    "data.content",
)
