"""Context parallel: each rank has a shard of every sequence; attention covers the full sequence.

Queries stay on their rank. Keys and values of the other ranks are received, and the outputs for
each rank's keys are merged by their log-sum-exp (ring attention, https://arxiv.org/abs/2310.01889),
so no rank allocates the scores or the mask of a full sequence.

`context_tiles.py` plans what each rank computes, `kv_exchange.py` communicates, and
`context_attention.py` computes. `context_delta.py` is all of it for linear attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend

from titanlite.distributed.mesh import Degrees, ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.documents import DocumentIndex, SupportsDocuments
from titanlite.parallelize.compile import replace_forward
from titanlite.parallelize.context_attention import context_parallel_forward
from titanlite.parallelize.context_delta import build_sequence_parts, compute_over_ranks
from titanlite.parallelize.context_tiles import SequenceShard, encode_document_tiles


def _attend_over_ranks(
    attention: CausalAttention,
    options: tuple[str, bool, str, int, bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: DocumentIndex | None = None,
    cache: None = None,
) -> Tensor:
    """Causal attention of q [B, H, T, K] to k, v [B, Hkv, T, K] of all ranks of a group.

    `options`: the last five parameters of `context_parallel_forward`. Returns [B, H, T, K].
    """
    assert cache is None, "generation runs on one process"
    tiles = None if documents is None else documents.on_host
    sinks = None if attention.sinks is None else attention.sinks()
    return context_parallel_forward(q, k, v, sinks, tiles, *options)[0]


def build_sequence_shard(cp: DeviceMesh, section: ParallelismConfig) -> SequenceShard:
    """This rank's shard of every sequence."""
    return SequenceShard(cp.get_local_rank(), cp.size(), _is_balanced(section))


def apply_context_parallel(
    model: nn.Module, pattern: str, cp: DeviceMesh, section: ParallelismConfig
) -> None:
    """Replace the forward of every attention module whose name matches `pattern`."""
    if cp.size() == 1:
        return
    shard = build_sequence_shard(cp, section)
    if isinstance(model, SupportsDocuments) and model.index_documents is not None:
        model.use_document_mask(lambda p: DocumentIndex.build(encode_document_tiles(shard, p)))
    parts = build_sequence_parts(cp, shard)
    group_name, rotate_method = cp.get_group().group_name, section.context_parallel_rotate_method
    for name, module in model.named_modules():
        compute_over_ranks(module, parts)
        if fnmatchcase(name, pattern):
            attention = module
            assert isinstance(attention, CausalAttention), f"{name} is not a CausalAttention"
            cudnn = attention.backend == SDPBackend.CUDNN_ATTENTION
            options = group_name, shard.balanced, rotate_method, attention.window, cudnn
            replace_forward(attention, _attend_over_ranks, options)


def check_context_parallel(
    degrees: Degrees,
    section: ParallelismConfig,
    seq_len: int,
    seq_len_key: str,
    conv_width: int = 1,
) -> Iterator[ConfigError]:
    """Reject a `seq_len` (of the key `seq_len_key`) that context parallel cannot shard evenly, and
    chunks that have fewer tokens than a convolution of `conv_width` needs from the chunk before."""
    context, tensor = degrees.context, degrees.tensor
    balanced = _is_balanced(section)
    chunks = context * (2 if balanced else 1)
    divisor = math.lcm(chunks, context * tensor)
    if context == 1:
        return
    if seq_len % divisor == 0:
        if seq_len // chunks < conv_width - 1:
            yield ConfigError(
                f"parallelism.context_parallel_degree = {context}: a chunk of {seq_len_key} ="
                f" {seq_len} has {seq_len // chunks} tokens, and model.conv_width = {conv_width}"
                f" needs {conv_width - 1} of the chunk before.",
                fix=f"Set {seq_len_key} to at least {chunks * (conv_width - 1)}.",
            )
        return
    ranks = f"{context} context-parallel ranks{' with 2 chunks each' if balanced else ''}"
    if tensor > 1:
        ranks += f", and each shard over {tensor} tensor-parallel ranks"
    yield ConfigError(
        f"parallelism.context_parallel_degree = {context}: cannot shard {seq_len_key} = {seq_len}"
        f" evenly over {ranks}.",
        fix=f"Set {seq_len_key} to a multiple of {divisor}.",
    )


def _is_balanced(section: ParallelismConfig) -> bool:
    return section.context_parallel_load_balancer == "headtail"
