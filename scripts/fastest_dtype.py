"""Print the faster compute dtype of this machine: bfloat16 or float32.

A CPU without bfloat16 units emulates bfloat16 and is 3 to 4 times slower with it than with float32.
Each dtype is measured with a matmul for half a second; the figures go to stderr. With a GPU the
answer is always bfloat16.
"""

from __future__ import annotations

import argparse
import sys

import torch

from titanlite.metrics import measure_compute_dtypes


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    if torch.cuda.is_available():
        print("bfloat16")
        return 0
    speeds = measure_compute_dtypes(torch.device("cpu"), seconds=0.5)
    shown = ", ".join(f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in speeds.items())
    fastest = max(speeds, key=speeds.__getitem__)
    print(f"matmul on this CPU: {shown}; computing in {fastest}", file=sys.stderr)
    print(fastest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
