"""What the backward of a block allocates beside what its forward saved.

The operations are those of an eager block in PyTorch with FlashAttention and fused norms; a dry
run shows them in the same order. Fused kernels (compiled blocks, Megatron's) have no fp32 copies.
"""

from __future__ import annotations

from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.memory.expert_activations import GATED, ExpertActivations
from titanlite_planner.memory.tape import AllocationTape


def block_backward(
    activations: BlockActivations,
    block: int,
    feed_forward_weights: float,
    other_weights: float,
    summed: bool = False,
) -> tuple[float, float]:
    """Bytes of (activations, weight gradients) at the peak of the backward of block `block`.

    Beside what forward saved and the gradient of the block's output. The weights are bytes of a
    rank's gathered weights in the compute dtype, as their gradients. With `summed`, each gradient
    is added to that of earlier micro-batches, and freed.
    """
    backward = _BlockTape(activations, summed)
    experts = activations.experts
    if experts is None or experts.gathers:
        backward.gather_gradient()
    if activations.recomputes(block):
        backward.recompute(block)
    if experts:
        backward.mixture(experts, feed_forward_weights)
    else:
        backward.feed_forward(feed_forward_weights)
    backward.gather_gradient()
    backward.attention(other_weights)
    return backward.tape.peak


def block_forward(activations: BlockActivations) -> float:
    """Bytes of activations at the peak of a forward that saves all that backward needs."""
    block = _BlockTape(activations, summed=False)
    if not block.eager:
        return activations.all_saved
    block.forward_attention(stored=False)
    block.forward_second_half(stored=False)
    return block.tape.peak[0]


class _BlockTape:
    """The tape of a block; residual R, hidden H, query Q, key K, feed-forward F."""

    def __init__(self, activations: BlockActivations, summed: bool):
        a = self.a = activations
        self.tape, self.summed = AllocationTape(), summed
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
            self.forward_second_half(stored)
        tape.free(tape.activations - start)
        tape.add(missing)

    def _forward_norm(self, gathers: bool = True) -> None:
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
        if self.split and gathers:
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

    def forward_second_half(self, stored: bool) -> None:
        """The feed-forward layer or the experts, and the norm before them."""
        if self.a.experts:
            self._forward_mixture(self.a.experts, stored)
            return
        a, tape = self.a, self.tape
        self._forward_norm()
        tape.add(0.0 if stored else a.feed_forward, *[a.feed_forward] * (a.wide_tensors - 1))
        tape.add(0.0 if stored else a.hidden)
        if self.split:
            tape.use(a.hidden, a.residual)
        tape.use(a.residual)

    def _forward_mixture(self, e: ExpertActivations, stored: bool) -> None:
        """Forward of the experts; the rows stay in the frame of the module's forward."""
        a, tape = self.a, self.tape
        self._forward_norm(gathers=e.gathers)
        tape.add(e.hidden_fp32)  # the router's input
        tape.use(e.scores, e.scores)
        tape.add(e.router, e.rows)
        received = e.rows if e.exchanged else 0.0
        tape.add(received, received)  # as they arrive, and in the order of the experts
        if e.shared:
            tape.add(0.0 if e.gathers else a.hidden)
            tape.add(*[e.shared] * (GATED - stored), 0.0 if stored else e.hidden)
        kept = stored and not e.exchanged
        tape.add(*[e.inner] * (e.saved_inner - kept), 0.0 if kept and not e.shared else e.rows)
        tape.use(received, received)  # the results in the order of the ranks, and as they arrive
        tape.use(e.hidden_fp32, e.hidden_fp32, e.hidden)  # the sum over a token's rows
        tape.use(e.hidden, e.hidden)

    def mixture(self, e: ExpertActivations, weights: float) -> None:
        """Backward of the experts, the router and the norm before them."""
        tape, each = self.tape, weights / 3
        received = e.rows if e.exchanged else 0.0
        tape.add(e.hidden_fp32, e.rows_fp32)  # gradients of the sum over a token's rows, in fp32
        tape.add(e.rows)
        tape.free(e.rows_fp32)
        tape.use(e.hidden_fp32, e.hidden_fp32, e.hidden)  # gradients of its weights
        tape.free(e.hidden_fp32, e.rows)
        tape.use(received, received)
        self._linear(each, e.inner)
        tape.free(e.rows, e.inner)
        if e.saved_inner > GATED:  # gpt-oss: nothing of gate and up is freed before the matmuls
            tape.add(*[e.inner] * 4)  # gradients of both factors, and of those of the first
            tape.free(*[e.inner] * (e.saved_inner - GATED), e.inner)
        tape.add(e.inner, e.inner)  # gradients of the two factors
        tape.free(e.inner, e.inner, e.inner)
        self._linear(each, e.rows)
        tape.free(e.inner)
        tape.add(e.inner)  # of the activation function
        tape.free(e.inner, e.inner)
        self._linear(each, e.rows)
        tape.free(e.inner, e.rows)
        tape.use(e.rows)  # the sum of the gradients of both matmuls
        tape.free(e.rows)
        tape.use(received, received)
        if e.shared:
            tape.add(e.shared, e.shared, e.shared)
            tape.free(e.shared, e.shared, e.shared)
            tape.add(e.shared, e.shared_input)
            tape.free(*[e.shared] * GATED, e.shared_input)
        tape.add(e.hidden_fp32, e.hidden)  # the sum of the gradients of a token's rows
        tape.free(e.rows, e.hidden_fp32)
        tape.use(e.scores, e.scores)
        tape.add(e.hidden_fp32, e.hidden)  # the router's
        tape.free(e.hidden_fp32, e.hidden_fp32, e.router, e.hidden, e.shared_input)
        self._input_gradient(reduces=e.gathers)

    def _linear(self, weights: float, inputs: float) -> None:
        """Backward of a linear layer: the gradients of its weights and of its input."""
        self.tape.add_gradient(weights)
        self.tape.add(inputs)
        if self.summed:
            self.tape.free_gradient(weights)

    def feed_forward(self, weights: float) -> None:
        """Backward of the feed-forward layer and its norm."""
        a, tape, wide = self.a, self.tape, self.a.feed_forward
        matmuls = 3 if a.workload.model.gated else 2
        self._linear(weights / matmuls, wide)
        tape.free(wide, a.hidden if self.split else 0.0)
        if matmuls == 3:
            tape.add(wide, wide)  # gradients of the two factors
            tape.free(*[wide] * (3 if self.eager else 2))
            self._linear(weights / matmuls, a.hidden)
            tape.free(wide)
        if self.eager or matmuls == 2:
            tape.add(wide)
            tape.free(wide)
        tape.free(wide)
        self._linear(weights / matmuls, a.hidden)
        tape.free(wide, a.normed)
        if matmuls == 3:
            tape.use(a.hidden)
            tape.free(a.hidden)
        self._input_gradient()

    def _input_gradient(self, reduces: bool = True) -> None:
        """Backward of a norm, and the sum with the gradient of the residual stream."""
        if reduces:
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
        self._linear(share * query, query)
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
            self._linear(share * size, a.hidden)
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
