"""One rank of a cluster that does not exist: a fake process group, and fake tensors.

A fake tensor has a shape, a dtype and strides, but no memory (torch's FakeTensorMode). Collectives
of the fake process group return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor import _utils as shard_arithmetic  # private
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from titanlite.distributed import rank_tree
from titanlite.kernels import documents
from titanlite.models import TokenEmbedding, loss

aten = torch.ops.aten
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)


@contextmanager
def fake_rank(rank: int, ranks: int) -> Iterator[None]:
    """A process group in which this process is `rank`, and no other rank exists."""
    # in torch's folder of tests, but part of every installation (torch 2.11 to 2.15)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    new_group = dist.new_group
    replaced: list[tuple[Any, str, Any]] = [
        (dist, "new_group", lambda *args, **o: new_group(*args, **{**o, "backend": "fake"})),
        (rank_tree, "children_of", lambda rank, size: []),  # no other rank answers
    ]
    try:
        with replaced_attributes(replaced):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def replaced_attributes(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set each (object, attribute, value) for the block."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)


Observer = Callable[[Any, tuple, dict, Any], None]  # (operation, args, kwargs, result)


class FakeCompute(TorchDispatchMode):
    """Runs every operation outside the meta device on fake tensors, and shows it to `observe`."""

    def __init__(self, fake_mode: FakeTensorMode, observe: Observer, like_cuda: bool):
        super().__init__()
        self._fake_mode, self._observe, self._like_cuda = fake_mode, observe, like_cuda

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not all(kind in _PLAIN_TENSORS for kind in types):
            return NotImplemented  # DTensor and others call this again for their local tensors
        kwargs = kwargs or {}
        active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if active is not self._fake_mode:
            return operation(*args, **kwargs)  # DTensor's computation of shapes
        if self._is_real(args, kwargs):
            with unset_fake_temporarily():
                return operation(*args, **kwargs)
        if operation in (aten._local_scalar_dense.default, aten.item.default):
            with unset_fake_temporarily():
                return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if operation.namespace == "titanlite":  # a custom op: observe what it does inside, too
            with self:
                result = OPDEFS[operation.name()]._init_fn(*args, **kwargs)
        elif operation is torch.ops._c10d_functional.wait_tensor.default:
            result = args[0]  # as the real operator; its fake implementation allocates a copy
        elif operation is aten.addmm.dtype_out:  # torch 2.11 cannot fake it, nor count its FLOPs
            operation, args, result = aten.mm.default, args[1:3], kwargs["out"]
            kwargs = {}
        elif operation is aten.add.Tensor and _adds_weight_gradients(*args):
            result = args[0].add_(args[1])  # as autograd does, but not with tensor subclasses
        elif operation is aten.add_.Tensor and self._casts(*args):
            with self:
                result = args[0].add_(args[1].to(args[0].dtype))
        else:
            result = operation(*args, **kwargs)
        self._observe(operation, args, kwargs, result)
        return result

    def _casts(self, tensor: Tensor, other: Any) -> bool:
        """Whether `other` is cast to the dtype of `tensor` first; CUDA's kernel casts elements."""
        return not self._like_cuda and isinstance(other, Tensor) and other.dtype != tensor.dtype

    @staticmethod
    def _is_real(args: tuple, kwargs: dict) -> bool:
        """Whether an operation is on the meta device, or on tensors with values, as of a mesh."""
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "meta"
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        return bool(tensors) and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _adds_weight_gradients(first: Any, second: Any) -> bool:
    """Whether autograd itself adds the gradients of a weight that is used twice, and no DTensor.

    Only of matrices: whether autograd adds gradients of activations in place depends on what else
    refers to them, which is not known here. Autograd itself has no frame in Python: the caller is
    what started backward.
    """
    if not isinstance(second, Tensor) or first.dim() != 2 or first.shape != second.shape:
        return False
    callers = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(None))
    own = (__name__, "torch._compile", "torch._dynamo.eval_frame")
    return next((name for name in callers if name not in own), "") == "torch.autograd.graph"


@contextmanager
def fake_compute(observe: Observer, like_cuda: bool) -> Iterator[None]:
    """Tensors that are made in the block are fake, on the CPU.

    `like_cuda`: norms save what CUDA's kernel saves for backward, where a CPU's saves more in
    bfloat16, the embedding is torch's, and attention with sinks or documents saves keys and values
    once, not for each query head.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    as_cuda = [
        (F, "rms_norm", _rms_norm),
        (torch, "rms_norm", _rms_norm),
        (TokenEmbedding, "forward", torch.nn.Embedding.forward),
        (loss, "_add_weight_grad", _weight_grad_as_cuda),
        (documents, "repeat_kv_heads", lambda kv, q: kv),
    ]
    shards = "_compute_local_shape_and_global_offset"
    always = [
        # DTensor computes shapes under a fake mode of its own; it must not find ours instead
        (_sharding_prop, "detect_fake_mode", lambda *_: None),
        # it reads the offsets of strided shards from tensors, which must have values
        (shard_arithmetic, shards, _with_values(getattr(shard_arithmetic, shards))),
    ]
    with (
        replaced_attributes([*(as_cuda if like_cuda else []), *always]),
        mode,
        FakeCompute(mode, observe, like_cuda),
    ):
        yield


def _weight_grad_as_cuda(total: Tensor | None, grad: Tensor, x: Tensor) -> Tensor:
    """The sum in fp32, to which CUDA's matmul adds."""
    if total is None:
        return torch.mm(grad.mT, x, out_dtype=torch.float32)
    return torch.addmm(total, grad.mT, x, out_dtype=torch.float32, out=total)


def _with_values(function: Callable) -> Callable:
    """The function, whose tensors are not fake."""

    def call(*args: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args)

    return call


class _FusedRMSNorm(torch.autograd.Function):
    """The tensors of CUDA's RMSNorm kernel, whose values nobody reads."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    assert weight is not None
    return _FusedRMSNorm.apply(x, weight)
