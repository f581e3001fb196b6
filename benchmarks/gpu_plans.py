"""The settings with which a GPU case is tried, by the planner's estimate of their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import as_arguments
from titanlite.job import read_job
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite_planner.memory.job import estimate_job_memory

FAMILY = FAMILIES["llama3"]
SHAPES = (("8B", 8192), ("1B", 2048), ("1B", 8192), ("3B", 2048), ("3B", 8192))
LOSS_CHUNK_TOKENS = 4096  # loss.chunk_tokens of the GPU cases
# Tokens of a micro-batch. With fewer, matmuls are too small; more do not raise tokens/s, because
# the optimizer takes only a fiftieth of a step already.
MIN_TOKENS, MAX_TOKENS = 8192, 32_768
USABLE_SHARE = 0.85  # of GPU memory; the rest: CUDA context, cuBLAS, NCCL, fragmentation


@dataclass(frozen=True)
class Choice:
    """A precision of the stored state, or the share of the blocks that is recomputed."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    recomputed: float = 0.0


BF16, EIGHT_BIT = {"training.dtype": "bfloat16"}, {"optimizer.state_dtype": "8bit"}
STATES = (  # in order of precision; the first that fits is used
    Choice("fp32 parameters and moments"),
    Choice("fp32 parameters, 8-bit moments", EIGHT_BIT),
    Choice("bf16 parameters and moments", BF16),
    Choice("bf16 parameters, 8-bit moments", {**BF16, **EIGHT_BIT}),
)
MODE, EVERY = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
BUDGET, COMPILED = "activation_checkpoint.memory_budget", {"compile.enable": "true"}
RECOMPUTE = (  # costs more time than lower precision, so every precision is tried before the next
    Choice("no recomputation", {MODE: "none"}),
    Choice("norms and activations recomputed", {**COMPILED, MODE: "memory_budget", BUDGET: "0.99"}),
    Choice("every 2nd block recomputed", {MODE: "selective", EVERY: "2"}, 0.5),
    Choice("all blocks recomputed", {MODE: "full"}, 1.0),
)


@dataclass(frozen=True)
class Plan:
    """Settings with which a GPU case is tried."""

    state: Choice
    recompute: Choice
    micro_batch: int  # sequences

    @property
    def settings(self) -> dict[str, Any]:
        micro_batch = {"training.local_batch_size": self.micro_batch}
        return {**self.state.settings, **self.recompute.settings, **micro_batch}


def plans(
    seq_len: int, usable: float, compiled: bool, peak_bytes: Callable[[Plan], float]
) -> Iterator[Plan]:
    """Plans whose `peak_bytes` are at most `usable`, the best first."""
    counts = range(MAX_TOKENS // seq_len, max(1, MIN_TOKENS // seq_len) - 1, -1)
    for recompute in RECOMPUTE:
        if COMPILED.items() <= recompute.settings.items() and not compiled:
            continue
        for state in STATES:
            tried = (Plan(state, recompute, count) for count in counts)
            largest = next((plan for plan in tried if peak_bytes(plan) <= usable), None)
            count = largest.micro_batch if largest else 0
            while count >= counts[-1]:
                yield Plan(state, recompute, count)
                count = count * 3 // 4  # in case the estimate was too low


def estimate_peak(flavor: str, seq_len: int, plan: Plan) -> float:
    """Peak bytes of a step of train.py on one GPU, in the eager mode."""
    settings = {
        "job.device": "cuda",
        "model.flavor": flavor,
        "data.tokenizer": "bytes",
        "data.sources": '[{ name = "text", path = "not-read" }]',
        "training.seq_len": seq_len,
        "loss.chunk_tokens": LOSS_CHUNK_TOKENS,
        **plan.settings,
    }
    job = read_job(as_arguments(settings), 1, here=False)
    return estimate_job_memory(job).total


def share_of_peak(
    speed: float, sizes: Llama3Sizes, seq_len: int, peak: float | None, *, full_attention=False
) -> float | None:
    """Share of `peak` FLOP/s that the model's FLOPs need at `speed` tokens/s.

    With a published peak this is the MFU (https://arxiv.org/abs/2204.02311, appendix B), counting
    causal or full attention. None where the peak is unknown.
    """
    flops = FAMILY.flops_per_token(sizes, seq_len, full_attention=full_attention)
    return speed * flops / peak if peak else None
