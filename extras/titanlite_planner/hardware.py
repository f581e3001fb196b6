"""GPUs and the machines that they are in: peaks, memory, links, power and price.

The figures are in `hardware.toml`, with their sources; a file of the user may add to them. Peak
FLOP/s of a device that CUDA names are in `titanlite.metrics.hardware`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import torch

from titanlite.errors import ConfigError
from titanlite.files import parse_toml
from titanlite.metrics.gpu_peaks import peak_flops
from titanlite_planner.time.cpu_rates import measure_rates
from titanlite_planner.workload import MatmulPrecision

CPU = "CPU"  # the name of this machine
PRECISIONS: tuple[MatmulPrecision, ...] = get_args(MatmulPrecision)
_TORCH_DTYPES: dict[MatmulPrecision, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class GpuType:
    """One accelerator, or one process of a CPU."""

    name: str
    peak_tflops: Mapping[str, float]  # dense, by precision of the matmul
    memory_gib: float
    memory_gb_per_s: float
    attention_tflops: Mapping[str, float] = field(default_factory=dict)
    # measured, by precision; without it, attention reaches a fraction of the matmuls' peak
    multiprocessors: int = 1  # matmul tiles that run at once
    flash2_rate: float = 1.0  # of FlashAttention-2, divided by that of the generation's own kernel
    watts: float | None = None
    source: str = ""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def is_cpu(self) -> bool:
        """Whether it is a process of a CPU."""
        return self.name == CPU

    def peak_flops(self, precision: MatmulPrecision) -> float:
        """Dense FLOP/s; raises ConfigError for a precision without units."""
        if precision not in self.peak_tflops:
            known = ", ".join(self.peak_tflops)
            raise ConfigError(
                f"{self.name} has no matmul units for {precision}.", fix=f"It has: {known}."
            )
        return self.peak_tflops[precision] * 1e12


@dataclass(frozen=True)
class Machine:
    """A server, and how its GPUs reach others. Bandwidths are of one GPU, in one direction."""

    name: str
    gpus: int
    link_domain: int  # GPUs that reach each other over NVLink, or the bus of the server
    link_gb_per_s: float
    network_gbit_per_s: float
    host_gb_per_s: float = 64.0  # of one GPU, to the memory of the host: PCIe 5.0 x16
    host_gib: float = 128.0  # memory of the host, divided by its GPUs
    watts: float | None = None  # of the server, divided by its GPUs
    dollars_per_hour: float | None = None  # of one GPU
    price_source: str = ""
    source: str = ""


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs in equal machines."""

    gpu: GpuType
    machine: Machine
    gpus: int
    overlaps: bool = True  # communication runs while the GPU computes

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of one GPU for an hour, if it is known."""
        return self.machine.dollars_per_hour

    def resized(self, gpus: int) -> Cluster:
        """The same kind of cluster with another number of GPUs."""
        return dataclasses.replace(self, gpus=gpus)

    def bandwidth(self, size: int, stride: int) -> float:
        """Bytes/s of each rank in a ring over `size` ranks whose numbers differ by `stride`.

        Inside a link domain, the ring runs at the speed of the links. Otherwise it crosses the
        network as often as there are domains, over the network cards of all its members in a
        domain: NCCL makes a ring for each card.
        """
        machine = self.machine
        link, network = machine.link_gb_per_s * 1e9, machine.network_gbit_per_s * 1e9 / 8
        members = max(1, machine.link_domain // stride)  # of one domain
        return link if size <= members else min(link, network * members)

    def crosses_network(self, size: int, stride: int) -> bool:
        """Whether a group spans more than one link domain."""
        return size > max(1, self.machine.link_domain // stride)


def parse_gpus(text: str, hardware: Path | None = None) -> Cluster:
    """The cluster of "512xH100" or "512xp5.48xlarge": a number of GPUs, and a GPU or a machine.

    `hardware` is a file of the user whose GPUs and machines are known too. Raises ConfigError.
    """
    match = re.fullmatch(r"\s*(\d+)\s*[xX×*]\s*(\S+)\s*", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(
            f'"{text}" is not a number of GPUs and a name.', fix='Write it as "512xH100".'
        )
    return find_cluster(match[2], int(match[1]), hardware)


def find_cluster(name: str, gpus: int, hardware: Path | None = None) -> Cluster:
    """`gpus` GPUs of one name, or in machines of one name; case does not matter.

    "cpu" is this machine, measured now; a GPU is then a process.
    """
    if name.upper() == CPU:
        return measure_cpu(gpus)
    tables = _read_tables(hardware)
    key = re.sub(r"^((nvidia|geforce|rtx)[-_]?)+", "", name.lower())
    machine_of = {gpu.lower(): table["machine"] for gpu, table in tables["gpus"].items()}
    machines = {machine.lower(): machine for machine in tables["machines"]}
    machine_name = machines.get(machine_of.get(key, key).lower())
    if machine_name is None:
        names = ", ".join([*tables["gpus"], *tables["machines"], CPU])
        raise ConfigError(
            f'"{name}" is neither a GPU nor a machine that is known.',
            fix=f"Use one of: {names}; or describe it in a file, as in extras/titanlite_planner/"
            "hardware.toml.",
        )
    return _build_cluster(tables, machine_name, gpus)


def measure_cpu(
    processes: int, seconds: float = 0.25, clock: Callable[[], float] = time.perf_counter
) -> Cluster:
    """This machine, with one process per GPU of the cluster; takes about six times `seconds`.

    `clock` times the measurements: time.process_time does not count what other programs take.
    Communication is hidden only if it has a core that does not compute.
    """
    rates = measure_rates(processes, seconds, clock)
    gpu = GpuType(
        CPU,
        {name: flops / 1e12 for name, flops in rates.matmul.items()},
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / processes,
        rates.memory / 1e9,
        attention_tflops={name: flops / 1e12 for name, flops in rates.attention.items()},
        source="measured on this machine",
    )
    machine = Machine(CPU, processes, processes, rates.link / 1e9, 10.0, rates.memory / 1e9)
    return Cluster(gpu, machine, processes, overlaps=processes < (os.cpu_count() or 1))


def cluster_names(hardware: Path | None = None) -> list[str]:
    """The names of all GPUs and machines."""
    tables = _read_tables(hardware)
    return [*tables["gpus"], *tables["machines"]]


def _build_cluster(tables: dict[str, Any], machine_name: str, gpus: int) -> Cluster:
    table = dict(tables["machines"][machine_name])
    gpu_name = table.pop("gpu")
    gpu_table = dict(tables["gpus"][gpu_name])
    gpu_table.pop("machine")
    for key in ("dollars_per_hour", "price_source"):
        from_gpu = gpu_table.pop(key, None)
        if from_gpu is not None:
            table.setdefault(key, from_gpu)
    peaks = _published_peaks(gpu_table.pop("device", None)) | gpu_table.pop("peak_tflops", {})
    gpu = GpuType(name=gpu_name, peak_tflops=peaks, **gpu_table)
    return Cluster(gpu, Machine(name=machine_name, **table), gpus)


def _published_peaks(device: str | None) -> dict[str, float]:
    """TFLOP/s by precision of a device that CUDA names so."""
    if device is None:
        return {}
    found = {name: peak_flops(device, dtype) for name, dtype in _TORCH_DTYPES.items()}
    return {name: peak / 1e12 for name, peak in found.items() if peak is not None}


@cache
def _read_tables(hardware: Path | None) -> dict[str, Any]:
    """Tables of GPUs and of machines; those of the user replace ours of the same name."""
    built_in = files("titanlite_planner").joinpath("hardware.toml").read_text(encoding="utf-8")
    tables = _flat_tables(parse_toml(built_in))
    if hardware is None:
        return tables
    try:
        own = _flat_tables(parse_toml(hardware.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f'Hardware file "{hardware}" cannot be read: {reason}.') from None
    merged = {kind: tables[kind] | own[kind] for kind in ("gpus", "machines")}
    problems = list(_table_problems(merged, own))
    if problems:
        raise ConfigError(
            f'Hardware file "{hardware}": {"; ".join(problems)}.',
            fix="The comment at the top of extras/titanlite_planner/hardware.toml lists the keys.",
        )
    return merged


def _flat_tables(table: dict[str, Any]) -> dict[str, Any]:
    """{"gpus": …, "machines": …}; a name with a dot, p5.48xlarge, is one name."""
    unknown = sorted(set(table) - {"gpus", "machines"})
    if unknown:
        raise ValueError(f"unknown tables: {', '.join(unknown)}")
    flat: dict[str, Any] = {"gpus": {}, "machines": {}}
    for kind, entries in table.items():
        if not isinstance(entries, dict):
            raise ValueError(f"{kind} is not a table")
        for name, entry in entries.items():
            flat[kind] |= dict(_joined_names(name, entry))
    return flat


def _joined_names(name: str, entry: Any) -> list[tuple[str, dict[str, Any]]]:
    """The tables below a name; one that has nothing but tables is a part of a name with a dot."""
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is not a table")
    if not entry or not all(isinstance(value, dict) for value in entry.values()):
        return [(name, entry)]
    return [pair for key, value in entry.items() for pair in _joined_names(f"{name}.{key}", value)]


_MACHINE_KEYS = {field.name for field in dataclasses.fields(Machine)} - {"name"} | {"gpu"}
_GPU_KEYS = {field.name for field in dataclasses.fields(GpuType)} - {"name"}
_GPU_KEYS |= {"device", "machine", "dollars_per_hour", "price_source"}
_NEEDED = {
    "gpus": {"memory_gib", "memory_gb_per_s", "machine"},
    "machines": {"gpu", "gpus", "link_domain", "link_gb_per_s", "network_gbit_per_s"},
}


_TEXT_KEYS = {"device", "machine", "gpu", "source", "price_source"}
_PRECISION_KEYS = {"peak_tflops", "attention_tflops"}
_INTEGER_KEYS = {"gpus", "link_domain", "multiprocessors"}


def _table_problems(merged: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the user's tables."""
    for kind, known in (("gpus", _GPU_KEYS), ("machines", _MACHINE_KEYS)):
        other, key = ("machines", "machine") if kind == "gpus" else ("gpus", "gpu")
        for name, table in own[kind].items():
            label = f"[{kind}.{name}]"
            if unknown := sorted(set(table) - known):
                yield f"{label} has unknown keys: {', '.join(unknown)}"
            if missing := sorted(_NEEDED[kind] - set(table)):
                yield f"{label} lacks {', '.join(missing)}"
            wrong = {k: form for k, value in table.items() if (form := _needed_form(k, value))}
            yield from (f"{label} {k} = {table[k]}: must be {form}" for k, form in wrong.items())
            if key in table and key not in wrong and table[key] not in merged[other]:
                yield f'{label} {key} = "{table[key]}" is in no table of {other}'
            readable = not {"device", "peak_tflops"}.intersection(wrong)
            if kind == "gpus" and readable and not _peaks_of(table):
                yield f"{label} needs a known device, or peak_tflops by precision"


def _needed_form(key: str, value: Any) -> str:
    """What the value of a key must be; empty if it is that."""
    if key in _TEXT_KEYS:
        return "" if isinstance(value, str) else "text"
    if key in _PRECISION_KEYS:
        valid = isinstance(value, dict) and set(value) <= set(PRECISIONS)
        valid = valid and all(map(_is_positive, value.values()))
        return "" if valid else f"a table of positive numbers by {', '.join(PRECISIONS)}"
    if key in _INTEGER_KEYS:
        return "" if _is_positive(value) and isinstance(value, int) else "a positive integer"
    return "" if _is_positive(value) else "a positive number"


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _peaks_of(table: dict[str, Any]) -> dict[str, float]:
    return _published_peaks(table.get("device")) | table.get("peak_tflops", {})
