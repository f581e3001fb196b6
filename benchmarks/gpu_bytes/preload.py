"""The library that lets autograd record CUDA tensors in a process without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import torch


def compile_preload(folder: Path) -> Path | None:
    """Compile no_device.cpp; the library is for LD_PRELOAD. None: a GPU is here, or no g++."""
    if torch.cuda.is_available() or shutil.which("g++") is None:
        return None
    source, library = Path(__file__).with_name("no_device.cpp"), folder / "no_device.so"
    of_torch = Path(torch.__file__).parent
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{of_torch}/include"]
    linked = [f"-L{of_torch}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{of_torch}/lib"]
    subprocess.run(["g++", *options, str(source), "-o", str(library), *linked], check=True)
    return library
