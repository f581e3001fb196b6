"""Float8 matmuls of linear layers, by torchao (https://github.com/pytorch/ao/tree/main/torchao/float8),
and of experts, by torch.

Weights are stored, updated and saved in the param dtype. The operands of each matmul are scaled
and cast to Float8 just before it; its output has the compute dtype, which may be float32.
MXFP8 has a scale for each 32 values along the summed dimension (OCP Microscaling Formats, 1.0).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError
from titanlite.kernels.grouped import FLOAT8_CAPABILITY, Float8Cast
from titanlite.log import logger
from titanlite.models import ModelSizes, ModelSpec, OutputLayer
from titanlite.models.moe import GroupedExperts
from titanlite.models.mtp import JoiningLinear
from titanlite.models.router import RouterGate
from titanlite.parallelize.compile import NOT_COMPILED, CompileConfig, replace_forward
from titanlite.parallelize.expert import weight_shards
from titanlite.parallelize.tensor_styles import DEFAULT_STYLES, LinearStyles

SECTION, EXPERTS_SECTION = "quantize.linear.float8", "quantize.grouped_mm.float8"
AUTO_FILTER = "auto_filter_small_kn"  # special value in filter_fqns, as in torchtitan
ALIGNMENT = 16  # Float8 tensor cores need sizes that are multiples of it
MX_BLOCK = 32  # values with one scale in MXFP8
MXFP8_MODULE = "prototype.moe_training.mxfp8_linear"  # of torchao 0.18; may move
FLOAT8_FALLBACK_SINCE = "2.13"  # torch version; for the fallback see `compiles_float8`


@dataclass(frozen=True)
class Gpu:
    """The model of a CUDA device."""

    name: str
    capability: tuple[int, int]  # compute capability, as (9, 0) of an H100

    def __str__(self) -> str:
        return f"{self.name}, of compute capability {'.'.join(map(str, self.capability))}"

    @property
    def supports_float8(self) -> bool:
        """Whether it has Float8 matmuls; Triton supports float8_e4m3fn on the same GPUs."""
        return self.capability >= (8, 9)  # Ada; Hopper is 9.0

    @property
    def compiles_float8(self) -> bool:
        """Whether inductor compiles casts to Float8 for it.

        Where Triton does not support the dtype, inductor leaves the cast to ATen (in torch 2.13 to
        2.15), or fails with "type fp8e4nv not supported in this architecture" (in 2.11).
        """
        return self.supports_float8 or torch.__version__ >= FLOAT8_FALLBACK_SINCE


def find_gpu(device: torch.device) -> Gpu | None:
    """The GPU behind a device; None for a CPU."""
    if device.type != "cuda":
        return None
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Float8LinearConfig:
    """[quantize.linear.float8] Float8 matmuls in linear layers, by torchao."""

    enable_fsdp_float8_all_gather: bool = False
    # all-gather weights in Float8: half of bf16's traffic; recipe tensorwise only
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    # compute the scales of all weights that are all-gathered in Float8 with one all-reduce a step
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] | None = None
    # granularity of the scales: one per tensor, per row (gw_hp: weight gradients in high precision)
    # or per 32 values (mxfp8, for compute capability 10); unset: no Float8
    filter_fqns: list[str] = field(default_factory=list)
    # linear layers whose name contains one of these stay in high precision; the output layer and
    # layers with a size that is not a multiple of 16 (mxfp8: 32) always do; "auto_filter_small_kn":
    # so do layers that are too small to be faster, as torchao measured on an H100
    emulate: bool = False  # cast to Float8 but compute in float32: for hardware without Float8


@dataclass(frozen=True)
class Float8ExpertsConfig:
    """[quantize.grouped_mm.float8] Float8 matmuls of experts, by torch; see model.converters."""

    fqns: list[str] = field(default_factory=list)
    # experts whose name contains one of these, such as "experts" for all
    emulate: bool = False  # round as in Float8 only: for hardware without its grouped matmuls


@dataclass(frozen=True)
class Float8Config(Float8LinearConfig):
    """What computes in Float8: linear layers, and experts."""

    experts: Float8ExpertsConfig | None = None  # None: not in Float8

    @property
    def alignment(self) -> int:
        """What the sizes of a layer must be multiples of."""
        return MX_BLOCK if self.recipe_name == "mxfp8" else ALIGNMENT

    @property
    def aligns_ranks(self) -> bool:
        """Whether the tokens and shards of a rank must be multiples of it, too."""
        return self.recipe_name == "mxfp8" or not self.emulate

    @property
    def rounds_as_eager(self) -> bool:
        """Whether compiled blocks must round every bf16 result, as in eager mode.

        With scales per row, the loss became NaN where backward rounded a recomputed norm
        differently than forward (https://github.com/pytorch/pytorch/issues/150859). A compiled
        block recomputes its norms in every mode of [activation_checkpoint].
        """
        return self.recipe_name in ("rowwise", "rowwise_with_gw_hp")

    def __str__(self) -> str:
        options = {
            "Float8 all-gather": self.enable_fsdp_float8_all_gather,
            "precomputed scales": self.precompute_float8_dynamic_scale_for_fsdp,
            "emulated": self.emulate,
            "experts": self.experts is not None,
            "experts emulated": self.experts is not None and self.experts.emulate,
        }
        shown = [str(self.recipe_name or ""), *(name for name, on in options.items() if on)]
        return ", ".join(filter(None, shown))


@dataclass(frozen=True)
class QuantizeLinearConfig:
    float8: Float8LinearConfig = field(default_factory=Float8LinearConfig)


@dataclass(frozen=True)
class QuantizeGroupedConfig:
    float8: Float8ExpertsConfig = field(default_factory=Float8ExpertsConfig)


@dataclass(frozen=True)
class QuantizeConfig:
    linear: QuantizeLinearConfig = field(default_factory=QuantizeLinearConfig)
    grouped_mm: QuantizeGroupedConfig = field(default_factory=QuantizeGroupedConfig)


def resolve_float8(config: QuantizeConfig, converters: Sequence[str]) -> Float8Config:
    """Apply torchtitan's switches; that of linear layers without a recipe means "tensorwise"."""
    linear, experts = config.linear.float8, config.grouped_mm.float8
    if SECTION in converters and linear.recipe_name is None:
        linear = replace(linear, recipe_name="tensorwise")
    return Float8Config(**vars(linear), experts=experts if EXPERTS_SECTION in converters else None)


@cache
def torchao(module: str = "float8") -> Any:
    """Import a module of torchao without its warnings; raises ConfigError if that fails."""
    # It warns of extensions built for other hardware, and makes torch warn about pytree types.
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [noisy.level for noisy in loggers]
    try:
        for noisy in loggers:
            noisy.setLevel(logging.ERROR)
        imported = import_module(f"torchao.{module}")
        float8_ops: Any = import_module("torchao.float8.float8_ops")
    except ImportError as missing:
        raise ConfigError(
            f"{SECTION}.recipe_name: torchao.{module} cannot be imported ({missing}).",
            fix='Install it with "pip install torchao" (tested: 0.18.0).',
        ) from missing
    finally:
        for noisy, level in zip(loggers, levels, strict=True):
            noisy.setLevel(level)
    if module == "float8":  # Both are private, but the only places to change this.
        handlers = float8_ops.FLOAT8_OPS_TABLE
        for op in [op for op in handlers if "all_gather_into_tensor" in str(op)]:
            handlers[op] = partial(_all_gather_float8, handlers[op])
        float8_ops.addmm_float8_unwrapped = partial(_scaled_mm, float8_ops.addmm_float8_unwrapped)
    return imported


def _scaled_mm(
    torchao_mm: Callable, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *args: Any, **more
) -> Tensor:
    """torchao's matmul in Float8, with the scales of rows applied by cuBLAS where it can.

    Without fast accumulation, as in backward, torchao multiplies the output by them afterwards,
    since torch's kernel is slow, but for Hopper and from CUDA 12.9 torch calls cuBLAS
    (https://github.com/pytorch/pytorch/pull/157905). Scales are powers of two, so it rounds alike.
    """
    gpu, cuda = find_gpu(a.device), [*map(int, (torch.version.cuda or "0").split("."))]
    has_cublas = gpu is not None and gpu.capability == (9, 0) and cuda >= [12, 9]
    if more["use_fast_accum"] or a_scale.dim() < 2 or not has_cublas:
        return torchao_mm(a, a_scale, b, b_scale, *args, **more)
    scales = a_scale.reciprocal(), b_scale.reciprocal()
    return torch._scaled_mm(a, b, *scales, more["bias"], out_dtype=torch.bfloat16).to(args[0])


def _all_gather_float8(
    torchao_handler: Callable, op: Callable, args: tuple, kwargs: dict | None = None
):
    """torchao's all-gather, but on a CPU as uint8: gloo has no Float8 type (2.13)."""
    if args[0].device.type != "cpu":
        return torchao_handler(op, args, kwargs)

    def all_gather_bytes(data: torch.Tensor, *rest, **options) -> torch.Tensor:
        return op(data.view(torch.uint8), *rest, **options).view(data.dtype)

    return torchao_handler(all_gather_bytes, args, kwargs or {})


def _compile_gathered_casts(compile: CompileConfig) -> None:
    """Let torchao cast weights before an all-gather in one compiled kernel, if blocks are compiled.

    Its eager operations move 27 bytes a bf16 weight in place of 3. The function that it calls where
    scales are precomputed is private, but the only place to change this.
    """
    from torchao.float8 import float8_training_tensor, fsdp_utils  # type: ignore[import-untyped]

    compiled = torch.compile(_cast_to_float8, backend=compile.backend, dynamic=True)

    def cast(weight: Tensor, scale: Tensor, dtype: torch.dtype, *options: Any) -> Tensor:
        data = compiled(weight.flatten(), scale, dtype).view(weight.shape)
        return float8_training_tensor.Float8TrainingTensor(data, scale, weight.dtype, *options)

    eager = float8_training_tensor.hp_tensor_and_scale_to_float8
    fsdp_utils.hp_tensor_and_scale_to_float8 = cast if compile.compiles("model") else eager


def _cast_to_float8(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As torchao's `to_fp8_saturated`, of scaled values."""
    largest = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-largest, largest).to(dtype)


def convert_to_float8(
    part: nn.Module, config: Float8Config, compile: CompileConfig = NOT_COMPILED
) -> None:
    """Replace each selected linear layer by a Float8 layer with the same weight and name."""
    if config.experts is not None:
        chosen = select_float8_experts(part, config.experts)
        for experts in chosen.values():
            experts.use_float8(Float8Cast(config.experts.emulate))
        logger.info("float8 in %d layers of experts", len(chosen))
    if config.recipe_name is None:
        return
    selected, excluded = select_float8_layers(part, config)
    if config.recipe_name == "mxfp8":
        _convert_to_mxfp8(part, selected, config.emulate)
    else:
        ao, names = torchao(), set(selected)
        recipe = replace(
            ao.Float8LinearConfig.from_recipe_name(config.recipe_name),
            enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
            emulate=config.emulate,
        )
        _compile_gathered_casts(compile)
        ao.convert_to_float8_training(part, config=recipe, module_filter_fn=lambda _, n: n in names)
        for layer in map(part.get_submodule, selected):
            replace_forward(layer, _forward_tokens, type(layer).forward)
    reasons = {_block_pattern(name): reason for name, reason in excluded.items()}
    shown = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    in_high_precision = f"; in high precision: {shown}" if shown else ""
    logger.info(
        "float8 %s in %d linear layers%s", config.recipe_name, len(selected), in_high_precision
    )


def _forward_tokens(layer: nn.Module, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Give torchao a matrix, as in its backward: then both have equal casts of x, and the compiler
    computes the maximum of a tensor once, and one cast for all layers that share x."""
    return forward(layer, x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def _convert_to_mxfp8(part: nn.Module, names: list[str], emulate: bool) -> None:
    mxfp8 = torchao(MXFP8_MODULE)
    kernels = mxfp8.KernelPreference.EMULATED if emulate else mxfp8.KernelPreference.AUTO
    for name in names:
        old: Any = part.get_submodule(name)
        new = mxfp8.MXFP8Linear(1, 1, bias=False, device="meta", kernel_preference=kernels)
        new.in_features, new.out_features = old.in_features, old.out_features
        new.weight, new.bias = old.weight, old.bias
        part.set_submodule(name, new)


def select_float8_layers(
    model: nn.Module, config: Float8Config
) -> tuple[list[str], dict[str, str]]:
    """(names of the linear layers that become Float8, reason for each that does not).

    "auto_filter_small_kn" is torchao's: tensorwise needs more than 1,024 outputs or 4,096 inputs;
    rowwise more than 2,048 outputs and 1,024 inputs, and more than 4,096 outputs or 2,048 inputs.
    """
    selected, excluded = [], {}
    filters = [name for name in config.filter_fqns if name != AUTO_FILTER]
    is_large_enough = None
    if AUTO_FILTER in config.filter_fqns:
        # An underscored and experimental function, but torchao exports it.
        is_large_enough = torchao()._auto_filter_for_recipe(config.recipe_name, filter_fqns=[])
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        size = f"{layer.out_features}x{layer.in_features}"
        match = next((part for part in filters if part in name), None)
        if isinstance(layer, OutputLayer):
            excluded[name] = "fused with the loss"
        elif isinstance(layer, RouterGate):
            excluded[name] = "computes in fp32"
        elif isinstance(layer, JoiningLinear):
            excluded[name] = "joins the inputs of multi-token prediction"
        elif match is not None:
            excluded[name] = f'"{match}" in filter_fqns'
        elif layer.out_features % config.alignment or layer.in_features % config.alignment:
            excluded[name] = f"{size} is not a multiple of {config.alignment}"
        elif is_large_enough and not is_large_enough(layer, name):
            excluded[name] = f"{size} is too small to be faster"
        else:
            selected.append(name)
    return selected, excluded


def select_float8_experts(
    model: nn.Module, config: Float8ExpertsConfig
) -> dict[str, GroupedExperts]:
    """Name -> experts that compute in Float8."""
    named = {n: m for n, m in model.named_modules() if isinstance(m, GroupedExperts)}
    return {n: m for n, m in named.items() if any(part in n for part in config.fqns)}


def select_linear_styles(config: Float8Config) -> Callable[[nn.Module], LinearStyles]:
    """Return a function from a linear layer to its tensor-parallel styles.

    torchao's styles all-gather activations in Float8, which needs one scale per tensor.
    """
    if config.recipe_name != "tensorwise":
        return lambda layer: DEFAULT_STYLES
    torchao()
    # Not exported by torchao.float8 (0.18), but documented.
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-untyped]
    from torchao.float8.float8_tensor_parallel import (  # type: ignore[import-untyped]
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    float8 = LinearStyles(Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)
    return lambda layer: float8 if isinstance(layer, Float8Linear) else DEFAULT_STYLES


def build_float8_scale_update(
    model: nn.Module, config: Float8Config, tp: DeviceMesh
) -> Callable[[], None]:
    """Return a function that computes the scales of all weights to all-gather in Float8.

    It uses one all-reduce, and must run after every change of the weights. Without it, each weight
    computes its scale when it is gathered, but over the FSDP ranks only: under tensor parallel each
    shard would have its own scale, and the result would depend on the layout. So under tensor
    parallel it runs even if precomputing is not configured.
    """
    precompute = config.precompute_float8_dynamic_scale_for_fsdp or tp.size() > 1
    gathers = config.recipe_name is not None and config.enable_fsdp_float8_all_gather
    if not gathers or not precompute:
        return lambda: None
    return partial(torchao().precompute_float8_dynamic_scale_for_fsdp, model)


def check_float8(
    config: Float8Config, spec: ModelSpec, sizes: ModelSizes, degrees: Degrees, tokens: int
) -> Iterator[ConfigError]:
    """Reject keys and shards that the recipe does not support; `tokens`: of a micro-batch."""
    if config.experts is not None:
        yield from _check_experts(config.experts, spec, sizes, degrees)
    if config.recipe_name is None:
        return
    recipe = config.recipe_name
    if config.enable_fsdp_float8_all_gather and recipe != "tensorwise":
        yield ConfigError(
            f'{SECTION}.enable_fsdp_float8_all_gather = true: needs recipe_name = "tensorwise", not'
            f' "{recipe}": torchao all-gathers weights with one scale only.',
            fix='Use recipe_name = "tensorwise", or remove enable_fsdp_float8_all_gather.',
        )
    if AUTO_FILTER in config.filter_fqns and recipe not in ("tensorwise", "rowwise"):
        yield ConfigError(
            f'{SECTION}.filter_fqns: torchao has no measurements for "{AUTO_FILTER}" with'
            f' recipe_name = "{recipe}".',
            fix="List the layers by name, or use another recipe.",
        )
        return
    try:
        torchao(MXFP8_MODULE if recipe == "mxfp8" else "float8")
    except ConfigError as missing:
        yield missing
        return
    with torch.device("meta"):
        model = spec.build(sizes)
    selected, excluded = select_float8_layers(model, config)
    yield from _check_filters(config, selected, excluded)
    shards = weight_shards(model, spec, sizes, degrees)
    yield from _check_shards(config, {name: shards[f"{name}.weight"] for name in selected}, degrees)
    if recipe != "rowwise_with_gw_hp" and config.aligns_ranks and tokens % config.alignment:
        or_emulate = "" if recipe == "mxfp8" else f", or set {SECTION}.emulate = true"
        yield ConfigError(
            f"{SECTION}.recipe_name: a micro-batch of {tokens} tokens a rank (sequences x"
            " training.seq_len / context-parallel ranks) is not a multiple of"
            f" {config.alignment}, as {recipe} matmuls need.",
            fix="Change training.local_batch_size (with pipeline parallelism"
            " parallelism.pipeline_parallel_microbatch_size), training.seq_len or"
            f" parallelism.context_parallel_degree{or_emulate}.",
        )


def _check_experts(
    config: Float8ExpertsConfig, spec: ModelSpec, sizes: ModelSizes, degrees: Degrees
) -> Iterator[ConfigError]:
    """Reject names that no experts have, and shards that the Float8 kernel does not accept."""
    with torch.device("meta"):
        model = spec.build(sizes)
    experts = select_float8_experts(model, config)
    if not experts:
        yield ConfigError(
            f"{EXPERTS_SECTION}.fqns = {config.fqns}: matches no experts of the model.",
            fix=f'Use ["experts"] for all, or remove "{EXPERTS_SECTION}" from model.converters.',
        )
    unaligned = {
        _block_pattern(name): f"{shape[1]}x{shape[2]}"
        for name, shape in weight_shards(model, spec, sizes, degrees).items()
        if name.rpartition(".")[0] in experts and shape[2] > 1  # not a bias
        if any(size % ALIGNMENT for size in shape[1:])
    }
    if unaligned and not config.emulate:
        shown = ", ".join(f"{name} {size}" for name, size in unaligned.items())
        yield ConfigError(
            f"{EXPERTS_SECTION}.fqns: a rank has weights of {shown}; Float8 matmuls need multiples"
            f" of {ALIGNMENT}.",
            fix=f"Use other tensor-parallel degrees, or set {EXPERTS_SECTION}.emulate = true.",
        )


def _check_filters(
    config: Float8Config, selected: list[str], excluded: dict[str, str]
) -> Iterator[ConfigError]:
    """Reject filters that match no layer, and filters and sizes that leave no Float8 layer."""
    names = [*selected, *excluded]
    for part in config.filter_fqns:
        if part != AUTO_FILTER and not any(part in name for name in names):
            known = ", ".join(dict.fromkeys(map(_block_pattern, names)))
            yield ConfigError(
                f'{SECTION}.filter_fqns: "{part}" matches no linear layer.',
                fix=f"Remove it; the linear layers are {known}.",
            )
    if not selected:
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(excluded.items())[:3])
        yield ConfigError(
            f'{SECTION}.recipe_name = "{config.recipe_name}": no linear layer would be Float8'
            f" ({shown}; ...).",
            fix="Change filter_fqns or the sizes of the model, or remove the recipe.",
        )


def _check_shards(
    config: Float8Config, shapes: Mapping[str, list[int]], degrees: Degrees
) -> Iterator[ConfigError]:
    """Reject shards [rows, columns] that the matmuls or torchao's all-gather cannot use."""
    unaligned, uneven, fsdp_ranks = {}, {}, degrees.shard * degrees.context
    for name, (rows, columns) in shapes.items():
        if rows % config.alignment or columns % config.alignment:
            unaligned[_block_pattern(name)] = f"{rows}x{columns}"
        if rows % fsdp_ranks:
            uneven[_block_pattern(name)] = f"{rows}"
    if unaligned and config.aligns_ranks:
        shown = ", ".join(f"{name} {size}" for name, size in unaligned.items())
        yield ConfigError(
            f"parallelism.tensor_parallel_degree = {degrees.tensor}: makes shards of {shown};"
            f" {config.recipe_name} matmuls need multiples of {config.alignment}.",
            fix=f"Use a smaller degree, or add these layers to {SECTION}.filter_fqns.",
        )
    if uneven and config.enable_fsdp_float8_all_gather:
        shown = ", ".join(f"{name} ({rows})" for name, rows in uneven.items())
        yield ConfigError(
            f"{SECTION}.enable_fsdp_float8_all_gather = true: {fsdp_ranks} ranks do not divide the"
            f" rows of {shown}, and torchao all-gathers only shards of equal size.",
            fix=f"Add these layers to {SECTION}.filter_fqns, use other degrees, or remove"
            " enable_fsdp_float8_all_gather.",
        )


def check_float8_device(
    config: Float8Config, gpu: Gpu | None, compiles_blocks: bool
) -> Iterator[ConfigError]:
    """Reject a device without Float8 hardware, unless emulated, and emulation that inductor cannot
    compile. `gpu` None: a CPU."""
    on_experts = config.experts is not None and not config.experts.emulate
    if on_experts and (gpu is None or gpu.capability != FLOAT8_CAPABILITY):
        yield ConfigError(
            f"{EXPERTS_SECTION}.fqns: this device ({gpu or 'a CPU'}) has no grouped Float8 matmuls;"
            " a GPU of compute capability 9.0 has.",
            fix=f"Set {EXPERTS_SECTION}.emulate = true to try it here, slowly.",
        )
    if config.recipe_name is None:
        return
    is_mx = config.recipe_name == "mxfp8"  # torchao's kernels are not for 12.0
    is_supported = gpu is not None and (gpu.capability[0] == 10 if is_mx else gpu.supports_float8)
    if not config.emulate and not is_supported:
        kind, needed = ("MXFP8", "10") if is_mx else ("Float8", "8.9 or later")
        yield ConfigError(
            f'{SECTION}.recipe_name = "{config.recipe_name}": this device ({gpu or "a CPU"}) has no'
            f" {kind} matmuls; a GPU of compute capability {needed} has.",
            fix=f"Set {SECTION}.emulate = true to try it here, slowly.",
        )
    elif config.emulate and gpu is not None and compiles_blocks and not gpu.compiles_float8:
        yield ConfigError(
            f"{SECTION}.emulate = true: torch {torch.__version__} compiles casts to Float8 for GPUs"
            f" of compute capability 8.9 or later only; this device is {gpu}.",
            fix=f"Use torch {FLOAT8_FALLBACK_SINCE} or newer, compile.enable = false, or"
            ' compile.components = ["loss"].',
        )


def _block_pattern(name: str) -> str:
    """A name with its block number replaced by `*`, because blocks are alike."""
    return re.sub(r"\.\d+\.", ".*.", name)
