"""The [training] section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from titanlite.settings import Positive, Range


@dataclass(frozen=True)
class TrainingConfig:
    """[training] Steps, batch sizes and precision."""

    local_batch_size: Positive = 8
    # sequences of one forward pass of a rank; under pipeline parallel, of one run of the schedule
    global_batch_size: Annotated[int, Range(1, also=(-1,))] = -1
    # sequences of one optimizer step, over all ranks, accumulated over local batches if necessary;
    # -1: local_batch_size x data-parallel ranks, which depends on the layout
    batch_size_ramp: str | None = None
    # smaller batches at the start: "0:512 10B:1024" is a table of tokens consumed and sizes from
    # there on; "32 +32 over 12B" adds 32 sequences at a time over the first 12 billion tokens;
    # global_batch_size is the size after the ramp
    seq_len: Positive = 2048  # tokens of a sequence
    clipping: Literal["norm", "adaptive", "none"] = "norm"
    # gradient clipping: by the norm of the whole gradient, or of each output unit (a row of a
    # matrix, or a vector) relative to its weights
    max_norm: Annotated[float, Range(0)] = 1.0
    # with clipping = "norm": clip the gradient to this 2-norm; 0: do not clip
    adaptive_clip_factor: Annotated[float, Range(1e-6)] = 0.01
    # with clipping = "adaptive": largest norm of a unit's gradient, relative to that of its weights
    steps: Positive = 10_000  # optimizer steps, counted from the start of the run
    enable_cpu_offload: bool = False
    # store parameters, gradients and optimizer state in host memory
    dtype: Literal["bfloat16", "float32"] = "float32"
    # dtype of the parameters, the gradients and the optimizer state; norms and biases are updated
    # in float32
    mixed_precision_param: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    # compute dtype: parameters are cast to it, in every layout; float16 scales the loss; auto:
    # bfloat16, and float32 on a CPU without bfloat16 units
    gc_freq: Positive = 50  # steps between two garbage collections, at the same steps on all ranks

    @property
    def clip_norm(self) -> float:
        """The 2-norm that the whole gradient is clipped to; 0: not clipped."""
        return self.max_norm if self.clipping == "norm" else 0.0

    def sequences_per_step(self, data_ranks: int) -> int:
        """Sequences of a step, over all ranks, after the ramp."""
        if self.global_batch_size == -1:
            return self.local_batch_size * data_ranks
        return self.global_batch_size
