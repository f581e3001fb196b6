"""What the backward of a block allocates beside what its forward saved.

The operations are those of an eager block in PyTorch with FlashAttention and fused norms; a dry
run shows them in the same order. Fused kernels (compiled blocks, Megatron's) have no fp32 copies.
"""

from __future__ import annotations

from titanlite.planning.activation_memory import BlockActivations
from titanlite.planning.tape import AllocationTape


def block_backward(
    activations: BlockActivations, block: int, feed_forward_weights: float, other_weights: float
) -> tuple[float, float]:
    """Bytes of (activations, weight gradients) at the peak of the backward of block `block`.

    Beside what forward saved and the gradient of the block's output. The weights are bytes of a
    rank's gathered weights in the compute dtype, as their gradients.
    """
    backward = _BlockTape(activations)
    backward.gather_gradient()
    if activations.recomputes(block):
        backward.recompute(block)
    backward.feed_forward(feed_forward_weights)
    backward.gather_gradient()
    backward.attention(other_weights)
    return backward.tape.peak


def block_forward(activations: BlockActivations) -> float:
    """Bytes of activations at the peak of a forward that saves all that backward needs."""
    block = _BlockTape(activations)
    if not block.eager:
        return activations.all_saved
    block.forward_attention(stored=False)
    block.forward_feed_forward(stored=False)
    return block.tape.peak[0]


class _BlockTape:
    """The tape of a block; residual R, hidden H, query Q, key K, feed-forward F."""

    def __init__(self, activations: BlockActivations):
        a = self.a = activations
        self.tape = AllocationTape()
        self.eager, self.split = not a.workload.compiled, a.workload.layout.tensor > 1
        # bytes of an fp32 tensor by those of the compute dtype, and of a cast to fp32
        self.wide, self.cast = 4 / a.size, 4 / a.size if a.size < 4 else 0.0

    def gather_gradient(self) -> None:
        """All-gather the gradient of a row-parallel matmul's output."""
        if self.split:
            self._all_gather()

    def _all_gather(self) -> None:
        self.tape.add(self.a.hidden)
        if self.a.workload.layout.micro_batch > 1:  # the gathered dimension is not the first one
            self.tape.use(self.a.hidden)

    def _reduce_scatter(self) -> None:
        """A partial sum H becomes its shard R."""
        if self.split:
            self.tape.add(self.a.hidden, self.a.residual)
            self.tape.free(self.a.hidden, self.a.hidden)

    def recompute(self, block: int) -> None:
        """Run forward again, and keep what it saves."""
        a, tape = self.a, self.tape
        start, missing = tape.activations, max(0.0, a.all_saved - a.saved(block))
        if self.eager and a.workload.recompute != "memory_budget":
            stored = a.workload.recompute == "per_operation"
            self.forward_attention(stored)
            self.forward_feed_forward(stored)
        tape.free(tape.activations - start)
        tape.add(missing)

    def _forward_norm(self) -> None:
        a, tape = self.a, self.tape
        if a.on_cpu:
            wide = self.wide * a.residual
            tape.add(wide if self.cast else 0.0)
            tape.use(wide)
            tape.add(wide, wide)
            tape.add(a.residual if self.cast else 0.0)
            tape.free(wide if self.cast else 0.0)
        else:
            tape.add(a.residual)
        if self.split:
            self._all_gather()

    def forward_attention(self, stored: bool) -> None:
        """`stored`: every second matmul and attention's output were saved."""
        a, tape = self.a, self.tape
        self._forward_norm()
        tape.add(0.0 if stored else a.query + a.key, a.key)
        for size in (a.query, a.key):
            self._rotate(size)
        tape.free(a.query, a.key)
        if not stored:
            if a.workload.layout.context > 1:
                tape.use(a.ring_forward)
            tape.add(a.attention_core)
        tape.add(a.hidden)
        self._reduce_scatter()
        tape.add(a.residual)
        tape.free(a.residual)
        if self.split:
            tape.free(a.residual)

    def _rotate(self, size: float) -> None:
        """Rotary embedding of queries or keys, in fp32."""
        wide, cast = self.wide * size, self.cast * size
        self.tape.add(cast, wide)
        self.tape.use(wide / 2)
        self.tape.use(wide, wide, wide)
        self.tape.free(cast, wide)
        self.tape.add(size)

    def forward_feed_forward(self, stored: bool) -> None:
        a, tape = self.a, self.tape
        self._forward_norm()
        tape.add(0.0 if stored else a.feed_forward, *[a.feed_forward] * (a.wide_tensors - 1))
        tape.add(0.0 if stored else a.hidden)
        if self.split:
            tape.use(a.hidden, a.residual)
        tape.use(a.residual)

    def feed_forward(self, weights: float) -> None:
        """Backward of the feed-forward layer and its norm."""
        a, tape, wide = self.a, self.tape, self.a.feed_forward
        matmuls = 3 if a.workload.model.gated else 2
        tape.add_gradient(weights / matmuls)
        tape.add(wide)
        tape.free(wide, a.hidden if self.split else 0.0)
        if matmuls == 3:
            tape.add(wide, wide)  # gradients of the two factors
            tape.free(*[wide] * (3 if self.eager else 2))
            tape.add_gradient(weights / matmuls)
            tape.add(a.hidden)
            tape.free(wide)
        if self.eager or matmuls == 2:
            tape.add(wide)
            tape.free(wide)
        tape.free(wide)
        tape.add_gradient(weights / matmuls)
        tape.add(a.hidden)
        tape.free(wide, a.normed)
        if matmuls == 3:
            tape.use(a.hidden)
            tape.free(a.hidden)
        self._input_gradient()

    def _input_gradient(self) -> None:
        """Backward of a norm, and the sum with the gradient of the residual stream."""
        self._reduce_scatter()
        a, tape = self.a, self.tape
        if a.on_cpu:
            self._cpu_norm(self.wide * a.residual)
        else:
            tape.add(a.residual)
            tape.free(a.residual, a.residual)
        tape.add(a.residual)
        tape.free(a.residual, a.residual)

    def _cpu_norm(self, wide: float) -> None:
        """Backward of a CPU's norm, which is not one kernel; its tensors are in fp32."""
        tape = self.tape
        tape.add(wide if self.cast else 0.0)
        tape.free(self.a.residual)
        tape.add(wide, wide)
        tape.free(wide, wide, wide if self.cast else 0.0)
        tape.use(wide, wide)
        tape.use(wide, wide, wide, wide)
        tape.add(wide)
        tape.free(wide, wide)
        if self.cast:
            tape.add(self.a.residual)
            tape.free(wide)

    def attention(self, weights: float) -> None:
        """Backward of attention and its norm."""
        a, tape = self.a, self.tape
        query, key = a.query, a.key
        share = weights / (2 * query + 2 * key)
        tape.add_gradient(share * query)
        tape.add(query)
        tape.free(a.hidden if self.split else 0.0)
        if a.workload.layout.context > 1:
            tape.use(a.ring_backward)
        if not a.workload.fused_attention:
            tape.use(a.score_gradients)
        tape.add(query, 2 * key)
        tape.free(query, a.attention_core, query, 2 * key)
        for size in (key, query):
            self._unrotate(size)
        for size in (key, key, query):
            tape.add_gradient(share * size)
            tape.add(a.hidden)
            tape.free(size)
        tape.free(a.hidden, a.normed)
        tape.use(a.hidden)
        tape.free(a.hidden)
        self._input_gradient()

    def _unrotate(self, size: float) -> None:
        """Backward of the rotary embedding."""
        if not self.eager:
            return
        wide = self.wide * size
        if self.cast:
            self.tape.add(wide)
            self.tape.free(size)
            self.tape.use(wide, wide, size)
            self.tape.free(wide)
            self.tape.add(size)
        else:
            self.tape.use(2.5 * size)
