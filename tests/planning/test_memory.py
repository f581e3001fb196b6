"""What is said to a job that runs out of memory is true of it, and may be done."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from titanlite.job import read_job
from titanlite.optim import build_optimizer
from titanlite.planning.memory import estimate_memory, memory_savings
from titanlite.runtime.out_of_memory import MemoryUsage, find_memory_request


def job_of(run_toml, *argv, ranks=1):
    return read_job(["--job.config_file", str(run_toml), *argv], ranks)


def kept_bytes(spec, shape, rows: int, length: int) -> int:
    """What autograd holds between forward and backward, but for the weights."""
    model = spec.build(shape)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen, alive = {}, []

    def see(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)  # or its place would be given to another
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, shape.vocab_size, (rows, length))
    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        model(ids).sum()
    return sum(seen.values())


@pytest.mark.parametrize("qk_norm", ["false", "true"])
def test_activations_are_what_autograd_holds(qk_norm, run_toml):
    job = job_of(run_toml, "--model.qk_norm", qk_norm, "--model.hidden_dim", "96")
    deeper = dataclasses.replace(job.sizes, n_layers=2 * job.sizes.n_layers)
    size = (job.config.training.local_batch_size, job.config.training.seq_len)
    found = kept_bytes(job.spec, deeper, *size) - kept_bytes(job.spec, job.sizes, *size)
    assert estimate_memory(job).activations == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8bit", "4bit"])
def test_what_is_held_is_what_was_foreseen(kind, run_toml):
    sizes = ["--model.dim", "128", "--model.hidden_dim", "256", "--optimizer.state_dtype", kind]
    job = job_of(run_toml, *sizes)
    held = MemoryUsage(torch.device("cpu"))
    assert held.bytes() == {"weights": 0, "gradients": 0, "moments": 0}
    held.model = job.spec.build(job.sizes)
    section = dataclasses.replace(job.config.optimizer, implementation="for-loop")
    held.optimizer = build_optimizer(held.model, section)
    for parameter in held.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held.optimizer.step()
    counted, foreseen = held.bytes(), estimate_memory(job)
    assert counted["weights"] == foreseen.weights and counted["gradients"] == foreseen.gradients
    assert counted["moments"] == pytest.approx(foreseen.moments, rel=0.03)


def test_twice_the_ranks_hold_half_and_pipelines_hold_what_is_in_flight(run_toml):
    one, two = estimate_memory(job_of(run_toml)), estimate_memory(job_of(run_toml, ranks=2))
    assert two.weights == one.weights / 2 and two.moments == one.moments / 2
    pipeline = ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "8"]
    early = estimate_memory(job_of(run_toml, *pipeline, ranks=2))
    gpipe = ["--parallelism.pipeline_parallel_schedule", "GPipe"]
    late = estimate_memory(job_of(run_toml, *pipeline, *gpipe, ranks=2))
    assert late.activations == 4 * early.activations  # 8 micro-batches in flight, not 2


def said(run_toml, *argv, ranks=1, on_gpu=True) -> dict[str, float]:
    job = job_of(run_toml, *argv, ranks=ranks)
    return {saving.words: saving.bytes for saving in memory_savings(job, on_gpu)}


def test_the_way_that_saves_most_comes_first(run_toml):
    full, lean = 'activation_checkpoint.mode = "full"', 'optimizer.state_dtype = "8bit"'
    long = said(run_toml, "--training.seq_len", "4096", "--model.n_layers", "16")
    assert list(long.values()) == sorted(long.values(), reverse=True)
    assert long[full] > long[lean]  # of a small model that reads much
    wide = said(run_toml, "--model.vocab_size", "50000")
    assert full not in wide or wide[lean] > wide[full]  # of a large one that reads little
    assert "training.local_batch_size = 1, training.global_batch_size = 8" in long


def test_nothing_is_advised_that_would_be_refused(run_toml):
    plain = said(run_toml, "--optimizer.name", "SGD")
    assert not any("optimizer.state_dtype" in way for way in plain)
    assert not any("offload" in way for way in said(run_toml, on_gpu=False))
    many = said(run_toml, "--parallelism.tensor_parallel_degree", "4", ranks=4)
    assert not any("tensor_parallel_degree = 8" in way for way in many)  # of 4 heads
    accumulating = said(run_toml, "--training.global_batch_size", "8")
    assert not any("early_step" in way for way in accumulating)
    assert any("early_step" in way for way in said(run_toml, "--training.global_batch_size", "2"))


def test_each_saving_is_what_the_setting_saves(run_toml):
    sizes = ["--model.dim", "128", "--model.hidden_dim", "256"]
    ways = said(run_toml, *sizes)
    before = estimate_memory(job_of(run_toml, *sizes))
    after = estimate_memory(job_of(run_toml, *sizes, "--optimizer.state_dtype", "8bit"))
    assert ways['optimizer.state_dtype = "8bit"'] == before.total - after.total > 0
    assert ways["optimizer.offload = true"] == before.moments


def test_running_out_of_memory_is_known_by_its_words():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58)
    assert "GiB more was asked for" in find_memory_request(raised.value)
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a")
    assert find_memory_request(cuda) == "20.00 MiB more was asked for"
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = cuda
    assert find_memory_request(wrapped) == find_memory_request(cuda)
    assert find_memory_request(MemoryError()) == "more was asked for"
    assert find_memory_request(RuntimeError("shapes do not match")) is None
