"""What a TOML may have that other keys here stand for: torchtitan's keys, and `model.from`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.checkpoint.huggingface import read_model_config
from titanlite.errors import CheckpointError, ConfigError
from titanlite.models import FAMILIES
from titanlite.settings import format_value
from titanlite.settings.output import CommandLineText
from titanlite.storage import StorageFolder

_IN_DATA = "is now in [data]: tokenizer, sources = [{ name, path, weight }], validation = […]."
_PREFETCHED = "is not needed: data is always prefetched, and checkpoints store its position."
_CUSTOM = "is code, which a TOML cannot name: use --job.import MODULE on the command line."

MOVED = {  # keys of torchtitan up to v0.2.2 that have another name here or do not exist
    "evaluation": "is now a command: python -m titanlite_lab evaluate --watch RUN.",
    "dpo": "is a section of titanlite dpo: torchrun … -m titanlite_post dpo --job.config_file …",
    "grpo": "is a section of titanlite grpo: torchrun … -m titanlite_post grpo --job.config_file …",
    "job.dry_run": (
        "is now a command: python -m titanlite_planner dry-run --job.config_file RUN.toml"
        " [--job.check_ranks N]."
    ),
    "model.tokenizer_path": _IN_DATA,
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
    "job.import": _CUSTOM,
    "job.print_args": "is now job.print_config.",
    "experimental": _CUSTOM,
    "fault_tolerance": "is not available in this version.",
    "memory_estimation": "is not available in this version.",
    "quantize.linear.mx": 'is now quantize.linear.float8.recipe_name = "mxfp8".',
    "quantize.grouped_mm.mx": "is not available in this version; quantize.grouped_mm.float8 is.",
    "float8": "is now [quantize.linear.float8].",
}


ALWAYS: dict[str, Any] = {  # keys of torchtitan that have one value here, or decide nothing
    "activation_checkpoint.determinism_check": "default",
    "activation_checkpoint.early_stop": False,
    "activation_checkpoint.preserve_rng_state": (False, True),  # models draw no random numbers
    "activation_checkpoint.visualize_memory_budget_pareto": False,
    "checkpoint.initial_load_in_hf_quantized": False,
    "comm.mode": "default",
    "comm.save_traces_file_prefix": "rank_",
    "debug.moe_force_load_balance": False,
    "metrics.save_for_all_ranks": False,
    "parallelism.expert_parallel_comm_backend": "standard",
    "training.gc_debug": False,
    "training.mixed_precision_reduce": "float32",
}


def complete_table(table: dict[str, Any]) -> list[ConfigError]:
    """Replace, in a job's TOML with its overrides, torchtitan's keys and `model.from`."""
    return [*_accept_torchtitan(table), *_remove_constants(table), *_resolve_model_source(table)]


def _remove_constants(table: dict[str, Any]) -> Iterator[ConfigError]:
    """Remove the keys of `ALWAYS`; an error for each other value."""
    for key, constant in ALWAYS.items():
        section, name = key.split(".")
        keys = table.get(section)
        if not isinstance(keys, dict) or name not in keys:
            continue
        given, values = keys.pop(name), constant if isinstance(constant, tuple) else (constant,)
        if not any(_is_value(given, value) for value in values):
            yield ConfigError(
                f"{key} = {format_value(given)}: is not available in this version.",
                fix=f"Use {format_value(values[0])}, or remove it.",
            )


def _is_value(given: Any, value: Any) -> bool:
    """Whether a value of a TOML, or a text of the command line, is `value`."""
    if isinstance(given, CommandLineText):
        return given.text == (value if isinstance(value, str) else str(value).lower())
    return type(given) is type(value) and given == value


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
    if "grouped_mm.mx" not in str(converters) and isinstance(quantize.get("grouped_mm"), dict):
        quantize["grouped_mm"].pop("mx", None)  # has no effect without its converter
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
        return [ConfigError(f"model.from = {format_value(given)}: must be a string.")]
    try:
        spec, sizes = read_model_config(StorageFolder(path), name if name in FAMILIES else None)
    except CheckpointError as error:
        fix = error.fix or "Give a folder with a config.json of a supported architecture."
        fix += " A run that has started does not need it: config.toml in its folder has the sizes."
        return [ConfigError(f'model.from = "{path}": {error.message}', fix=fix)]
    values = dataclasses.asdict(sizes)
    if not values.get("head_dim"):  # dim / n_heads
        values.pop("head_dim", None)
    table["model"] = {"name": spec.name, **values, **model}
    return []
