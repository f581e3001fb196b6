"""Matrix products in 8 bits, by torchao (https://github.com/pytorch/ao/tree/main/torchao/float8).

Weights are kept, updated and saved as without it. What a product is given is scaled into the range
of 8 bits and rounded as the product begins; what it gives is in the type that the model computes
in, float32 included, where nothing but the products is then rounded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError
from titanlite.log import logger
from titanlite.models import ModelSizes, ModelSpec, OutputLayer, first_match
from titanlite.parallelize.tensor import PLAIN, ParallelStyles, part_of

SECTION = "quantize.linear.float8"
AUTO = "auto_filter_small_kn"  # torchtitan's word in filter_fqns
MULTIPLE = 16  # of the sizes that the units for 8 bits take


@dataclass(frozen=True)
class Float8Config:
    """[quantize.linear.float8] Matrix products in 8 bits."""

    enable_fsdp_float8_all_gather: bool = False
    # gather weights in 8 bits, half of the traffic; tensorwise only
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    # the scales of all weights so gathered by one reduction a step, instead of one each
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    # what shares a scale: a tensor, or a row (gw_hp: gradients of weights in high precision);
    # unset: no Float8
    filter_fqns: list[str] = field(default_factory=list)
    # parts of the names of linear layers left in high precision, as the output layer always is;
    # "auto_filter_small_kn": also those that torchao found too small to gain, on an H100;
    # sizes that are not multiples of 16 always are
    emulate: bool = False  # round to 8 bits, but compute in float32: for hardware without Float8

    def __str__(self) -> str:
        named = {
            "weights gathered in 8 bits": self.enable_fsdp_float8_all_gather,
            "scaled at once": self.precompute_float8_dynamic_scale_for_fsdp,
            "emulated": self.emulate,
        }
        return ", ".join([str(self.recipe_name), *(name for name, on in named.items() if on)])


@dataclass(frozen=True)
class QuantizeLinearConfig:
    float8: Float8Config = field(default_factory=Float8Config)


@dataclass(frozen=True)
class QuantizeConfig:
    linear: QuantizeLinearConfig = field(default_factory=QuantizeLinearConfig)


def resolve_float8(config: Float8Config, converters: list[str]) -> Float8Config:
    """The section as torchtitan means it: its switch alone asks for the recipe "tensorwise"."""
    if SECTION in converters and config.recipe_name is None:
        return replace(config, recipe_name="tensorwise")
    return config


@cache
def torchao() -> ModuleType:
    """torchao.float8, imported without its noise; raises ConfigError where it is missing."""
    # It warns of kernels built for other machines, and makes torch warn of how it registers types.
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [one.level for one in noisy]
    try:
        for one in noisy:
            one.setLevel(logging.ERROR)
        import torchao.float8 as float8
        from torchao.float8 import float8_ops
    except ImportError as missing:
        raise ConfigError(
            f"{SECTION}.recipe_name: Float8 is computed by torchao, which cannot be imported"
            f" ({missing}).",
            fix='Install it with "pip install torchao" (tested: 0.18.0).',
            keys=(f"{SECTION}.recipe_name",),
        ) from missing
    finally:
        for one, level in zip(noisy, levels, strict=True):
            one.setLevel(level)
    _gather_bytes(float8_ops.FLOAT8_OPS_TABLE)
    return float8


def _gather_bytes(table: dict) -> None:
    """Let torchao gather 8-bit numbers of a CPU as bytes: gloo has no type for them (2.13).

    Its table of operations is private, but the only place where it says how they travel.
    """
    for operation in [op for op in table if "all_gather_into_tensor" in str(op)]:
        table[operation] = partial(_gathered, table[operation])


def _gathered(theirs: Callable, operation, args: tuple, kwargs: dict | None = None):
    if args[0].device.type != "cpu":
        return theirs(operation, args, kwargs)

    def of_bytes(data: torch.Tensor, *rest, **options) -> torch.Tensor:
        return operation(data.view(torch.uint8), *rest, **options).view(data.dtype)

    return theirs(of_bytes, args, kwargs or {})


def convert_to_float8(part: nn.Module, config: Float8Config) -> None:
    """Put a Float8 layer with the same weight and name where each chosen linear layer was."""
    if config.recipe_name is None:
        return
    ao = torchao()
    chosen, left = float8_layers(part, config)
    recipe = replace(
        ao.Float8LinearConfig.from_recipe_name(config.recipe_name),
        enable_fsdp_float8_all_gather=config.enable_fsdp_float8_all_gather,
        emulate=config.emulate,
    )
    if config.recipe_name != "tensorwise":
        # Compiled, a norm in backward would else be computed with other roundings than in forward,
        # and the loss end in NaN (https://github.com/pytorch/pytorch/issues/150859).
        torch._inductor.config.emulate_precision_casts = True
    names = set(chosen)
    ao.convert_to_float8_training(part, config=recipe, module_filter_fn=lambda _, n: n in names)
    spared = {re.sub(r"\.\d+\.", ".*.", name): why for name, why in left.items()}
    reasons = "".join(f"; {name} is not ({why})" for name, why in spared.items())
    logger.info("%d linear layers are Float8, %s%s", len(chosen), config.recipe_name, reasons)


def float8_layers(model: nn.Module, config: Float8Config) -> tuple[list[str], dict[str, str]]:
    """(names of the linear layers that become Float8, and why each other one does not).

    Which do not pay is torchao's to say: by its tables, tensorwise needs more than 1,024 outputs
    or 4,096 inputs, rowwise more than 2,048 outputs and 1,024 inputs, and more than 4,096 or 2,048.
    """
    chosen, left = [], {}
    words = [word for word in config.filter_fqns if word != AUTO]
    pays = None
    if AUTO in config.filter_fqns:  # experimental by its name, but what torchao exports
        pays = torchao()._auto_filter_for_recipe(config.recipe_name, filter_fqns=[])
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if isinstance(layer, OutputLayer):
            left[name] = "one with the loss"
            continue
        sizes = f"{layer.out_features} x {layer.in_features}"
        if spared := next((word for word in words if word in name), None):
            left[name] = f'"{spared}" in filter_fqns'
        elif layer.out_features % MULTIPLE or layer.in_features % MULTIPLE:
            left[name] = f"{sizes}, no multiples of {MULTIPLE}"
        elif pays and not pays(layer, name):
            left[name] = f"{sizes}, too small to gain"
        else:
            chosen.append(name)
    return chosen, left


def float8_column(config: Float8Config) -> Callable[[nn.Module], ParallelStyles]:
    """Which column of the table of styles a linear layer is split by.

    Those of Float8 gather activations in 8 bits, already scaled, which needs one scale a tensor.
    """
    if config.recipe_name != "tensorwise":
        return lambda layer: PLAIN
    torchao()
    # Not in its public module (0.18), but its types nevertheless.
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    float8 = ParallelStyles(Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)
    return lambda layer: float8 if isinstance(layer, Float8Linear) else PLAIN


def build_float8_scale_update(
    model: nn.Module, config: Float8Config, tp: DeviceMesh
) -> Callable[[], None]:
    """What finds the scales of all weights of `model` gathered in 8 bits, by one reduction.

    It must run whenever weights may have changed. Where it does nothing, each weight finds its own
    as it is gathered; but over the ranks of FSDP only, so that each tensor-parallel part would have
    a scale of its own, and the layout a say in what is learned.
    """
    gathered, split = config.enable_fsdp_float8_all_gather, tp.size() > 1
    if not gathered or not (config.precompute_float8_dynamic_scale_for_fsdp or split):
        return lambda: None
    return partial(torchao().precompute_float8_dynamic_scale_for_fsdp, model)


# --- what cannot be ------------------------------------------------------------------------------


def float8_problems(
    config: Float8Config, spec: ModelSpec, sizes: ModelSizes, degrees: Degrees, tokens: int
) -> Iterator[ConfigError]:
    """Keys that ask for what the recipe has not, and layers that cannot be split as asked.

    `tokens` are those that a rank runs at once.
    """
    recipe, gather = config.recipe_name, config.enable_fsdp_float8_all_gather
    if recipe is None:
        # A filter alone is kept: what it names is in high precision, as is everything.
        for name in (
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "emulate",
        ):
            if getattr(config, name):
                yield _problem(
                    f"{SECTION}.{name} = true: but no recipe is set, so nothing is Float8.",
                    f'Set {SECTION}.recipe_name = "tensorwise", or leave it out.',
                    name,
                )
        return
    if gather and recipe != "tensorwise":
        yield _problem(
            f'{SECTION}.enable_fsdp_float8_all_gather = true: needs recipe_name = "tensorwise", not'
            f' "{recipe}"; a shard cannot know the scales of whole rows or columns.',
            'Use recipe_name = "tensorwise", or leave it out.',
            "enable_fsdp_float8_all_gather",
        )
    if config.precompute_float8_dynamic_scale_for_fsdp and not gather:
        yield _problem(
            f"{SECTION}.precompute_float8_dynamic_scale_for_fsdp = true: it is for weights that are"
            " gathered in 8 bits, and enable_fsdp_float8_all_gather = false.",
            "Set that to true, or leave this out.",
            "precompute_float8_dynamic_scale_for_fsdp",
        )
    if AUTO in config.filter_fqns and recipe == "rowwise_with_gw_hp":
        yield _problem(
            f'{SECTION}.filter_fqns: "{AUTO}" goes by figures that torchao has not for'
            f' recipe_name = "{recipe}".',
            "Name the layers, or use another recipe.",
            "filter_fqns",
        )
        return
    try:
        torchao()
    except ConfigError as missing:
        yield missing
        return
    with torch.device("meta"):
        model = spec.build(sizes)
    yield from _layer_problems(config, model, spec.tp_plan, sizes.head_width, degrees)
    if not config.emulate and recipe != "rowwise_with_gw_hp" and tokens % MULTIPLE:
        yield _problem(
            f"{SECTION}.recipe_name: a rank runs {tokens} tokens at once (sequences of a"
            " micro-batch x training.seq_len / context-parallel ranks); Float8 units take"
            f" multiples of {MULTIPLE}.",
            f"Change one of them, or use {SECTION}.emulate = true.",
            "recipe_name",
        )


def _layer_problems(
    config: Float8Config,
    model: nn.Module,
    split: Mapping[str, str],
    head_width: int,
    degrees: Degrees,
) -> Iterator[ConfigError]:
    chosen, left = float8_layers(model, config)
    linear = [*chosen, *left]
    for word in config.filter_fqns:
        if word != AUTO and not any(word in name for name in linear):
            yield _problem(
                f'{SECTION}.filter_fqns: "{word}" is in the name of no linear layer.',
                f"Take it out; there are {', '.join(_patterns(linear))}.",
                "filter_fqns",
            )
    if not chosen:
        why = "; ".join(f"{name}: {left[name]}" for name in list(left)[:3])
        yield _problem(
            f'{SECTION}.recipe_name = "{config.recipe_name}": no linear layer would be Float8'
            f" ({why}…).",
            "Change filter_fqns or the sizes of the model, or leave the recipe out.",
            "recipe_name",
        )
    narrow, uneven, ranks = {}, {}, degrees.shard * degrees.context
    for name, pattern in zip(chosen, _patterns(chosen, unique=False), strict=True):
        layer = model.get_submodule(name)
        sizes = (layer.out_features, layer.in_features)
        rows, columns = part_of(first_match(split, name), *sizes, degrees.tensor, head_width)
        if rows % MULTIPLE or columns % MULTIPLE:
            narrow[pattern] = f"{rows} x {columns}"
        if rows % ranks:
            uneven[pattern] = f"{rows}"
    if narrow and not config.emulate:
        shown = ", ".join(f"{name} {sizes}" for name, sizes in narrow.items())
        yield _problem(
            f"parallelism.tensor_parallel_degree = {degrees.tensor}: leaves each rank of {shown};"
            f" Float8 units take multiples of {MULTIPLE}.",
            f"Use fewer ranks, or name them in {SECTION}.filter_fqns.",
            "filter_fqns",
        )
    if uneven and config.enable_fsdp_float8_all_gather:
        shown = ", ".join(f"{name} ({rows})" for name, rows in uneven.items())
        yield _problem(
            f"{SECTION}.enable_fsdp_float8_all_gather = true: {ranks} ranks cannot share the rows"
            f" of {shown} evenly, and torchao gathers equal shares only.",
            f"Name them in {SECTION}.filter_fqns, use other degrees, or leave it out.",
            "enable_fsdp_float8_all_gather",
        )


def float8_device_problems(config: Float8Config, device: torch.device) -> Iterator[ConfigError]:
    """A device that has no units for 8 bits."""
    if config.recipe_name is None or config.emulate:
        return
    has = "a CPU"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 9):  # Ada; Hopper is 9.0
            return
        shown = ".".join(map(str, capability))
        has = f"{torch.cuda.get_device_name(device)}, of capability {shown}"
    yield _problem(
        f'{SECTION}.recipe_name = "{config.recipe_name}": this device ({has}) does not compute in'
        " Float8; a GPU of capability 8.9 or later does.",
        f"Set {SECTION}.emulate = true to try it out here, slowly.",
        "emulate",
    )


def _patterns(names: list[str], unique: bool = True) -> list[str]:
    found = [re.sub(r"\.\d+\.", ".*.", name) for name in names]
    return list(dict.fromkeys(found)) if unique else found


def _problem(message: str, fix: str, key: str) -> ConfigError:
    return ConfigError(message, fix=fix, keys=(f"{SECTION}.{key}",))
