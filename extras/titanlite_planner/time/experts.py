"""Seconds of the experts of a block on one rank: their layers, and the transfers of tokens."""

from __future__ import annotations

from titanlite_planner.time.block_case import BlockCase, Passes, Seconds
from titanlite_planner.time.layers import feed_forward_passes, linear_passes

PERMUTED = 0.75
# of the memory's bandwidth that other operations reach: 50 % and 67 % of the peak of a B200
# (github.com/MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json)
EXCHANGE_SHARE = 32 / 148
# of the multiprocessors, taken by an exchange: HybridEP's 32 (moe_hybridep_num_sms)
MATMULS = {"bfloat16": 6, "float32": 6, "float8": 14, "float4": 22}
# kernels of an expert's two linear layers, forward and backward: six matmuls; in Float8 also the
# largest value and the cast of each of four operands; with a scale for each 16 or 32 elements, a
# cast of each, and the scales of both operands of each matmul in the order that it needs


def expert_passes(case: BlockCase) -> Passes:
    """The router, the experts' layers, and the transfers to and from experts of other ranks."""
    model, (tensor, _, expert, _) = case.model, case.layout
    experts, exchange = model.experts, case.exchange
    assert experts is not None
    local = max(1.0, experts.count / expert)
    # tensor ranks that do not shard the experts route their own part of the tokens
    on_rank = case.tokens * case.expert_tensor / tensor
    routed = on_rank * experts.active
    passes = feed_forward_passes(
        case, routed / local, experts.hidden_dim / case.expert_tensor, count=local
    )
    if experts.shared_hidden_dim:
        shared = feed_forward_passes(case, case.tokens, experts.shared_hidden_dim / tensor)
        passes = passes.plus(shared)
    width = model.dim * case.numerics.activation_bytes
    # a copy in the experts' order is read and written, before them and after them; where tokens are
    # sent once to each expert, also one in the order of ranks
    copies = 2 if exchange.once_per_rank or expert == 1 else 4
    permuted = case.kernels.memory_bound(2 * copies * routed * width / PERMUTED)
    passes = passes.plus(linear_passes(case, case.tokens, model.dim, experts.count))
    return _with_transfers(case, passes.plus(Passes(*[Seconds(memory=permuted)] * 2)), width)


def _with_transfers(case: BlockCase, passes: Passes, width: float) -> Passes:
    """The layers, with what they do not hide of dispatching tokens and combining results."""
    tensor, context, expert, sequence_parallel = case.layout
    experts, exchange = case.model.experts, case.exchange
    assert experts is not None
    is_sharded = case.expert_tensor > 1 or tensor == 1
    stride = tensor * context if is_sharded else 1
    sent = case.tokens / (tensor if sequence_parallel or not is_sharded else 1)
    transfer = 2 * case.collectives.dispatch(
        sent * width, experts.active, expert, stride, exchange.once_per_rank
    )
    if not exchange.overlapped:
        return passes.plus(Passes(*[Seconds(expert=transfer)] * 2))
    # while it runs, the rest of the multiprocessors computes
    exposed = [
        max(transfer * EXCHANGE_SHARE, transfer - each.compute * (1 - EXCHANGE_SHARE))
        for each in passes
    ]
    return passes.plus(Passes(*(Seconds(expert=seconds) for seconds in exposed)))


def expert_kernels(case: BlockCase) -> float:
    """Kernels that the host launches for the experts of this rank, forward and backward."""
    assert case.model.experts is not None
    kernels = MATMULS[case.numerics.matmuls]
    if case.numerics.matmuls == "float8" and case.numerics.block_scales:
        kernels = MATMULS["float4"]
    return kernels * max(1.0, case.model.experts.count / case.layout[2])
