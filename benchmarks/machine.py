"""The machine and the package versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.processes import CORES


def describe(program: str, arguments: Sequence[str]) -> dict[str, str]:
    """The list above every table, as names and values; `program` is what follows "python"."""
    entries = {
        "command": f"python {program} {shlex.join(arguments)}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{CORES} cores, {_processor()}",
        "python": platform.python_version(),
    }
    for package in ("torch", "torchao", "transformers", "accelerate"):
        entries[package] = _version(package)
    if torch.cuda.is_available():
        entries["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        entries["cuda"], entries["driver"] = str(torch.version.cuda), _driver()
        entries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return entries


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return output[0] if output else "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
