"""The composed configuration, and the replacements of torchtitan keys that moved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from titanlite.checkpoint import CheckpointConfig
from titanlite.checkpoint.huggingface import read_model_config
from titanlite.data import DataConfig
from titanlite.distributed.mesh import ParallelismConfig
from titanlite.distributed.process_group import CommConfig, DebugConfig
from titanlite.errors import CheckpointError, ConfigError
from titanlite.guard.policy import GuardConfig
from titanlite.kernels.backend import AttentionConfig
from titanlite.meters.replica_check import ReplicaCheckConfig
from titanlite.meters.straggler import StragglerConfig
from titanlite.metrics import MetricsConfig, ProfilingConfig
from titanlite.models import FAMILIES, LossConfig, ModelConfig
from titanlite.models.load_balancing import ExpertsConfig
from titanlite.models.mup import MupConfig
from titanlite.optim import LossScaleConfig, LRSchedulerConfig, OptimizerConfig
from titanlite.parallelize.activation_checkpoint import ActivationCheckpointConfig
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.float8 import Float8Config, QuantizeConfig, resolve_float8
from titanlite.settings import NotNegative, Positive, Range, format_value
from titanlite.settings.output import CommandLineText
from titanlite.storage import StorageFolder
from titanlite.training.config import TrainingConfig
from titanlite.training.validation import ValidationConfig


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
    # under check: number of ranks to assume, which need not exist; default: the launched ranks
    time_limit_minutes: Annotated[float, Range(0)] = 0.0
    # save a checkpoint and exit before this many minutes have passed; 0: no limit
    max_crashes: NotNegative = 5
    # stop restarting after this many consecutive crashes without a new checkpoint; 0: never stop


@dataclass(frozen=True)
class JobConfig:
    """All sections of a TOML."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig.of)
    mup: MupConfig = field(default_factory=MupConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
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
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    replica_check: ReplicaCheckConfig = field(default_factory=ReplicaCheckConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

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
        return resolve_float8(self.quantize.linear.float8, self.model.converters)


# Sections and keys that decide what a step computes or what the guard does, and of these sections
# the keys that do not.
_MATHEMATICS = (
    *("model", "training", "attention.mask", "optimizer", "mup", "lr_scheduler", "loss_scale"),
    *("guard", "loss", "experts", "quantize", "data.mixture", "debug.seed"),
)
_NO_MATHEMATICS = (
    *("local_batch_size", "enable_cpu_offload", "gc_freq", "gc_debug"),
    *("optimizer.implementation", "model.print_after_conversion"),
)


def changed_settings(saved: dict[str, Any], current: JobConfig) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, current value)} of the changed settings that decide what a run computes.

    `saved`: the configuration in a checkpoint. What it lacks, such as a newer key, is not compared.
    """
    changes = {}
    flat_saved, flat_current = (
        _flatten_settings(json.loads(json.dumps(job)))
        for job in (saved, dataclasses.asdict(current))
    )
    for key in sorted(flat_saved.keys() & flat_current.keys()):
        decides = any(f"{key}.".startswith(f"{part}.") for part in _MATHEMATICS)
        if decides and flat_saved[key] != flat_current[key] and not key.endswith(_NO_MATHEMATICS):
            changes[key] = (flat_saved[key], flat_current[key])
    return changes


def _flatten_settings(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested tables."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        flat |= _flatten_settings(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


_IN_DATA = "is now in [data]: tokenizer, sources = [{ name, path, weight }], validation = […]."
_PREFETCHED = "is not needed: data is always prefetched, and checkpoints store its position."
_CUSTOM = "is not supported: a job runs only the code of this repository."

_WATCHED = (
    "is gone: evaluate the checkpoints of a run while it trains with python -m titanlite_lab"
    " evaluate --watch RUN."
)

MOVED = {  # keys of torchtitan up to v0.2.2 that have another name here or do not exist
    "evaluation": _WATCHED,
    "job.dry_run": (
        "is now a command: python -m titanlite_planner dry-run --job.config_file RUN.toml"
        " [--job.check_ranks N]."
    ),
    "model.tokenizer_path": _IN_DATA,
    "data.follow_symlinks": "is not needed: symbolic links are followed.",
    "training.dataset_path": _IN_DATA,
    "training.dataloader": _PREFETCHED,
    "training.batch_size": "is now training.local_batch_size.",
    "training.compile": "is now compile.enable.",
    "training.seed": "is now debug.seed.",
    "training.deterministic": "is now debug.deterministic.",
    "training.warmup_steps": "is now lr_scheduler.warmup_steps.",
    "training.data_parallel_degree": "is now parallelism.data_parallel_shard_degree.",
    "training.tensor_parallel_degree": "is now parallelism.tensor_parallel_degree.",
    "validation.dataset_path": _IN_DATA,
    "validation.dataloader": _PREFETCHED,
    "lr_scheduler.lr_min": "is now lr_scheduler.min_lr_factor.",
    "checkpoint.enable_checkpoint": "is now checkpoint.enable.",
    "checkpoint.create_seed_checkpoint": "is not needed: layouts have equal initial weights.",
    "checkpoint.enable_ft_dataloader_checkpoints": _PREFETCHED,
    "parallelism.pipeline_parallel_split_points": (
        "is now parallelism.module_fqns_per_model_part."
    ),
    "parallelism.enable_compiled_autograd": "is not supported: each block is compiled separately.",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "is not available in this version.",
    "job.save_config_file": "is not needed: it is always saved, in dump_folder/config.toml.",
    "job.custom_config_module": _CUSTOM,
    "job.print_args": "is now job.print_config.",
    "experimental": _CUSTOM,
    "fault_tolerance": "is not available in this version.",
    "memory_estimation": "is not available in this version.",
    "quantize.linear.mx": "is not available in this version.",
    "quantize.grouped_mm": (
        "is not supported: torchao's Float8 grouped matmul (a prototype in 0.18) has no emulation,"
        " and needs groups of 16 rows; experts compute in training.mixed_precision_param."
    ),
    "float8": "is now [quantize.linear.float8].",
}


# Job properties that must be the same in the job and in the checkpoint that it resumes from, unless
# checkpoint.allow_changes names them; for the batch size see `Job.properties_to_check`.
JOB_PROPERTIES = (
    "model",
    "mup.base",
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


def complete_table(table: dict[str, Any]) -> list[ConfigError]:
    """Replace, in a job's TOML with its overrides, torchtitan's keys and `model.from`."""
    return [*_accept_torchtitan(table), *_resolve_model_source(table)]


def _accept_torchtitan(table: dict[str, Any]) -> list[ConfigError]:
    """Replace keys of torchtitan v0.2.2 that other keys here stand for; returns the problems."""
    sections = {name: value for name, value in table.items() if isinstance(value, dict)}
    model, data = sections.get("model", {}), sections.get("data", {})
    quantize = sections.get("quantize", {})
    if (converters := _text_or_value(model.get("converters", []))) in (
        ["float8"],
        "float8",
        '["float8"]',
    ):
        converters = model["converters"] = ["quantize.linear.float8"]
    experts = quantize.get("grouped_mm")  # has no effect without its converter
    is_known = isinstance(experts, dict) and experts.keys() <= {"float8", "mx"}
    if is_known and "grouped_mm" not in str(converters):
        del quantize["grouped_mm"]
    folder = _text_or_value(model.get("hf_assets_path"))
    if isinstance(folder, str):
        del model["hf_assets_path"]
        if "tokenizer" not in data and table.setdefault("data", data) is data:  # else: no table
            names = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
            found = (name for name in names if (Path(folder) / name).is_file())
            data["tokenizer"] = str(Path(folder) / next(found, names[0]))
    return list(_replace_datasets(sections, data))


def _text_or_value(value: Any) -> Any:
    """A value of a TOML, or the text of one of the command line."""
    return value.text if isinstance(value, CommandLineText) else value


def _replace_datasets(sections: dict[str, Any], data: dict[str, Any]) -> Iterator[ConfigError]:
    """Drop names of data sets whose sources are given; one error for the others."""
    validates = _text_or_value(sections.get("validation", {}).get("enable")) in (True, "true")
    needed = {"training": "sources", "validation": "validation" if validates else None}
    named = {}
    for section, key in needed.items():
        name = sections.get(section, {}).pop("dataset", None)
        if name is not None and key and key not in data:
            named[f"{section}.dataset"] = (format_value(_text_or_value(name)), f"data.{key}")
    if named:
        texts = " and ".join(f"{key} = {name}" for key, (name, _) in named.items())
        replaced = [key for _, key in named.values()]
        yield ConfigError(
            f"{texts}: no data set is downloaded by its name.",
            fix=f"Set {' and '.join(replaced)}, such as --data.sources"
            ' \'[{ name = "c4", path = "corpus/train" }]\'; docs/reference/torchtitan.md has a'
            " recipe for c4.",
            keys=(*named, *replaced, "validation.enable"),
        )


def _resolve_model_source(table: dict[str, Any]) -> list[ConfigError]:
    """Replace `model.from`, a Hugging Face folder, by the family and sizes in its config.json.

    Sizes that are set explicitly win. `from` is a keyword of Python, so it cannot be a field.
    """
    model = table.get("model")
    if not isinstance(model, dict) or "from" not in model:
        return []
    given = model.pop("from")
    path, name = _text_or_value(given), _text_or_value(model.get("name"))
    if not isinstance(path, str):
        return [ConfigError(f"model.from = {format_value(given)}: must be a string.", keys=_FROM)]
    try:
        spec, sizes = read_model_config(StorageFolder(path), name if name in FAMILIES else None)
    except CheckpointError as error:
        fix = error.fix or "Give a folder with a config.json of a supported architecture."
        fix += " A run that has started does not need it: config.toml in its folder has the sizes."
        return [ConfigError(f'model.from = "{path}": {error.message}', fix=fix, keys=_FROM)]
    values = dataclasses.asdict(sizes)
    if not values.get("head_dim"):  # dim / n_heads
        values.pop("head_dim", None)
    table["model"] = {"name": spec.name, **values, **model}
    return []


_FROM = ("model.from",)
