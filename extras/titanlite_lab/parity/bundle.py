"""The files of a parity bundle, and of the answer that another trainer writes.

An answer has a part of the files of a bundle, in the same format, so a bundle answers itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titanlite.errors import DataError
from titanlite.files import parse_json

FORMAT = 1
FACTS_FILE, LOSSES_FILE, TOLERANCES_FILE = "parity.json", "losses.json", "tolerances.json"
SUMMARIES_FILE = "gradient_summaries.json"  # instead of the gradients, if they are large
WEIGHTS_FOLDER, BATCHES_FOLDER, GRADIENTS_FOLDER = "weights", "batches", "gradients"

PROJECTIONS = 8  # of a gradient that a bundle only summarizes
ZERO = 1e-5  # of the largest tensor: what smaller ones are compared with, see `gradient_error`


@dataclass(frozen=True)
class StepScalars:
    """The numbers of one step, or how far they may differ."""

    step: int  # from 1
    loss: float  # mean cross-entropy of the valid labels of the batch, before the update
    grad_norm: float  # 2-norm of the whole gradient
    update_norms: Mapping[str, float] = field(default_factory=dict)
    # 2-norm of what the update changes each tensor by, by Hugging Face's names


@dataclass(frozen=True)
class StepTolerances(StepScalars):
    """How far each measurement of a step may differ; relative."""

    gradients: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GradientSummary:
    """What a bundle keeps of a gradient, if it does not keep the tensor."""

    shape: list[int]
    norm: float
    projections: list[float]  # see `project`


@dataclass(frozen=True)
class BundleFacts:
    """What a bundle was computed from, and how."""

    family: str
    steps: int
    sequences: int
    seq_len: int
    learning_rate: float
    seed: int
    data: str
    parameters: int
    gradients_are_full: bool
    order: list[str]  # Hugging Face's names of the gradients, as backward completes them


# --- measurements ---------------------------------------------------------------------------------


def summarize(gradient: Tensor) -> GradientSummary:
    """The summary of a full gradient."""
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    return GradientSummary(list(gradient.shape), norm, project(gradient))


def project(tensor: Tensor) -> list[float]:
    """Sums of all values with fixed random signs: the same in every program.

    The sign of value i (row-major) in projection k is a bit of the hash "lowbias32"
    (Chris Wellons, https://nullprogram.com/blog/2018/07/31/, public domain) of i * PROJECTIONS + k
    modulo 2^32.
    """
    flat, sums = tensor.detach().reshape(-1), torch.zeros(PROJECTIONS, dtype=torch.float64)
    for start in range(0, len(flat), 1 << 20):
        part = flat[start : start + (1 << 20)].double()
        index = torch.arange(start, start + len(part)) * PROJECTIONS
        for k in range(PROJECTIONS):
            sums[k] += part @ (1 - 2 * (_hash(index + k) & 1)).double()
    return sums.tolist()


def _hash(x: Tensor) -> Tensor:
    x = x & 0xFFFFFFFF
    x = _multiply(x ^ (x >> 16), 0x7FEB352D)
    x = _multiply(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def _multiply(x: Tensor, factor: int) -> Tensor:
    """The product of 32-bit numbers modulo 2^32; that of int64 would overflow."""
    high, low = factor >> 16, factor & 0xFFFF
    return (x * low + ((x * high & 0xFFFF) << 16)) & 0xFFFFFFFF


def size_of(gradient: Tensor | GradientSummary) -> float:
    """What errors of a gradient are relative to: its largest absolute value, or its norm."""
    if isinstance(gradient, GradientSummary):
        return gradient.norm
    return gradient.abs().max().item() if gradient.numel() else 0.0


def gradient_error(actual: Tensor, expected: Tensor | GradientSummary, largest: float) -> float:
    """The relative error of a gradient; `largest` is the `size_of` the largest gradient of a step.

    A gradient that is zero but for rounding, such as that of the bias of keys without RoPE, is
    compared with a part of the largest one; see ZERO.
    """
    scale = max(size_of(expected), ZERO * largest, 1e-30)
    if isinstance(expected, Tensor):
        return _finite_or_inf(size_of(actual.double() - expected.double()) / scale)
    summary = summarize(actual)
    pairs = [(summary.norm, expected.norm)]
    pairs += zip(summary.projections, expected.projections, strict=True)
    return max(_finite_or_inf(abs(a - b) / scale) for a, b in pairs)


def relative_error(actual: float, expected: float, largest: float = 0.0) -> float:
    """The relative error of a number, with the rule of `gradient_error`."""
    return _finite_or_inf(abs(actual - expected) / max(abs(expected), ZERO * largest, 1e-30))


def _finite_or_inf(error: float) -> float:
    return error if math.isfinite(error) else math.inf  # NaN is larger than any tolerance


# --- files ----------------------------------------------------------------------------------------


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_scalars(folder: Path, steps: list[StepScalars]) -> None:
    write_json(folder / LOSSES_FILE, {"steps": [asdict(step) for step in steps]})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises DataError."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: is not a JSON object.")
    return content


def read_facts(bundle: Path) -> BundleFacts:
    """What a bundle was computed from; raises DataError if it is not a complete bundle."""
    if not (bundle / FACTS_FILE).is_file():
        raise DataError(
            f"{bundle}: is no complete bundle: it has no {FACTS_FILE}, which is written last.",
            fix="Write one: python -m titanlite_lab parity write --job.config_file TOML --out DIR",
        )
    content = read_json(bundle / FACTS_FILE)
    if content.pop("format", None) != FORMAT:
        raise DataError(f"{bundle / FACTS_FILE}: is not of format {FORMAT}.", fix="Write it again.")
    try:
        return BundleFacts(**content)
    except TypeError as error:
        raise DataError(f"{bundle / FACTS_FILE}: is damaged: {error}.") from None


def read_scalars(folder: Path, steps: int) -> list[StepScalars]:
    """The numbers of `steps` steps; raises DataError that states what is missing."""
    return _read_steps(folder / LOSSES_FILE, steps, StepScalars)


def read_tolerances(bundle: Path, steps: int) -> list[StepTolerances]:
    return _read_steps(bundle / TOLERANCES_FILE, steps, StepTolerances)


def _read_steps(path: Path, steps: int, kind: type) -> list[Any]:
    if not path.is_file():
        raise DataError(
            f"{path}: does not exist.", fix="README.md of the bundle says what to write."
        )
    entries = read_json(path).get("steps")
    if not isinstance(entries, list) or len(entries) != steps:
        has = f"{len(entries)} entries" if isinstance(entries, list) else "no list"
        raise DataError(
            f'{path}: "steps" has {has}; the bundle has {steps} steps.',
            fix="Write one object for each step, in order.",
        )
    return [_read_step(path, number, entry, kind) for number, entry in enumerate(entries, 1)]


def _read_step(path: Path, number: int, entry: Any, kind: type) -> Any:
    place = f"{path}: entry {number}"
    if not isinstance(entry, dict) or entry.get("step") != number:
        raise DataError(f'{place}: must be an object with "step": {number}.')
    scalars = {key: entry.get(key) for key in ("loss", "grad_norm")}
    maps = {key: entry.get(key) or {} for key in ("update_norms", "gradients")}
    for key, value in scalars.items():
        if not _is_number(value):
            raise DataError(f'{place}: "{key}" is {value!r:.60}; it must be a number.')
    for key, values in maps.items():
        if not isinstance(values, dict) or not all(map(_is_number, values.values())):
            raise DataError(f'{place}: "{key}" must be an object of names and numbers.')
    if kind is StepScalars:
        del maps["gradients"]
    return kind(number, **scalars, **maps)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_summaries(bundle: Path, step: int) -> dict[str, GradientSummary]:
    """The summaries of one step by Hugging Face's names."""
    content = read_json(bundle / SUMMARIES_FILE).get(str(step), {})
    return {name: GradientSummary(**summary) for name, summary in content.items()}


class TensorFiles:
    """The tensors of all safetensors files of one folder, each read when it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self._file_of: dict[str, Any] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise DataError(
                f"{folder}: has no .safetensors file.",
                fix="Write the gradients of this step there, under Hugging Face's names.",
            )
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path}: is damaged or truncated: {error}.") from None
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        """A tensor of fp32 or fp64; raises DataError for another dtype."""
        tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise DataError(
                f"{self.folder}: {name} is {tensor.dtype}; a bundle is compared in fp32.",
                fix="Train with weights, activations and gradients in fp32, and write these.",
            )
        return tensor


def gradients_folder(folder: Path, step: int) -> Path:
    return folder / GRADIENTS_FOLDER / f"step-{step}"
