"""What no program could be faster than, and how much fits: python -m benchmarks.roofline

Arithmetic only; nothing here is measured.
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
GPU_BYTES = 150.1e9  # what torch calls its total memory
GPU_BYTES_A_SECOND = 4.8e12  # NVIDIA H200 data sheet
SHAPES = (("8B", 8192), ("1B", 2048), ("1B", 8192), ("3B", 2048), ("3B", 8192))
LOGITS_AT_ONCE = 4096  # tokens whose logits exist together: loss.chunk_tokens of the GPU cases
LEAST_TOKENS, MOST_TOKENS = 8192, 32_768
# of a micro-batch: with fewer, products are too small; with more, a step only takes longer, since
# the optimizer is a fiftieth of it already
ROOM = 0.85  # of the memory; the rest is for the context, cuBLAS, NCCL and what fragments


@dataclass(frozen=True)
class State:
    """What is kept for each parameter, in bytes, and the keys that ask for it."""

    words: str
    weights: float
    gradients: float
    moments: float
    settings: dict[str, Any] = field(default_factory=dict)


STATES = (  # the most precise one that fits is used, and named
    State("fp32 weights and moments", 4, 4, 8),
    State("fp32 weights, 8-bit moments", 4, 4, 2.0625, {"optimizer.state_dtype": "8bit"}),
    State("bf16 weights and moments", 2, 2, 4, {"training.dtype": "bfloat16"}),
    State(
        "bf16 weights, 8-bit moments",
        2,
        2,
        2.0625,
        {"training.dtype": "bfloat16", "optimizer.state_dtype": "8bit"},
    ),
)


@dataclass(frozen=True)
class Recompute:
    """Which share of the blocks is computed again in backward."""

    words: str
    share: float
    settings: dict[str, Any]


RECOMPUTE = (  # computing again costs more than fewer bits do, so it comes after them
    Recompute("nothing", 0.0, {"activation_checkpoint.mode": "none"}),
    Recompute(
        "every 2nd block",
        0.5,
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "2",
        },
    ),
    Recompute("all blocks", 1.0, {"activation_checkpoint.mode": "full"}),
)


@dataclass(frozen=True)
class Plan:
    """How a case is run: what is kept, what is computed again, sequences at once."""

    state: State
    recompute: Recompute
    micro_batch: int

    @property
    def settings(self) -> dict[str, Any]:
        return {
            **self.state.settings,
            **self.recompute.settings,
            "training.local_batch_size": self.micro_batch,
        }


def kept_bytes_a_token(sizes: Llama3Sizes, share: float = 0.0) -> float:
    """Activations in bf16 that a token leaves for backward, without the loss.

    Of a block: what went into both norms and came out, q, k, v, attention's result, and the four
    of SwiGLU (both products, the gate, and what w2 takes). Of one computed again: its input.
    """
    queries, keys = sizes.n_heads * sizes.head_width, sizes.n_kv_heads * sizes.head_width
    block = 4 * sizes.dim + 2 * queries + 2 * keys + 4 * sizes.hidden_dim
    return 2 * sizes.n_layers * ((1 - share) * block + share * sizes.dim)


def held_bytes(sizes: Llama3Sizes, seq_len: int, plan: Plan) -> float:
    """The most that a step holds on one GPU, with the logits of LOGITS_AT_ONCE tokens at a time.

    Activations go as gradients come, so the larger of the two counts. One block more is there
    when it is computed again; weights are gathered in bf16, two blocks and both ends at a time.
    """
    parameters, tokens = FAMILY.count_parameters(sizes), plan.micro_batch * seq_len
    kept = tokens * kept_bytes_a_token(sizes, plan.recompute.share)
    block = tokens * kept_bytes_a_token(sizes) / sizes.n_layers
    ends = (1 if sizes.tied_embeddings else 2) * sizes.vocab_size * sizes.dim
    a_block = (parameters - ends) / sizes.n_layers
    gathered = 2 * (2 * a_block + ends) + 6 * a_block  # and one block's gradients, bf16 and fp32
    logits = 12 * min(tokens, LOGITS_AT_ONCE) * sizes.vocab_size  # bf16 and fp32, and gradients
    state, stays = plan.state, plan.state.weights + plan.state.moments
    return stays * parameters + max(kept, state.gradients * parameters) + block + gathered + logits


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where all below one that fits do; 0 if none."""
    if not fits(1):
        return 0
    low, high = 1, 2  # low fits
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)  # does not fit, or may not be
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def plans(
    sizes: Llama3Sizes, seq_len: int, capacity: float, states: Sequence[State] = STATES
) -> Iterator[Plan]:
    """What is worth trying on a GPU of `capacity` bytes, best first."""
    most, least = MOST_TOKENS // seq_len, max(1, LEAST_TOKENS // seq_len)
    for recompute in RECOMPUTE:
        for state in states:

            def fits(count: int, state=state, recompute=recompute) -> bool:
                held = held_bytes(sizes, seq_len, Plan(state, recompute, count))
                return held <= ROOM * capacity

            count = largest(fits, most)
            while count >= least:
                yield Plan(state, recompute, count)
                count = count * 3 // 4  # if the arithmetic was too hopeful


def share_of_peak(
    speed: float,
    sizes: Llama3Sizes,
    seq_len: int,
    peak: float | None,
    *,
    full_attention: bool = False,
) -> float | None:
    """Of `peak` FLOP/s, what the model's own FLOPs make use of at `speed` tokens a second.

    Against a published peak this is MFU (https://arxiv.org/abs/2204.02311, appendix B): causal, or
    with attention counted in full. None where the peak is not known.
    """
    flops = FAMILY.flops_per_token(sizes, seq_len, full_attention=full_attention)
    return speed * flops / peak if peak else None


def step_flops(
    sizes: Llama3Sizes, seq_len: int, tokens: int, share: float, full_attention: bool
) -> float:
    """FLOPs of a step that computes `share` of the blocks' forward again."""
    head = 6 * sizes.vocab_size * sizes.dim
    once = FAMILY.flops_per_token(sizes, seq_len, full_attention=full_attention)
    return tokens * (once + share * (once - head) / 3)


def step_bytes(sizes: Llama3Sizes, tokens: int, state: State, share: float) -> float:
    """Bytes that a step must move between memory and chip, however its kernels are written.

    Weights, cast where they are kept in fp32, are read in forward and twice in backward, their
    gradients written and summed into the kept type; the optimizer reads and writes all it has;
    activations are written once and read once; of a logit, bf16, its value and its gradient are
    written once and read twice.
    """
    parameters = FAMILY.count_parameters(sizes)
    cast = 2 * (state.weights + 2) if state.weights > 2 else 0
    products = 3 * 2 + 2 + (2 + state.gradients if state.gradients > 2 else 0)
    optimizer = state.gradients + 2 * state.weights + 2 * state.moments
    logits = tokens * sizes.vocab_size * 2 * 6
    activations = 2 * tokens * kept_bytes_a_token(sizes, share)
    return parameters * (cast + products + optimizer) + activations + logits


def main() -> None:
    peak = peak_flops(GPU, torch.bfloat16)
    lines = []
    for flavor, seq_len in SHAPES:
        sizes = FAMILY.flavors[flavor]
        plan = next(plans(sizes, seq_len, GPU_BYTES))
        tokens, share = plan.micro_batch * seq_len, plan.recompute.share
        causal, full = (step_flops(sizes, seq_len, tokens, share, f) for f in (False, True))
        moved = step_bytes(sizes, tokens, plan.state, share)
        computing, moving = causal / peak, moved / GPU_BYTES_A_SECOND
        lines.append(
            (
                f"{flavor}, {seq_len:,}",
                f"{plan.state.words}; {plan.recompute.words} again",
                f"{plan.micro_batch} x {seq_len:,}",
                number(held_bytes(sizes, seq_len, plan) / 2**30),
                f"{causal / 1e12:,.0f} / {full / 1e12:,.0f}",
                number(moved / 1e9),
                f"{computing * 1e3:,.0f} + {moving * 1e3:,.0f}",
                number(tokens / max(computing, moving)),
                number(tokens / (computing + moving)),
            )
        )
    heads = (
        "case",
        "kept",
        "tokens a step",
        "GiB held",
        "TFLOP causal / full",
        "GB moved",
        "ms computing + moving",
        "tokens/s if both at once",
        "one after the other",
    )
    print(grid(heads, lines, "lllrrrrrr"), end="")


if __name__ == "__main__":
    main()
