"""Seconds of the kernels of a step on one GPU: matmuls, attention, memory-bound operations.

A matmul takes the larger of the times for its FLOPs and for its bytes (roofline). Its FLOPs run at
a fraction of the peak that depends on how well its tiles fill the multiprocessors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlite_planner.hardware import GpuType
from titanlite_planner.time.efficiency import Efficiency
from titanlite_planner.workload import MatmulPrecision

KERNEL_S = 3e-6
# of each kernel beyond its roofline: the difference of small and large matmuls, measured on an
# H100 (1024 x 2048 x 2048 to 1024 x 8192 x 1024: 2 to 4 microseconds)
TILES = ((128, 256), (256, 128), (128, 128))  # of the output, in CUTLASS and cuBLAS for large sizes
ALIGNMENT = 8  # elements of 2 bytes: rows of other lengths miss the 16-byte loads of Tensor Cores
UNALIGNED_FLOPS = 110e12
# FLOP/s of a matmul with such rows; at most half of the rate of aligned ones. Calibrated on
# nanotron's runs with a vocabulary of 50,257 on an H100. It also gives GPT-2 124M on an A100 1.21
# times the speed with 50,304; about 1.25 times was observed (A. Karpathy on nanoGPT, 2023-02-03).
# Another output layer took three times as long (Netflix Technology Blog, "Scaling LLM Post-Training
# at Netflix", 2026-02-13)
UNALIGNED_HEADS = 20.0
# times longer: without Tensor Cores. 128 heads of 108 took 44 s a step longer than 64 heads of 216
# on an A100 (BLOOM's chronicle, lines 831 and 833), 20 times what their matmuls take aligned
FULL_SEQUENCE = 400
# tokens that cost as much as the diagonal, where a tile is half masked, and the start of a kernel:
# attention on an H100 reaches 82 % of its rate for 32,768 tokens at 2,048, measured
QUERY_TILE = 256
# rows of a head that a multiprocessor computes at a time. The last ones leave others idle, for
# about the mean time of one: with 8, 16, 32, 64 heads of 4,096 tokens a B200 reaches 31, 58, 73,
# 87 % of its rate, forward (github.com/MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json)
FLASH1_RATE = 1 / 1.7  # of FlashAttention-2: 1.7 to 3 times as fast (arXiv 2307.08691, 4.1)
HALF_HEAD = 32  # width at half of the rate of wide heads; measured on an H100: 64 has 80 % of 128
BACKWARD_ATTENTION = 2.5 / 0.88
# times the forward: five matmuls instead of two, and the rate measured on an H100 (cuDNN)


@dataclass(frozen=True)
class KernelTimes:
    """Speeds of one GPU."""

    gpu: GpuType
    efficiency: Efficiency

    def matmul(
        self, m: float, k: float, n: float, precision: MatmulPrecision, at_once: int = 1
    ) -> float:
        """Seconds of [m, k] @ [k, n], of which `at_once` equal ones share the multiprocessors."""
        flops = 2 * m * k * n
        fill = wave_fill(m, n, self.gpu.multiprocessors, at_once)
        element = 1 if precision in ("float8", "float4") else 4 if precision == "float32" else 2
        moved = element * (m * k + k * n) + max(2, element) * m * n
        seconds = max(flops / (self.matmul_rate(precision) * fill), self.memory_bound(moved))
        return KERNEL_S + seconds

    def unaligned(self, row: float, precision: MatmulPrecision) -> float:
        """Times longer that a matmul takes if rows of `row` elements are not aligned."""
        if self.gpu.is_cpu or precision == "float32" or row % ALIGNMENT == 0:
            return 1.0
        return max(2.0, self.matmul_rate(precision) / UNALIGNED_FLOPS)

    def matmul_rate(self, precision: MatmulPrecision) -> float:
        """FLOP/s of a large matmul."""
        fraction = {"float8": self.efficiency.float8, "float4": self.efficiency.float4}
        return self.gpu.peak_flops(precision) * fraction.get(precision, self.efficiency.matmul)

    def memory_bound(self, bytes_moved: float) -> float:
        """Seconds to read and write `bytes_moved` bytes."""
        return bytes_moved / (self.gpu.memory_gb_per_s * 1e9 * self.efficiency.memory)

    def flash_flops(
        self, sequences: float, length: float, heads: float, widths: tuple[int, int], window: int
    ) -> float:
        """FLOPs of causal attention, forward, as if heads were 128 wide and the sequence long.

        `heads` are those of this rank, `widths` the features of a head's key and value. With a
        `window`, a token attends to that many.
        """
        attended = min(window, length) * 2 if 0 < window < length else length
        flops = sequences * length * heads * sum(widths)
        if self.gpu.is_cpu:  # its rate is that of short sequences
            return flops * attended
        tiles = sequences * length * heads / QUERY_TILE
        idle = 1 + self.gpu.multiprocessors / tiles
        by_head = widths[0] / (widths[0] + HALF_HEAD) * (128 + HALF_HEAD) / 128
        return flops * (attended + FULL_SEQUENCE) / min(1.0, by_head) * idle

    def attention_rate(self, kernel: str, precision: MatmulPrecision) -> float:
        """FLOP/s of attention on long sequences with heads of 128."""
        if precision in self.gpu.attention_tflops:
            return self.gpu.attention_tflops[precision] * 1e12
        rate = self.gpu.peak_flops(precision) * self.efficiency.attention
        if kernel != "native":
            rate *= self.gpu.flash2_rate * (FLASH1_RATE if kernel == "flash1" else 1.0)
        return rate

    def stored_attention(
        self, sequences: float, length: float, heads: float, head: int
    ) -> tuple[float, float, float]:
        """Attention that stores the matrix: seconds of its forward matmuls, and of the memory-bound
        operations of forward and of backward.

        Bytes per element of the matrix: written by the first matmul, read and written by the fused
        softmax and by dropout with its mask, read by the second matmul; then their gradients.
        """
        matrix = sequences * heads * length * length
        aligned = 1.0 if head % ALIGNMENT == 0 else UNALIGNED_HEADS
        rate = self.matmul_rate("bfloat16") * head / (head + HALF_HEAD)
        forward = 4 * matrix * head / rate * aligned
        return forward, self.memory_bound(13 * matrix), self.memory_bound(17 * matrix)


def wave_fill(m: float, n: float, multiprocessors: int, at_once: int = 1) -> float:
    """Fraction of the multiprocessors' time that computes parts of the output (wave quantisation).

    The best of several tiles, as a library chooses.
    """
    best = 0.0
    for rows, columns in TILES:
        tiles = at_once * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / multiprocessors)
        fill = at_once * m * n / (rows * columns) / (waves * multiprocessors)
        best = max(best, fill * (0.97 if rows == columns else 1.0))
    return max(0.1, best) if multiprocessors > 1 else 1.0
