"""What one training step does on a GPU that this machine does not have, and how long it may take.

    python -m benchmarks.gpu_bytes --job.config_file llama3_8b

The step of rank 0 is traced at its real size with tensors that have no values. What torch.compile
compiles is compiled for the target GPU, so kernels, bytes and machine instructions are counted in
the code that would run. Times follow from the counts and from rates that were measured on such
GPUs (titanlite_planner/time): they are predictions. A part takes as long as its bytes or its
instructions need, whichever is longer, and its matmuls and attention. "minimum": the GB that it
must at least read and write beside these; see MinimumBytes.

It needs g++, and for what is compiled Triton (pip install triton; the CPU builds of torch do not
bring it), but no GPU.
Options before those of train.py: --gpu H100 (or A100, B200), --ranks N, --json FILE for the counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PRELOADED = "TITANLITE_GPU_BYTES"  # a folder; set in the process that has the library


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_bytes", usage=__doc__)
    parser.add_argument("--gpu", default="H100", choices=("A100", "H100", "B200"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", help="a file for the counts")
    options, settings = parser.parse_known_args(argv)
    if PRELOADED not in os.environ:
        with tempfile.TemporaryDirectory(prefix="gpu_bytes") as folder:
            return run_preloaded(argv, Path(folder))
    from benchmarks.gpu_bytes.report import print_step
    from titanlite.errors import UserError, format_error

    try:
        folder = Path(os.environ[PRELOADED])
        return print_step(options.gpu, options.ranks, options.json, settings, folder)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        print("titanlite: the job compiles, which needs Triton: see CONTRIBUTING.", file=sys.stderr)
    return 2


def run_preloaded(argv: list[str], folder: Path) -> int:
    """Run this program again with the library that replaces the device; returns its exit code."""
    from benchmarks.gpu_bytes.preload import compile_preload

    library = compile_preload(folder)
    if library is None:
        print("benchmarks.gpu_bytes needs g++, and a machine without a GPU.", file=sys.stderr)
        return 2
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        PRELOADED: str(folder),
    }
    command = [sys.executable, "-m", "benchmarks.gpu_bytes", *argv]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
