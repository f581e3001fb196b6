"""The whole job on one page: the sections composed, and every rule that needs two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from titanlite.checkpoint import CheckpointConfig, Place, checkpoint_place, checkpoint_problems
from titanlite.data import (
    DataConfig,
    Stream,
    Tokenizer,
    ValidationSet,
    open_stream,
    open_tokenizer,
    open_validation,
)
from titanlite.distributed.mesh import Degrees, ParallelismConfig, degrees_of
from titanlite.distributed.session import CommConfig, DebugConfig, choose_device
from titanlite.errors import CheckpointError, ConfigError, Problems, UserError
from titanlite.models import FAMILIES, Family, LossConfig, ModelConfig
from titanlite.observe import (
    MetricsConfig,
    ProfilingConfig,
    metrics_problems,
    profiling_problems,
)
from titanlite.optim import (
    LossScale,
    LossScaleConfig,
    LRSchedulerConfig,
    OptimizerConfig,
    optimizer_problems,
)
from titanlite.parallelize import DTYPES, Passes
from titanlite.parallelize.activation import ActivationCheckpointConfig, activation_problems
from titanlite.parallelize.attention import (
    ON_CPU,
    AttentionConfig,
    AttentionSizes,
    attention_problems,
)
from titanlite.parallelize.compile import CompileConfig, compile_problems
from titanlite.parallelize.context import context_problems
from titanlite.parallelize.float8 import (
    Float8Config,
    QuantizeConfig,
    float8_asked,
    float8_device_problems,
    float8_problems,
)
from titanlite.parallelize.pipeline import PipelinePlan, plan_pipeline
from titanlite.parallelize.tensor import split_problems
from titanlite.settings import NotNegative, Positive, Range, load, raise_together, to_toml
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
    def float8(self) -> Float8Config:
        return float8_asked(self.quantize.linear.float8, self.model.converters)


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
    "data.sources",
)


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
    found = [*problems_of(config, ranks), *(_outside_problems(config) if with_data else ())]
    problems += [p for p in found if not refused.intersection(p.keys)]
    raise_together(problems)
    family = FAMILIES[config.model.name]
    shape, degrees = family.shape_of(config.model), degrees_of(config.parallelism, ranks)
    plan, _ = _plan(config, family, shape)
    assert plan is not None, "checked: nothing stands against it"
    return Job(config, family, shape, degrees, plan, _batch(config, degrees))


def _plan(config: JobConfig, family: Family, shape) -> tuple[PipelinePlan | None, list]:
    training = config.training
    return plan_pipeline(
        config.parallelism, family, shape, training.seq_len, training.local_batch_size
    )


def problems_of(config: JobConfig, ranks: int) -> Iterator[UserError]:
    """Everything that more than one key has to say."""
    yield from activation_problems(config.activation_checkpoint, config.compile.compiles("model"))
    yield from checkpoint_problems(config.checkpoint)
    for name in set(config.checkpoint.allow_changes) - set(FACTS):
        yield ConfigError(
            f'checkpoint.allow_changes: "{name}" is nothing that a checkpoint holds a job to.',
            fix=f"Use {', '.join(FACTS)}.",
            keys=("checkpoint.allow_changes",),
        )
    if config.job.time_limit_minutes and not config.checkpoint.enable:
        yield ConfigError(
            f"job.time_limit_minutes = {config.job.time_limit_minutes:g}: but checkpoint.enable ="
            " false, so that all would be lost when the time is up.",
            fix="Set checkpoint.enable = true, or leave it out.",
            keys=("job.time_limit_minutes",),
        )
    yield from metrics_problems(config.metrics)
    yield from profiling_problems(config.profiling)
    yield from optimizer_problems(config.optimizer)
    yield from _precision_problems(config)
    shape = degrees = None
    try:
        family = FAMILIES[config.model.name]
        shape = family.shape_of(config.model)
        yield from _shape_problems(shape)
        if config.checkpoint.last_save_in_hf:
            yield from _export_problems(family, shape)
        yield from _plan(config, family, shape)[1]
    except ConfigError as error:
        yield error
    try:
        degrees = degrees_of(config.parallelism, ranks)
        yield from _batch_problems(config.training, degrees)
        yield from attention_problems(config.attention, degrees, config.data.tokenizer)
        yield from _stepping_problems(config, degrees)
    except ConfigError as error:
        yield error
    if shape and degrees:
        lengths = {"training.seq_len": config.training.seq_len}
        if config.validation.enable:
            lengths["validation.seq_len"] = config.validation.seq_len
        found = {}
        for key, seq_len in lengths.items():
            about = [*split_problems(degrees, shape, seq_len, key)]
            about += context_problems(degrees, config.parallelism, seq_len, key)
            found.update({str(problem): problem for problem in about})
        yield from found.values()
        yield from _float8_problems(config, shape, degrees)


def _float8_problems(config: JobConfig, shape, degrees: Degrees) -> Iterator[ConfigError]:
    training, rows = config.training, config.training.local_batch_size
    if degrees.pipeline > 1:
        rows = config.parallelism.pipeline_parallel_microbatch_size
    tokens = rows * training.seq_len // degrees.context
    yield from float8_problems(config.float8, FAMILIES[config.model.name], shape, degrees, tokens)


def _outside_problems(config: JobConfig) -> Iterator[UserError]:
    """Everything that the world outside has to say: the device, the files."""
    try:
        shape = FAMILIES[config.model.name].shape_of(config.model)
    except ConfigError:  # said already
        shape = None
    yield from _device_problems(config)
    yield from compile_problems(config.compile, config.parallelism, _device_type(config))
    yield from _data_problems(config, shape)


def _export_problems(family: Family, shape) -> Iterator[ConfigError]:
    """Said before the run, not at its end."""
    try:
        family.hugging_face.config_of(shape, 0)
    except CheckpointError as error:
        yield ConfigError(
            f"checkpoint.last_save_in_hf = true: {error.message}",
            keys=("checkpoint.last_save_in_hf",),
        )


def _shape_problems(shape) -> Iterator[ConfigError]:
    if shape.n_heads % shape.n_kv_heads:
        yield ConfigError(
            f"model.n_kv_heads = {shape.n_kv_heads}: does not divide model.n_heads ="
            f" {shape.n_heads}; each key-value head serves the same number of query heads.",
            fix=f"Use a divisor of {shape.n_heads}.",
            keys=("model.n_kv_heads", "model.n_heads"),
        )
    if not shape.head_dim and shape.dim % shape.n_heads:
        yield ConfigError(
            f"model.dim = {shape.dim}: is not a multiple of model.n_heads = {shape.n_heads}.",
            fix="Change one of them, or set model.head_dim.",
            keys=("model.dim", "model.n_heads"),
        )
    elif shape.head_width % 2:
        yield ConfigError(
            f"model.head_dim = {shape.head_width}: rotary embedding turns pairs, so it must be"
            " even.",
            keys=("model.head_dim", "model.dim", "model.n_heads"),
        )


def _precision_problems(config: JobConfig) -> Iterator[ConfigError]:
    compute, keep = "training.mixed_precision_param", "training.dtype"
    half = config.training.mixed_precision_param == "float16"
    if half and config.training.dtype != "float32":
        yield ConfigError(
            f'{keep} = "{config.training.dtype}" with {compute} = "float16": what float16 computes'
            " is kept in float32.",
            fix=f'Set {keep} = "float32", or {compute} = "bfloat16".',
            keys=(keep, compute),
        )
    if not half and config.loss_scale != LossScaleConfig():
        yield ConfigError(
            f'[loss_scale] is set, but {compute} = "{config.training.mixed_precision_param}" scales'
            " no loss.",
            fix=f'Leave it out, or set {compute} = "float16".',
            keys=("loss_scale",),
        )


def _batch(config: JobConfig, degrees: Degrees) -> int:
    training = config.training
    if training.global_batch_size == -1:
        return training.local_batch_size * degrees.data
    return training.global_batch_size


def _batch_problems(training: TrainingConfig, degrees: Degrees) -> Iterator[ConfigError]:
    wanted, local, data = training.global_batch_size, training.local_batch_size, degrees.data
    once = local * data
    if wanted != -1 and wanted % once:
        near = " or ".join(str(n) for n in (wanted - wanted % once, wanted + -wanted % once) if n)
        yield ConfigError(
            f"training.global_batch_size = {wanted}: is not a multiple of local_batch_size {local}"
            f" x {data} data-parallel ranks = {once}.",
            fix=f"Use {near}, or another local_batch_size.",
            keys=("training.global_batch_size", "training.local_batch_size"),
        )


def _stepping_problems(config: JobConfig, degrees: Degrees) -> Iterator[ConfigError]:
    """When and where an update can be made."""
    training, early = config.training, "optimizer.early_step_in_backward"
    if config.optimizer.offload and training.enable_cpu_offload:
        yield ConfigError(
            "optimizer.offload = true: training.enable_cpu_offload = true keeps weights, gradients"
            " and moments in host memory already.",
            fix="Leave one of them out.",
            keys=("optimizer.offload", "training.enable_cpu_offload"),
        )
    if not config.optimizer.early_step_in_backward:
        return
    if training.max_norm:
        yield ConfigError(
            f"{early} = true: training.max_norm = {training.max_norm:g} scales by the norm of the"
            " whole gradient, which is not known before backward is over.",
            fix="Set training.max_norm = 0.",
            keys=(early, "training.max_norm"),
        )
    if degrees.pipeline > 1:
        yield ConfigError(
            f"{early} = true: pipeline_parallel_degree = {degrees.pipeline} computes with a weight"
            " until its last micro-batch is back.",
            fix="Set one of them off.",
            keys=(early, "parallelism.pipeline_parallel_degree"),
        )
    if training.mixed_precision_param == "float16":
        yield ConfigError(
            f'{early} = true: training.mixed_precision_param = "float16" skips steps whose gradient'
            " overflows, which is not known before backward is over.",
            fix='Use mixed_precision_param = "bfloat16".',
            keys=(early, "training.mixed_precision_param"),
        )
    if training.enable_cpu_offload:
        yield ConfigError(
            f"{early} = true: training.enable_cpu_offload = true keeps gradients in host memory,"
            " where there is nothing to save.",
            fix="Set one of them off.",
            keys=(early, "training.enable_cpu_offload"),
        )
    times = _batch(config, degrees) // degrees.data // training.local_batch_size
    if times > 1 and config.parallelism.fsdp_gradient_reduction == "every_microbatch":
        yield ConfigError(
            f"{early} = true: a step adds up {times} micro-batches, and each would step by itself.",
            fix='Set parallelism.fsdp_gradient_reduction = "last_microbatch", or use a larger'
            " local_batch_size.",
            keys=(early, "parallelism.fsdp_gradient_reduction"),
        )


def _device_problems(config: JobConfig) -> Iterator[UserError]:
    if config.job.check_ranks is None:  # else it is checked for another machine
        try:
            device = choose_device(config.job.device)
            yield from float8_device_problems(config.float8, device)
        except ConfigError as error:
            yield error
            return
        if device.type == "cpu":
            yield from _host_problems(config)


def _host_problems(config: JobConfig) -> Iterator[ConfigError]:
    """What means nothing on a CPU."""
    if config.attention.backend not in ("auto", *ON_CPU):
        yield ConfigError(
            f'attention.backend = "{config.attention.backend}": is for GPUs, and this job runs on'
            " the CPU.",
            fix=f'Use "auto", or {", ".join(ON_CPU)}.',
            keys=("attention.backend",),
        )
    if config.optimizer.offload:
        yield ConfigError(
            "optimizer.offload = true: this job runs on CPUs, whose memory is host memory already.",
            fix="Leave it out, or use job.device = \"cuda\".",
            keys=("optimizer.offload",),
        )
    if config.profiling.enable_memory_snapshot:
        yield ConfigError(
            "profiling.enable_memory_snapshot = true: torch records the allocations of GPUs only,"
            " and this job runs on CPUs.",
            fix="Leave it out; peak_memory_gib in metrics.jsonl is what the whole process held.",
            keys=("profiling.enable_memory_snapshot",),
        )


def _device_type(config: JobConfig) -> str:
    cuda = config.job.device != "cpu" and torch.cuda.is_available()
    return "cuda" if cuda else "cpu"


def _data_problems(config: JobConfig, shape) -> Iterator[UserError]:
    if not config.data.sources:
        yield ConfigError(
            "data.sources: is empty, so there is nothing to train on.",
            fix='Write sources = [{ name = "text", path = "corpus/train" }] in [data];'
            " scripts/prepare_data.py makes such a folder.",
            keys=("data.sources",),
        )
    if config.validation.enable and not config.data.validation:
        yield ConfigError(
            "validation.enable = true: but data.validation is empty.",
            fix='Write validation = [{ name = "text", path = "corpus/validation" }] in [data].',
            keys=("validation.enable", "data.validation"),
        )
    tokenizer, vocab_size = None, shape.vocab_size if shape else 2**31
    try:
        tokenizer = _open_tokenizer(config)
    except UserError as error:
        yield from _about("data.tokenizer", error)
    if tokenizer and tokenizer.vocab_size > vocab_size:
        yield ConfigError(
            f"model.vocab_size = {vocab_size}: is less than the {tokenizer.vocab_size} ids of"
            " data.tokenizer.",
            fix=f"Set model.vocab_size = {tokenizer.vocab_size} or more.",
            keys=("model.vocab_size", "data.tokenizer"),
        )
        vocab_size = tokenizer.vocab_size  # so that each corpus does not say it again
    for key, opener in (("data.sources", _open_stream), ("data.validation", _open_texts)):
        try:
            opened = opener(config, vocab_size, tokenizer)
        except UserError as error:
            yield from _about(key, error)
        else:
            if tokenizer and config.attention.mask == "document":
                yield from _end_problems(key, opened, tokenizer)


def _end_problems(key: str, opened, tokenizer: Tokenizer) -> Iterator[ConfigError]:
    """Corpora made elsewhere whose documents do not end as those of `tokenizer` do."""
    for text in opened if isinstance(opened, list) else [opened] if opened else []:
        for name in text.without_end(tokenizer.eos_id):
            yield ConfigError(
                f'attention.mask = "document": the last id of "{name}" is not the end of a document'
                f" ({tokenizer.eos_id}), so where its documents end cannot be seen.",
                fix="Prepare it with an end after every document (Megatron-LM: --append-eod), or"
                ' use "causal".',
                keys=("attention.mask", key),
            )


def open_data(job: Job) -> tuple[Stream, list[ValidationSet]]:
    """What a job learns from and what it is measured on; raises DataError, or Problems."""
    tokenizer, vocab_size = _open_tokenizer(job.config), job.shape.vocab_size
    stream = _open_stream(job.config, vocab_size, tokenizer)
    assert stream is not None, "checked: there are sources"
    return stream, _open_texts(job.config, vocab_size, tokenizer)


def _open_tokenizer(config: JobConfig) -> Tokenizer | None:
    return open_tokenizer(config.data.tokenizer) if config.data.tokenizer else None


def _open_stream(config: JobConfig, vocab_size: int, tokenizer) -> Stream | None:
    if not config.data.sources:
        return None
    return open_stream(
        config.data.sources,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
    )


def _open_texts(config: JobConfig, vocab_size: int, tokenizer) -> list[ValidationSet]:
    texts, problems = [], []
    for source in config.data.validation if config.validation.enable else ():
        try:
            options = {"seq_len": config.validation.seq_len, "vocab_size": vocab_size}
            texts.append(open_validation(source, tokenizer=tokenizer, **options))
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    return texts


def _about(key: str, error: UserError) -> Iterator[ConfigError]:
    for one in error.problems if isinstance(error, Problems) else [error]:
        yield ConfigError(f"{key}: {one.message}", fix=one.fix, keys=(key,))
