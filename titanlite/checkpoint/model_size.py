"""Sizes of a model that a checkpoint or a Hugging Face folder describes."""

from __future__ import annotations

import torch

from titanlite.errors import CheckpointError
from titanlite.models import ModelSizes, ModelSpec
from titanlite.storage import StorageFolder

MAX_LAYERS = 10_000  # each takes memory before any of its weights is read
MAX_PARAMETERS = 1 << 50


def check_model_size(
    folder: StorageFolder, spec: ModelSpec, sizes: ModelSizes, tensors: int
) -> None:
    """Raise CheckpointError for a model that a folder with `tensors` tensors cannot contain.

    To be called before the model is built, which takes memory and time for each layer.
    """
    layers, parameters = sizes.n_layers, spec.count_parameters(sizes)
    if layers > MAX_LAYERS or parameters > MAX_PARAMETERS:
        raise CheckpointError(
            f"{folder}: describes a model of {_format_count(layers)} layers and"
            f" {_format_count(parameters)} parameters; the limits are {MAX_LAYERS:,} and"
            f" {float(MAX_PARAMETERS):.1e}."
        )
    if layers > tensors:
        raise CheckpointError(
            f"{folder}: describes a model of {layers:,} layers, but contains only {tensors:,}"
            " tensors."
        )
    if problems := [problem.message for problem in spec.find_size_problems(sizes)]:
        raise CheckpointError(f"{folder}: describes an impossible model: {' '.join(problems)}")


def _format_count(number: float) -> str:
    return f"{number:,}" if number < 1e9 else f"{number:.1e}" if number < 1e300 else "over 1e300"


def parameter_shapes(spec: ModelSpec, sizes: ModelSizes) -> dict[str, torch.Size]:
    """Name and shape of every parameter; tied parameters are listed under both names."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in spec.build(sizes).state_dict().items()}


def buffer_names(spec: ModelSpec, sizes: ModelSizes) -> set[str]:
    """Names of the buffers, which are in fp32 in every precision.

    Rounded to bfloat16, selection biases that many small updates have moved select other experts.
    """
    with torch.device("meta"):
        return {name for name, _ in spec.build(sizes).named_buffers()}
