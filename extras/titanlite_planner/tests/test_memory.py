"""Memory estimates equal measurements, and out-of-memory advice is valid and sorted."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from tests.parallelize.test_schedule import as_csv
from titanlite.distributed.mesh import build_mesh
from titanlite.job import read_job
from titanlite.optim import MatrixFacts, build_optimizer
from titanlite.parallelize import ParallelLayout, build_parallel_modules
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    set_memory_budget,
)
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.schedule import build_schedule_order
from titanlite.runtime.out_of_memory import MemoryUsage, find_memory_request
from titanlite_planner.dry_run.fake_ranks import fake_rank
from titanlite_planner.job_workload import workload_of
from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.memory.advice import memory_savings
from titanlite_planner.memory.job import estimate_job_memory
from titanlite_planner.memory.schedule_states import ScheduleState, _largest, schedule_states
from titanlite_planner.stages import stages_in_flight

VIEWS = {
    getattr(torch.ops.aten, name)
    for name in ("alias", "detach", "view", "_unsafe_view", "permute", "t", "transpose", "reshape")
}


def job_of(run_toml, *argv, ranks=1):
    return read_job(["--job.config_file", str(run_toml), *argv], ranks)


def saved_bytes(spec, sizes, sequences: int, length: int) -> int:
    """Bytes that autograd saves between forward and backward, parameters not counted."""
    model = spec.build(sizes)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes_by_address, alive = {}, []

    def record(tensor):
        storage = tensor.untyped_storage()
        alive.append(tensor)  # so that its address is not reused
        if storage.data_ptr() not in parameters:
            sizes_by_address[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(0, sizes.vocab_size, (sequences, length))
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        model(ids).sum()
    return sum(sizes_by_address.values())


@pytest.mark.parametrize("qk_norm", ["false", "true"])
def test_estimated_activations_equal_what_autograd_saves(qk_norm, run_toml):
    job = job_of(run_toml, "--model.qk_norm", qk_norm, "--model.hidden_dim", "96")
    deeper = dataclasses.replace(job.sizes, n_layers=job.sizes.n_layers + 1)
    size = (job.config.training.local_batch_size, job.config.training.seq_len)
    measured = saved_bytes(job.spec, deeper, *size) - saved_bytes(job.spec, job.sizes, *size)
    assert BlockActivations(workload_of(job), on_cpu=True).all_saved == measured


def test_of_one_offloaded_block_there_is_one_on_the_device(run_toml):
    workload = dataclasses.replace(workload_of(job_of(run_toml)), offload_activations=True)
    activations = BlockActivations(workload)
    one, two, many = (activations.alive(0, blocks) for blocks in (1, 2, 9))
    assert one == activations.saved(0) and two == many == 2 * one


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "8bit", "4bit", "Muon"])
def test_measured_memory_equals_the_estimate(state_dtype, run_toml):
    sizes = ["--model.dim", "128", "--model.hidden_dim", "256"]
    kind = ["--optimizer.name", "Muon"]
    if state_dtype != "Muon":
        kind = ["--optimizer.state_dtype", state_dtype]
    job = job_of(run_toml, *sizes, *kind)
    cpu = torch.device("cpu")
    unused = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    assert MemoryUsage(cpu).by_kind() == unused
    model = job.spec.build(job.sizes)
    section = dataclasses.replace(job.config.optimizer, implementation="for-loop")
    optimizer = build_optimizer(model, section, MatrixFacts(job.spec, job.sizes))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    measured, estimate = (
        MemoryUsage(cpu, model, optimizer).by_kind(),
        estimate_job_memory(job).worst,
    )
    assert measured["parameters"] == estimate.parameters
    assert measured["gradients"] == estimate.rest_gradients
    assert measured["optimizer state"] == pytest.approx(estimate.optimizer_state, rel=0.03)


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "SGD"},
        {"name": "SGD", "momentum": "0.9"},
        {"name": "Lion"},
        {"name": "Adafactor"},
        {"name": "SOAP"},
        {"name": "Sophia"},
        {"groups": "[{ match = ['output.*'], name = 'Adafactor' }]"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_counts_the_state_of_each_parameters_optimizer(settings, dtype, run_toml):
    options = [f"--optimizer.{key}={value}" for key, value in settings.items()]
    job = job_of(run_toml, *options, "--training.dtype", dtype)
    model = job.spec.build(job.sizes).to(job.transforms.param_dtype)
    facts = MatrixFacts(job.spec, job.sizes)
    optimizer = build_optimizer(model, job.config.optimizer, facts)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # after which vectors have fp32 copies
    measured = MemoryUsage(torch.device("cpu"), model, optimizer).by_kind()["optimizer state"]
    # the step counters are scalars
    assert measured == pytest.approx(
        estimate_job_memory(job).worst.optimizer_state, rel=0.02, abs=8
    )


def test_muon_has_one_moment_and_a_few_whole_matrices(run_toml):
    sizes = ["--model.dim", "512", "--model.hidden_dim", "2048", "--training.seq_len", "8"]
    adamw, muon = (
        estimate_job_memory(job_of(run_toml, *sizes, "--optimizer.name", name, ranks=4))
        for name in ("AdamW", "Muon")
    )
    assert muon.worst.optimizer_state < 0.6 * adamw.worst.optimizer_state
    assert adamw.worst.step_temporaries == 0
    assert muon.worst.step_temporaries > 1 << 20
    assert muon.worst.at == "in the optimizer's step"


def test_estimates_count_shards_and_pipeline_micro_batches_in_flight(run_toml):
    one, two = (estimate_job_memory(job_of(run_toml, ranks=n)).worst for n in (1, 2))
    assert two.parameters == one.parameters / 2
    assert two.optimizer_state == one.optimizer_state / 2
    pipeline = ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "8"]
    schedule = ["--parallelism.pipeline_parallel_schedule", "GPipe"]
    jobs = [job_of(run_toml, *pipeline, *options, ranks=2) for options in ([], schedule)]
    one_f_one_b, gpipe = (stages_in_flight_of(job) for job in jobs)
    assert one_f_one_b == ({0: 2}, {0: 1})
    assert gpipe == ({0: 8}, {0: 8})


def test_a_schedule_from_a_file_needs_the_memory_of_the_same_one_by_name(run_toml, tmp_path):
    file, name = tmp_path / "schedule.csv", "ZBVZeroBubble"
    file.write_text(as_csv(build_schedule_order(name, ranks=2, stages=4, microbatches=4)))
    options = ["--model.n_layers=4", "--training.local_batch_size=4"]
    options.append("--parallelism.pipeline_parallel_degree=2")
    listed, named = (
        job_of(run_toml, *options, f"--parallelism.pipeline_parallel_schedule{value}", ranks=2)
        for value in (f"_csv={file}", f"={name}")
    )
    assert estimate_job_memory(listed) == estimate_job_memory(named)


@pytest.mark.parametrize(("schedule", "stages"), [("GPipe", 2), ("LoopedBFS", 6)])
def test_schedules_with_all_forwards_first_have_the_states_of_their_order(schedule, stages):
    owners = tuple(stage % 2 for stage in range(stages))
    order = build_schedule_order(schedule, 2, stages, 5)
    listed = schedule_states("csv", owners, 5, tuple(map(tuple, order)))
    for named, expected in zip(schedule_states(schedule, owners, 5), listed, strict=True):
        assert set(named) == set(expected)


def stages_in_flight_of(job):
    plan = job.pipeline
    return stages_in_flight(plan.schedule, tuple(plan.rank_of), plan.n_microbatches)


def savings_of(run_toml, *argv, ranks=1, on_gpu=True) -> dict[str, float]:
    """Estimated savings in bytes by the settings that give them."""
    job = job_of(run_toml, *argv, ranks=ranks)
    return {saving.settings: saving.bytes for saving in memory_savings(job, on_gpu)}


def test_the_largest_saving_is_advised_first(run_toml):
    full, eight_bit = 'activation_checkpoint.mode = "full"', 'optimizer.state_dtype = "8bit"'
    long = savings_of(run_toml, "--training.seq_len", "4096", "--model.n_layers", "16")
    assert list(long.values()) == sorted(long.values(), reverse=True)
    assert long[full] > long[eight_bit]  # small model, long sequences
    large = savings_of(run_toml, "--model.vocab_size", "50000")
    assert full not in large or large[eight_bit] > large[full]  # large model, short sequences
    assert "training.local_batch_size = 1, training.global_batch_size = 8" in long


def test_advice_is_always_a_valid_configuration(run_toml):
    def is_advised(part_of_setting: str, *argv, **where) -> bool:
        return any(part_of_setting in text for text in savings_of(run_toml, *argv, **where))

    assert not is_advised("optimizer.state_dtype", "--optimizer.name", "SGD")
    assert not is_advised("offload", on_gpu=False)
    all_heads = ["--parallelism.tensor_parallel_degree", "4"]  # the model has 4 heads
    assert not is_advised("tensor_parallel_degree = 8", *all_heads, ranks=4)
    assert not is_advised("early_step", "--training.global_batch_size", "8")  # accumulates
    short = ["--training.seq_len", "8", "--model.n_layers", "8"]  # gradients are most of the peak
    assert is_advised("early_step", "--training.global_batch_size", "2", *short)


def test_each_saving_equals_the_difference_of_two_estimates(run_toml):
    sizes = ["--model.dim", "128", "--model.hidden_dim", "256"]
    savings = savings_of(run_toml, *sizes)
    before = estimate_job_memory(job_of(run_toml, *sizes))
    after = estimate_job_memory(job_of(run_toml, *sizes, "--optimizer.state_dtype", "8bit"))
    assert savings['optimizer.state_dtype = "8bit"'] == before.total - after.total > 0
    assert savings["optimizer.offload = true"] == pytest.approx(before.worst.optimizer_state)
    pipeline = [*sizes, "--parallelism.pipeline_parallel_degree=2"]
    pipeline += ["--training.global_batch_size=-1"]  # it grows with the ranks
    before, after = (estimate_job_memory(job_of(run_toml, *pipeline, ranks=n)) for n in (2, 4))
    savings = savings_of(run_toml, *pipeline, ranks=2)
    assert savings["twice as many ranks"] == before.total - after.total > 0


def test_out_of_memory_errors_are_recognised_by_their_message():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58)
    assert "cannot allocate" in find_memory_request(raised.value)
    cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a")
    assert find_memory_request(cuda) == "cannot allocate 20.00 MiB"
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = cuda
    assert find_memory_request(wrapped) == find_memory_request(cuda)
    assert find_memory_request(MemoryError()) == "cannot allocate more"
    assert find_memory_request(RuntimeError("shapes do not match")) is None


def test_a_state_with_freed_parameters_does_not_replace_one_that_has_them():
    has_all = ScheduleState("backward", 0, (1, 0), (True, False), (0, 0), (False, False))
    has_fewer = has_all._replace(reduced=(False, True))
    assert _largest([has_fewer, has_all]) == {has_all, has_fewer}


def count_saved_bytes(job) -> int:
    """Bytes that the forward of a job's only block saves on rank 0, if it is compiled.

    The compiler's partitioner decides, on a CPU as for a GPU; nothing is generated.
    """
    # here, because each worker of the suite imports all tests, and these take a second
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    forwards = []

    def keep(graph, inputs):
        forwards.append(graph)
        return graph.forward

    def compile_only(module, inputs):
        partition = partial(min_cut_rematerialization_partition, compiler="inductor")
        compiler = aot_autograd(
            fw_compiler=keep,
            bw_compiler=lambda graph, inputs: graph.forward,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        return compiler(module, inputs)

    torch._dynamo.reset()
    training = job.config.training
    tokens = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
    with fake_rank(0, job.degrees.ranks):
        mesh = build_mesh(job.degrees, "cpu")
        layout = ParallelLayout(mesh, job.config.parallelism, job.pipeline)
        transforms = dataclasses.replace(
            job.transforms, compile=CompileConfig(True, ["model"], backend=compile_only)
        )
        modules = build_parallel_modules(job.spec, job.sizes, layout, transforms)
        modules.materialize(torch.device("cpu"), seed=0).model(tokens, labels=tokens)
    set_memory_budget(ActivationCheckpointConfig(mode="none"))
    (forward,) = forwards
    return saved_by_graph(forward)


def saved_by_graph(forward) -> int:
    """Bytes of the outputs after the first, without parameters and the embedding of positions."""
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    saved = [n for n in output.args[0][1:] if isinstance(getattr(n, "meta", {}).get("val"), Tensor)]
    known, total = set(), 0
    for node in saved:
        value = node.meta["val"]
        source = node
        while getattr(source.target, "overloadpacket", None) in VIEWS:
            source = source.args[0]
        is_input = source.op == "placeholder" and value.dtype == torch.bfloat16 and value.dim() == 3
        if source not in known and (source.op != "placeholder" or is_input):
            total += value.numel() * value.element_size()
        known.add(source)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, tensor, budget", [("qwen3", 1, 1.0), ("llama3", 1, 0.99), ("llama3", 2, 1.0)]
)
def test_a_compiled_block_saves_what_is_estimated(family, tensor, budget, run_toml):
    sizes = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 192}
    argv = [f"--model.{name}={size}" for name, size in sizes.items()]
    argv += [f"--model.name={family}", "--model.n_layers=1", "--compile.enable=true"]
    argv += [f"--parallelism.tensor_parallel_degree={tensor}", "--job.device=cpu"]
    argv += ["--training.mixed_precision_param=bfloat16", "--training.seq_len=32"]
    argv += ["--activation_checkpoint.mode=memory_budget"]
    job = job_of(run_toml, *argv, f"--activation_checkpoint.memory_budget={budget}", ranks=tensor)
    assert count_saved_bytes(job) == BlockActivations(workload_of(job)).saved(0)
