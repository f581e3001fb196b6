"""Checks of what a job has only if its TOML asks for it; `checks.py` and `read.py` call them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch

from titanlite.distributed.mesh import Degrees
from titanlite.elastic.rows import rank_rows
from titanlite.errors import CheckpointError, ConfigError, UserError
from titanlite.guard.policy import check_guard_config
from titanlite.job.config import JobConfig
from titanlite.models import FAMILIES, ModelSizes, ModelSpec
from titanlite.models.load_balancing import check_load_balancing
from titanlite.models.mup import check_mup_base
from titanlite.models.sizes import prediction_layers
from titanlite.optim import OptimizerConfig, moment_format, whole_matrix_optimizers
from titanlite.optim.config import ParameterGroupConfig
from titanlite.optim.low_memory import StateDtype
from titanlite.optim.mup import check_mup_optimizers
from titanlite.optim.recipe import matches_any
from titanlite.parallelize.expert import check_expert_parallel, weight_shards
from titanlite.parallelize.float8 import FLOAT8_FALLBACK_SINCE, Gpu, check_float8
from titanlite.parallelize.fsdp import sharded_dim_of_experts
from titanlite.parallelize.lora import SCALED, LoraConfig, linear_layers
from titanlite.settings import format_value


def check_guard(config: JobConfig) -> Iterator[ConfigError]:
    """Reject policies of the guard that contradict each other, or checkpoints that are too new."""
    yield from check_guard_config(config.guard, config.optimizer.early_step_in_backward)
    if "rollback" not in (config.guard.nonfinite, config.guard.spike):
        return
    checkpoint, guard = config.checkpoint, config.guard
    key = f"guard.{'spike' if guard.spike == 'rollback' else 'nonfinite'}"
    if not checkpoint.saves:
        yield ConfigError(
            f'{key} = "rollback": {checkpoint.why_not_saved}, so there would be nothing to roll'
            " back to.",
            fix=f'Set checkpoint.enable = true and load_only = false, or {key} = "skip".',
        )
        return
    # The window of the last try is the largest: rollback_steps x 2^(tries - 1) before the first
    # trouble. Its own trouble may come later: this assumes at most the same number of steps again.
    needed = 2 * (guard.rollback_steps << (guard.rollback_tries - 1))
    kept = checkpoint.keep_latest_k
    reach = (kept - 1) * checkpoint.interval
    if kept and reach < needed:
        yield ConfigError(
            f'{key} = "rollback": the last of guard.rollback_tries = {guard.rollback_tries} may go'
            f" back {needed} steps, but checkpoint.keep_latest_k = {kept} with"
            f" checkpoint.interval = {checkpoint.interval} reaches back {reach} steps.",
            fix=f"Set checkpoint.keep_latest_k = {1 + -(-needed // checkpoint.interval)} or more,"
            " or use a smaller guard.rollback_steps or guard.rollback_tries.",
        )


def check_model_options(
    config: JobConfig, spec: ModelSpec, sizes: ModelSizes
) -> Iterator[UserError]:
    """Yield the problems of the options of the model, for any number of ranks."""
    yield from check_mup(config, spec, sizes)
    yield from check_load_balancing(config.experts, spec, sizes)
    yield from _check_groups(config, spec, sizes)
    if (layers := prediction_layers(sizes)) >= config.training.seq_len:
        yield ConfigError(
            f"model.mtp_layers = {layers}: training.seq_len = {config.training.seq_len} has no"
            " token so far ahead.",
            fix=f"Use at most {config.training.seq_len - 1}, or longer sequences.",
        )
    if config.checkpoint.last_save_in_hf:
        yield from _check_export(spec, sizes)
    optimizers = [config.optimizer.replace(**g.overrides()) for g in config.optimizer.groups]
    per_head = any(section.muon_per_head for section in [config.optimizer, *optimizers])
    if per_head and not spec.head_projections:
        yield ConfigError(
            f'optimizer.muon_per_head = true: the spec of model.name = "{spec.name}" does not'
            " list the layers that project to heads.",
            fix="Set optimizer.muon_per_head = false, or ModelSpec.head_projections.",
        )
    if spec.experts(sizes) is not None:
        yield from _check_expert_optimizers(config)
    if any(section.name == "Sophia" for section in [config.optimizer, *optimizers]):
        yield from _check_hessian_estimate(config, prediction_layers(sizes))


def check_sharded_options(
    config: JobConfig, spec: ModelSpec, sizes: ModelSizes, degrees: Degrees
) -> Iterator[UserError]:
    """Yield the problems of the options of the model under the degrees of parallelism."""
    yield from _check_float8_sizes(config, sizes, degrees)
    yield from check_expert_parallel(degrees, spec.experts(sizes))
    yield from _check_packed_rows(config, spec, sizes, degrees)
    yield from _check_quantisation_blocks(spec, sizes, degrees, config.optimizer.state_dtype)


def check_lora(
    config: JobConfig, spec: ModelSpec, sizes: ModelSizes, stages: Sequence[Sequence[str]]
) -> Iterator[ConfigError]:
    """Reject targets that are no layers, `stages` without any, and options that need all weights.

    `stages`: the modules of each pipeline stage.
    """
    lora, checkpoint, rank = config.lora, config.checkpoint, f"lora.rank = {config.lora.rank}"
    if not lora.rank:
        if lora != LoraConfig():
            fix = "Set lora.rank, such as 16, or remove [lora]."
            yield ConfigError("lora.rank = 0: no adapters, but other keys of [lora] are set.", fix)
        return
    with torch.device("meta"):
        model = spec.build(sizes)
    layers, adapted = linear_layers(model), lora.select(model)
    for pattern in lora.targets or [""]:
        if not any(fnmatchcase(name, pattern) for name in layers):
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in layers)
            yield ConfigError(
                f'lora.targets: "{pattern}" matches no linear layer that can have an adapter.',
                fix=f"* matches any text. The layers are {', '.join(known)}.",
            )
    for number, modules in enumerate(stages):
        if adapted and not any(f"{n}.".startswith(f"{m}.") for n in adapted for m in modules):
            yield ConfigError(
                f"lora.targets: no layer of pipeline stage {number} ({', '.join(modules)}) gets an"
                " adapter, so it has nothing to train.",
                fix="Name layers of every block, and use at most as many stages as blocks.",
            )
    if checkpoint.initial_load_path is None:
        yield ConfigError(
            f"{rank}: the frozen weights would be random.",
            fix="Set checkpoint.initial_load_path to the model to adapt.",
        )
    if checkpoint.last_save_in_hf:
        yield ConfigError(
            f"{rank}: checkpoints have only the adapters, so checkpoint.last_save_in_hf = true has"
            " no model to export.",
            fix="Set it to false, and run python -m titanlite_post adapters merge afterwards.",
        )
    sections = [config.optimizer.replace(**g.overrides()) for g in config.optimizer.groups]
    for key, is_set in {
        "mup.base": config.mup.base is not None,
        "quantize.linear.float8.recipe_name": config.float8.recipe_name is not None,
        "optimizer.muon_per_head": any(s.muon_per_head for s in [config.optimizer, *sections]),
    }.items():
        if is_set:
            yield ConfigError(f"{rank}: {key} has no rule for adapters.", fix=f"Remove {key}.")


def _check_float8_sizes(
    config: JobConfig, sizes: ModelSizes, degrees: Degrees
) -> Iterator[ConfigError]:
    training, sequences = config.training, config.training.local_batch_size
    if degrees.pipeline > 1:
        sequences = config.parallelism.pipeline_parallel_microbatch_size
    tokens = sequences * training.seq_len // degrees.context
    yield from check_float8(config.float8, FAMILIES[config.model.name], sizes, degrees, tokens)
    experts, dtype = config.float8.experts, training.mixed_precision_param
    if experts is not None and not experts.emulate and dtype != "bfloat16":
        yield ConfigError(
            f'training.mixed_precision_param = "{dtype}": Float8 matmuls of experts give bfloat16.',
            fix='Use "bfloat16", or set quantize.grouped_mm.float8.emulate = true.',
        )


def _check_packed_rows(
    config: JobConfig, spec: ModelSpec, sizes: ModelSizes, degrees: Degrees
) -> Iterator[ConfigError]:
    """Reject frozen weights whose rows on a rank are not whole blocks of one scale."""
    with torch.device("meta"):
        model = spec.build(sizes)
    shards = weight_shards(model, spec, sizes, degrees)
    for name in config.lora.select(model) if config.lora.quantised else ():
        if (width := shards[f"{name}.weight"][1]) % SCALED:
            yield ConfigError(
                f'lora.base_dtype = "{config.lora.base_dtype}": a rank has {width} columns of'
                f" {name}, which is not a multiple of {SCALED}, the values with one scale.",
                fix='Use base_dtype = "bfloat16", or another parallelism.tensor_parallel_degree.',
            )
            return


def _check_quantisation_blocks(
    spec: ModelSpec, sizes: ModelSizes, degrees: Degrees, state_dtype: StateDtype
) -> Iterator[ConfigError]:
    """Reject degrees that split a quantisation block of the optimizer state."""
    if state_dtype in ("float32", "bfloat16"):  # no blocks
        return
    with torch.device("meta"):
        model = spec.build(sizes)
    for name, local in weight_shards(model, spec, sizes, degrees).items():
        shape = model.get_parameter(name).shape
        if len(local) == 3:
            dim = sharded_dim_of_experts(local, degrees.expert_shard)
            local[dim] = -(-local[dim] // degrees.expert_shard)
        width = local[-1]
        block = moment_format(shape, state_dtype).block
        if block and width % block:
            yield ConfigError(
                f'optimizer.state_dtype = "{state_dtype}": the layout {degrees} shards {name} by'
                f" columns: a rank has {width} of {shape[-1]}, which splits quantisation blocks of"
                f" {block}.",
                fix="Use other degrees, such as a smaller parallelism.tensor_parallel_degree, or"
                ' optimizer.state_dtype = "bfloat16".',
            )
            return


def check_mup(config: JobConfig, spec: ModelSpec, sizes: ModelSizes) -> Iterator[ConfigError]:
    """Reject a base model or an optimizer that muP has no rule for."""
    if config.mup.base is None:
        return
    yield from check_mup_base(config.mup, spec, sizes)
    if config.model.initialization != "titanlite":
        yield ConfigError(
            f'mup.base with model.initialization = "{config.model.initialization}": torchtitan has'
            " no muP.",
            fix="Remove one of the two.",
        )
    optimizer = config.optimizer
    groups = (optimizer.replace(**group.overrides()) for group in optimizer.groups)
    sections = [optimizer, *groups]
    rules = [(section.name, section.recipe.mup_rule) for section in sections]
    adam_decay = max((s.weight_decay for s in sections if s.name == "Adam"), default=0.0)
    yield from check_mup_optimizers(rules, adam_decay, config.training.clip_norm)


def _check_expert_optimizers(config: JobConfig) -> Iterator[ConfigError]:
    """Reject optimizers that have no state for the stacked matrices of experts."""
    if "SOAP" in whole_matrix_optimizers(config.optimizer):
        yield ConfigError(
            "optimizer.name = SOAP: keeps the statistics of single matrices, and the experts of a"
            " block are a stack of them.",
            fix="Use Muon, which orthogonalizes each expert, or AdamW.",
        )


def _check_hessian_estimate(config: JobConfig, layers: int) -> Iterator[ConfigError]:
    """Reject losses and dtypes for which Sophia's estimate of the Hessian would be wrong."""
    if layers:
        yield ConfigError(
            f'optimizer.name = "Sophia" with model.mtp_layers = {layers}: the estimate is of one'
            " cross-entropy, not of a sum with weights.",
            fix="Set model.mtp_layers = 0, or use another optimizer.",
        )
    if config.training.mixed_precision_param == "float16":
        yield ConfigError(
            'optimizer.name = "Sophia" with training.mixed_precision_param = "float16": the'
            " gradients of the estimate have no loss scale.",
            fix='Use mixed_precision_param = "bfloat16".',
        )


def check_update_options(config: JobConfig) -> Iterator[ConfigError]:
    """Reject combinations of the options for when and where parameters are updated."""
    training, in_backward = config.training, config.optimizer.early_step_in_backward
    if training.enable_cpu_offload and (names := whole_matrix_optimizers(config.optimizer)):
        yield ConfigError(
            f"training.enable_cpu_offload = true: {' and '.join(names)} would compute matmuls on"
            " the CPU.",
            fix="Set training.enable_cpu_offload = false, or use another optimizer.",
        )
    copies = config.checkpoint.async_mode != "disabled" or config.checkpoint.memory_interval > 0
    if config.optimizer.offload and config.optimizer.offload_folder and copies:
        yield ConfigError(
            "optimizer.offload_folder: an asynchronous save and a memory checkpoint would copy the"
            " optimizer state to host memory.",
            fix='Set checkpoint.async_mode = "disabled" and checkpoint.memory_interval = 0.',
        )
    if in_backward:
        yield from _check_early_step(config)
    if in_backward and (freq := config.metrics.noise_scale_freq):
        yield ConfigError(
            f"metrics.noise_scale_freq = {freq}: computes the gradient of half the batch first, and"
            " optimizer.early_step_in_backward = true would apply it.",
            fix="Disable one of the two.",
        )


def check_update_degrees(config: JobConfig, degrees: Degrees) -> Iterator[ConfigError]:
    """Reject an update in backward of gradients that several micro-batches add to."""
    training = config.training
    batch, local = training.sequences_per_step(degrees.batch), training.local_batch_size
    microbatches = rank_rows(batch, degrees.batch, local) // local
    reduces_each = config.parallelism.fsdp_gradient_reduction == "every_microbatch"
    if config.optimizer.early_step_in_backward and microbatches > 1 and reduces_each:
        yield ConfigError(
            "optimizer.early_step_in_backward = true: gradients accumulate over"
            f" {microbatches} micro-batches, but this would update the parameters after each of"
            " them.",
            fix='Set parallelism.fsdp_gradient_reduction = "last_microbatch", or use a larger'
            " local_batch_size.",
        )


def _check_early_step(config: JobConfig) -> Iterator[ConfigError]:
    """Reject settings that do not fit an update of each parameter during backward."""
    training, in_backward = config.training, "optimizer.early_step_in_backward"
    stages = config.parallelism.pipeline_parallel_degree
    conflicts = (
        (
            training.clip_norm,
            f"training.max_norm = {training.max_norm:g} clips by the norm of the whole gradient,"
            " which is known only after backward.",
            'Set training.clipping = "none", or training.max_norm = 0.',
        ),
        (
            training.clipping == "adaptive",
            'training.clipping = "adaptive" clips after backward, when the gradients have been'
            " applied and freed.",
            'Set training.clipping = "none".',
        ),
        (
            stages > 1,
            f"parallelism.pipeline_parallel_degree = {stages}: pipeline stages reuse each weight"
            " for later micro-batches.",
            f"Set {in_backward} = false, or parallelism.pipeline_parallel_degree = 1.",
        ),
        (
            training.mixed_precision_param == "float16",
            'training.mixed_precision_param = "float16" skips steps whose gradient overflows,'
            " which is known only after backward.",
            'Use mixed_precision_param = "bfloat16".',
        ),
        (
            training.enable_cpu_offload,
            "training.enable_cpu_offload = true stores gradients in host memory, so an early step"
            " would save no device memory.",
            "Disable one of the two.",
        ),
    )
    for applies, reason, fix in conflicts:
        if applies:
            yield ConfigError(f"{in_backward} = true: {reason}", fix=fix)


def check_group_patterns(
    groups: Sequence[ParameterGroupConfig], names: Collection[str]
) -> Iterator[ConfigError]:
    """Reject patterns that match none of the model's parameters, and groups that get none."""
    left = set(names)
    for index, group in enumerate(groups):
        key = f"optimizer.groups[{index}].match"
        for pattern in group.match:
            if not any(matches_any(name, [pattern]) for name in names):
                shown = difflib.get_close_matches(pattern, names, 2, 0.5) or list(names)[:2]
                yield ConfigError(
                    f'{key} = "{pattern}": matches no parameter of the model.',
                    fix="* matches any text. Names of the model are, for example,"
                    f" {' and '.join(shown)}.",
                )
        matched = {name for name in names if group.matches(name)}
        if matched and not matched & left:
            yield ConfigError(
                f"{key} = {format_value(group.match)}: every parameter that matches is in an"
                " earlier group, and the first group that matches applies.",
                fix="Move this group up, or leave it out.",
            )
        left -= matched


def _check_groups(config: JobConfig, spec: ModelSpec, sizes: ModelSizes) -> Iterator[ConfigError]:
    """Reject parameter groups that do not fit the names of the model."""
    if not config.optimizer.groups or any(spec.find_size_problems(sizes)):
        return
    with torch.device("meta"):
        model = spec.build(sizes)
    names = [name for name, _ in model.named_parameters()]
    if config.lora.rank:
        names = [f"{n}.lora_{x}" for n in config.lora.select(model) for x in "ab"]
    yield from check_group_patterns(config.optimizer.groups, names)


def _check_export(spec: ModelSpec, sizes: ModelSizes) -> Iterator[ConfigError]:
    """Reject a model that could not be exported at the end of the run."""
    try:
        spec.hugging_face.to_config(sizes, 0)
    except CheckpointError as error:
        yield ConfigError(f"checkpoint.last_save_in_hf = true: {error.message}")


def check_optimizer_device(config: OptimizerConfig, gpu: Gpu | None) -> Iterator[ConfigError]:
    """Reject an update that inductor cannot compile for this GPU. `gpu` None: a CPU."""
    is_compiled = config.state_dtype == "float8" and config.implementation == "fused"
    if is_compiled and gpu is not None and not gpu.compiles_float8:
        yield ConfigError(
            f'optimizer.state_dtype = "float8": torch {torch.__version__} compiles its update for'
            f" GPUs of compute capability 8.9 or later only; this device is {gpu}.",
            fix=f'Use "8bit", which takes the same memory, torch {FLOAT8_FALLBACK_SINCE} or newer,'
            ' or optimizer.implementation = "for-loop", which does not compile and is slower.',
        )
