"""Compute roofline time and memory of the GPU cases: python -m benchmarks.roofline

Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.table_rows import grid, number
from titanlite.metrics.hardware import peak_flops
from titanlite.models import FAMILIES, Llama3Sizes

FAMILY = FAMILIES["llama3"]
GPU = "NVIDIA H200"
GPU_BYTES = 150.1e9  # torch.cuda.get_device_properties().total_memory
GPU_BANDWIDTH = 4.8e12  # NVIDIA H200 data sheet
SHAPES = (("8B", 8192), ("1B", 2048), ("1B", 8192), ("3B", 2048), ("3B", 8192))
LOSS_CHUNK_TOKENS = 4096  # loss.chunk_tokens of the GPU cases
# Tokens of a micro-batch. With fewer, matmuls are too small; more do not raise tokens/s, because
# the optimizer takes only a fiftieth of a step already.
MIN_TOKENS, MAX_TOKENS = 8192, 32_768
USABLE_SHARE = 0.85  # of GPU memory; the rest: CUDA context, cuBLAS, NCCL, fragmentation


@dataclass(frozen=True)
class State:
    """Bytes stored per parameter, and the settings for them."""

    name: str
    parameters: float
    gradients: float
    moments: float
    settings: dict[str, Any] = field(default_factory=dict)


STATES = (  # in order of precision; the first that fits is used
    State("fp32 parameters and moments", 4, 4, 8),
    State("fp32 parameters, 8-bit moments", 4, 4, 2.0625, {"optimizer.state_dtype": "8bit"}),
    State("bf16 parameters and moments", 2, 2, 4, {"training.dtype": "bfloat16"}),
    State(
        "bf16 parameters, 8-bit moments",
        2,
        2,
        2.0625,
        {"training.dtype": "bfloat16", "optimizer.state_dtype": "8bit"},
    ),
)


@dataclass(frozen=True)
class Recompute:
    """The share of the blocks that is recomputed in backward."""

    name: str
    share: float
    settings: dict[str, Any]


RECOMPUTE = (  # costs more time than lower precision, so every precision is tried before the next
    Recompute("no recomputation", 0.0, {"activation_checkpoint.mode": "none"}),
    Recompute(
        "every 2nd block recomputed",
        0.5,
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
    ),
    Recompute("all blocks recomputed", 1.0, {"activation_checkpoint.mode": "full"}),
)


@dataclass(frozen=True)
class Plan:
    """Settings with which a GPU case is tried."""

    state: State
    recompute: Recompute
    micro_batch: int  # sequences

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **self.state.settings,
            **self.recompute.settings,
            "training.local_batch_size": self.micro_batch,
        }


def saved_bytes_per_token(sizes: Llama3Sizes, share: float = 0.0) -> float:
    """Bytes of bf16 activations saved for backward per token, without the loss.

    Per block: inputs and outputs of both norms, q, k, v, the attention output, and four tensors of
    SwiGLU (the outputs of w1 and w3, the gate, the input of w2). Per recomputed block: its input.
    """
    queries, keys = sizes.n_heads * sizes.head_width, sizes.n_kv_heads * sizes.head_width
    block = 4 * sizes.dim + 2 * queries + 2 * keys + 4 * sizes.hidden_dim
    return 2 * sizes.n_layers * ((1 - share) * block + share * sizes.dim)


def peak_bytes(sizes: Llama3Sizes, seq_len: int, plan: Plan) -> float:
    """Peak bytes of a step on one GPU, with a loss chunk of LOSS_CHUNK_TOKENS tokens.

    Activations are freed as gradients are allocated, so the larger of the two counts. One more
    block is alive while it is recomputed. Parameters of two blocks, the embedding and the output
    layer are gathered in bf16 at the same time.
    """
    parameters, tokens = FAMILY.count_parameters(sizes), plan.micro_batch * seq_len
    saved = tokens * saved_bytes_per_token(sizes, plan.recompute.share)
    block = tokens * saved_bytes_per_token(sizes) / sizes.n_layers
    ends = (1 if sizes.tied_embeddings else 2) * sizes.vocab_size * sizes.dim
    block_parameters = (parameters - ends) / sizes.n_layers
    gathered = 2 * (2 * block_parameters + ends)
    gathered += 6 * block_parameters  # gradients of one block, in bf16 and fp32
    logits = 12 * min(tokens, LOSS_CHUNK_TOKENS) * sizes.vocab_size  # bf16 and fp32, and gradients
    state = plan.state
    persistent = (state.parameters + state.moments) * parameters
    return persistent + max(saved, state.gradients * parameters) + block + gathered + logits


def find_largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `fits` is true, by bisection; 0 if none."""
    if not fits(1):
        return 0
    low, high = 1, 2  # low fits
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)  # does not fit, or is above the limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plans(
    sizes: Llama3Sizes, seq_len: int, capacity: float, states: Sequence[State] = STATES
) -> Iterator[Plan]:
    """Plans to try on a GPU of `capacity` bytes, the best first."""
    largest, smallest = MAX_TOKENS // seq_len, max(1, MIN_TOKENS // seq_len)
    for recompute in RECOMPUTE:
        for state in states:

            def fits(count: int, state=state, recompute=recompute) -> bool:
                plan = Plan(state, recompute, count)
                return peak_bytes(sizes, seq_len, plan) <= USABLE_SHARE * capacity

            count = find_largest(fits, largest)
            while count >= smallest:
                yield Plan(state, recompute, count)
                count = count * 3 // 4  # in case the estimate was too low


def share_of_peak(
    speed: float,
    sizes: Llama3Sizes,
    seq_len: int,
    peak: float | None,
    *,
    full_attention: bool = False,
) -> float | None:
    """Share of `peak` FLOP/s that the model's FLOPs need at `speed` tokens/s.

    With a published peak this is the MFU (https://arxiv.org/abs/2204.02311, appendix B), counting
    causal or full attention. None where the peak is unknown.
    """
    flops = FAMILY.flops_per_token(sizes, seq_len, full_attention=full_attention)
    return speed * flops / peak if peak else None


def step_flops(
    sizes: Llama3Sizes, seq_len: int, tokens: int, share: float, full_attention: bool
) -> float:
    """FLOPs of a step that recomputes the forward of `share` of the blocks."""
    head = 6 * sizes.vocab_size * sizes.dim
    per_token = FAMILY.flops_per_token(sizes, seq_len, full_attention=full_attention)
    return tokens * (per_token + share * (per_token - head) / 3)


def step_bytes(sizes: Llama3Sizes, tokens: int, state: State, share: float) -> float:
    """Bytes that a step must move between GPU memory and the chip, with ideal kernels.

    Parameters are cast to bf16 if they are stored in fp32, and read once in forward and twice in
    backward. Gradients are written and accumulated in the stored dtype. The optimizer reads and
    writes its state. Activations are written and read once; logits and their gradients, in bf16,
    are written once and read twice.
    """
    parameters = FAMILY.count_parameters(sizes)
    cast = 2 * (state.parameters + 2) if state.parameters > 2 else 0
    matmuls = 3 * 2 + 2 + (2 + state.gradients if state.gradients > 2 else 0)
    optimizer = state.gradients + 2 * state.parameters + 2 * state.moments
    logits = tokens * sizes.vocab_size * 2 * 6
    activations = 2 * tokens * saved_bytes_per_token(sizes, share)
    return parameters * (cast + matmuls + optimizer) + activations + logits


def main() -> None:
    peak = peak_flops(GPU, torch.bfloat16)
    assert peak is not None
    lines = []
    for flavor, seq_len in SHAPES:
        sizes = FAMILY.flavors[flavor]
        plan = next(plans(sizes, seq_len, GPU_BYTES))
        tokens, share = plan.micro_batch * seq_len, plan.recompute.share
        causal, full = (step_flops(sizes, seq_len, tokens, share, f) for f in (False, True))
        moved = step_bytes(sizes, tokens, plan.state, share)
        compute, memory = causal / peak, moved / GPU_BANDWIDTH
        lines.append(
            (
                f"{flavor}, {seq_len:,}",
                f"{plan.state.name}; {plan.recompute.name}",
                f"{plan.micro_batch} x {seq_len:,}",
                number(peak_bytes(sizes, seq_len, plan) / 2**30),
                f"{causal / 1e12:,.0f} / {full / 1e12:,.0f}",
                number(moved / 1e9),
                f"{compute * 1e3:,.0f} + {memory * 1e3:,.0f}",
                number(tokens / max(compute, memory)),
                number(tokens / (compute + memory)),
            )
        )
    header = (
        "case",
        "state and recomputation",
        "tokens/step",
        "peak GiB",
        "TFLOP causal / full",
        "GB moved",
        "ms compute + memory",
        "tokens/s if they overlap",
        "tokens/s if they do not",
    )
    print(grid(header, lines, "lllrrrrrr"), end="")


if __name__ == "__main__":
    main()
