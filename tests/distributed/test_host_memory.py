"""Pinned memory is registered as long as it exists, and staging never registers it twice."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.cuda_trace.streams import record_cuda
from titanlite.checkpoint.model_state import HostStaging
from titanlite.distributed.host_memory import PinnedMemory, pin_in_place
from titanlite.errors import UserError

SHAPES = [(512, 256), (128, 256), (33, 7), (256,), (), (0, 4)]
INSTEAD = "optimizer.offload = false"


def a_state(dtype=torch.float32, optimizer=True, rows=0):
    parts = ("model", "optimizer") if optimizer else ("model",)
    return {
        part: {f"w{number}": torch.randn(shape).to(dtype) for number, shape in enumerate(SHAPES)}
        | {"extra": torch.randn(rows, 16).to(dtype)}
        for part in parts
    }


def assert_equal(copy, state):
    for part, tensors in state.items():
        for name, value in tensors.items():
            assert torch.equal(copy[part][name], value), name


def registered(recorder) -> list[tuple[str, int]]:
    """Every registration call; fails if one of them failed."""
    calls = [call for call in recorder.calls if "Host" in call.name]
    assert not [call for call in calls if call.detail[1]], calls
    return [(call.name, call.detail[0]) for call in calls]


def test_the_last_save_without_optimizer_state_in_another_dtype_registers_nothing():
    """It once registered tensors at addresses whose registrations outlived their memory."""
    with record_cuda() as recorder:
        staging = HostStaging(pinned=True)
        for _ in range(3):
            state = a_state()
            assert_equal(staging.copy(state), state)
        final = a_state(torch.bfloat16, optimizer=False)
        assert_equal(staging.copy(final), final)
        assert len(registered(recorder)) == 1


def test_staging_memory_that_is_too_small_is_unregistered_before_it_is_replaced():
    with record_cuda() as recorder:
        staging = HostStaging(pinned=True)
        for rows in (0, 1000, 9000, 10):
            state = a_state(torch.bfloat16, rows=rows)
            assert_equal(staging.copy(state), state)
        names = [name for name, _ in registered(recorder)]
        assert names == ["cudaHostRegister", "cudaHostUnregister"] * 2 + ["cudaHostRegister"]
        assert len(recorder.runtime.registered) == 1
        del staging
        registered(recorder)
        assert not recorder.runtime.registered


def test_pinned_memory_lives_as_long_as_a_tensor_in_it():
    with record_cuda() as recorder:
        for number in range(20):  # each may get the address of an earlier one
            tensor = torch.full((300 * number + 1, 5), float(number))
            pin_in_place(tensor, INSTEAD)
            view = tensor[-1]
            del tensor
            assert len(recorder.runtime.registered) == 1 and (view == number).all()
            del view
            gc.collect()
            assert not recorder.runtime.registered
        assert len(registered(recorder)) == 40


def test_the_device_finishes_its_copies_before_the_memory_is_unregistered():
    with record_cuda() as recorder:
        torch.cuda.set_device(3)
        memory = PinnedMemory(100, INSTEAD)
        torch.cuda.set_device(0)
        del memory
        names = [(call.name, call.stream, call.detail) for call in recorder.calls[-2:]]
        assert names == [
            ("synchronize", "device", 3),
            ("cudaHostUnregister", "", (100, 0)),
        ]
        assert torch.cuda.current_device() == 0


def test_memory_that_cannot_be_pinned_is_a_user_error_with_its_size():
    with record_cuda() as recorder:
        recorder.runtime.refuse = 2
        with pytest.raises(UserError, match=r"5,000 bytes.*out of memory.*error 2.*optimizer.off"):
            pin_in_place(torch.zeros(5000, dtype=torch.uint8), INSTEAD)
        assert not recorder.runtime.registered


def test_a_distributed_tensor_is_pinned_in_place():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Replicate()])
        with record_cuda() as recorder:
            pin_in_place(tensor, INSTEAD)
            address = tensor.to_local().data_ptr()
            assert list(recorder.runtime.registered) == [address]
            assert torch.equal(tensor.to_local(), torch.arange(12.0).view(3, 4))
            copy = HostStaging(pinned=True).copy({"model": {"w": tensor}})["model"]["w"]
            assert copy.placements == tensor.placements and copy.to_local().data_ptr() != address
            assert torch.equal(copy.full_tensor(), tensor.full_tensor())
            del tensor, copy
    finally:
        dist.destroy_process_group()
