"""Seconds of linear and feed-forward layers on one rank, forward and backward."""

from __future__ import annotations

from titanlite_planner.time.block_case import BlockCase, Passes, Seconds

STREAMS = 4
# equal matmuls that run at the same time: Transformer Engine's streams. 256 experts' matmuls of
# 128 x 7168 x 4096 reach 21 % of a B200's peak, 64 of 512 37 %, and a large one 49 % (SimuMax,
# configs/system/b200_bf16_ceperm.json)


def linear_passes(case: BlockCase, m: float, k: float, n: float, count: float = 1.0) -> Passes:
    """A linear layer [k, n] on m tokens: forward, and the gradients of its input and weight."""
    kernels, precision = case.kernels, case.numerics.matmuls
    many = max(1, min(STREAMS, int(count)))
    forward = kernels.matmul(m, k, n, precision, many) * count
    backward = kernels.matmul(m, n, k, precision, many) * count
    backward += kernels.matmul(k, m, n, precision, many) * count
    quantized = _quantization(case, m, k, n, count)
    summed = k * n * count * _bytes_of_sum(case)
    return Passes(
        Seconds(matmul=forward, memory=quantized[0]),
        Seconds(matmul=backward, memory=quantized[1] + kernels.memory_bound(summed)),
    )


def _bytes_of_sum(case: BlockCase) -> float:
    """Bytes per weight to add its gradient to the sum: the sum is read and written.

    A kernel of its own also reads the gradient.
    """
    if not case.accumulates:
        return 0.0
    gradient = 0.0 if case.fused_sums else case.numerics.activation_bytes
    return 2 * case.numerics.gradient_bytes + gradient


def _quantization(
    case: BlockCase, m: float, k: float, n: float, count: float
) -> tuple[float, float]:
    """Seconds to quantize the operands of a linear layer, forward and backward.

    An operand is read for its largest value, unless that is fused into what wrote it, read again,
    and written in the two layouts that the matmuls need.
    """
    if case.numerics.matmuls not in ("float8", "float4"):
        return 0.0, 0.0
    each = case.numerics.quantize_bytes or (4.0 if case.compiled else 6.0)
    weights = 0.0 if case.numerics.weights_quantized_once else k * n
    forward = case.kernels.memory_bound(each * (m * k + weights) * count)
    return forward, case.kernels.memory_bound(each * m * n * count)


def feed_forward_passes(
    case: BlockCase, tokens: float, hidden: float, count: float = 1.0
) -> Passes:
    """A feed-forward layer, with its activation function."""
    model = case.model
    matmuls = linear_passes(case, tokens, model.dim, hidden * (2 if model.gated else 1), count)
    matmuls = matmuls.plus(linear_passes(case, tokens, hidden, model.dim, count))
    if model.gated:  # tensors of the hidden width read and written; eager: SiLU, then a product
        forward, backward = (3, 5) if case.compiled else (5, 8)
    else:
        forward, backward = (2, 3)
    unit = tokens * hidden * count * case.numerics.activation_bytes
    return matmuls.plus(
        Passes(
            Seconds(memory=case.kernels.memory_bound(forward * unit)),
            Seconds(memory=case.kernels.memory_bound(backward * unit)),
        )
    )
