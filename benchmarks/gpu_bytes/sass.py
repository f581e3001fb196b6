"""Machine instructions of a compiled Triton kernel, from NVIDIA's disassembler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path


@cache  # a kernel runs many times, with few numbers of trips
def executed_instructions(cubin: bytes, loop_trips: float) -> float:
    """Instructions that one warp executes if each loop is passed `loop_trips` times.

    Both sides of a branch count, so it is a little too large.
    """
    import triton  # brings the disassembler; CPU builds of torch do not have it

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [disassembler, "-c", file.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # warnings about the format
            text=True,
            check=True,
        )
    return count_instructions(done.stdout, loop_trips)


def count_instructions(listing: str, loop_trips: float) -> float:
    """As `executed_instructions`, from the disassembler's listing."""
    position, ends, labels = 0, 0, {}
    loops: list[int] = []  # instructions of each loop
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = position
        instruction = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*);", line)
        if instruction is None:
            continue
        position += 1
        jump = re.search(r"\bBRA.*`\((\.L_x_\d+)\)", instruction[1])
        if jump and (start := labels.get(jump[1])) is not None and start < position - 1:
            loops.append(position - start)
        if "EXIT" in instruction[1]:
            ends = position  # after the last exit: padding and subroutines
    return ends + sum(length * (loop_trips - 1) for length in loops)
