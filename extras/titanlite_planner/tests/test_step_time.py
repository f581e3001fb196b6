"""The time of a step: what makes it longer, what hides what, and the schedules' bubbles."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.gpu_bytes.targets import JOBS, read_page
from titanlite.job import read_job
from titanlite.parallelize.schedule import build_schedule_order
from titanlite_planner.accuracy.row_errors import model_flops
from titanlite_planner.hardware import CPU, parse_gpus
from titanlite_planner.job_workload import workload_of
from titanlite_planner.model_shape import Experts, LatentAttention, ModelShape
from titanlite_planner.time import experts as expert_times
from titanlite_planner.time.block import block_kinds, block_passes, output_passes
from titanlite_planner.time.block_case import block_case
from titanlite_planner.time.collectives import CollectiveTimes
from titanlite_planner.time.efficiency import efficiency_sets, find_efficiency
from titanlite_planner.time.kernels import KERNEL_S, KernelTimes
from titanlite_planner.time.pipeline import divide_layers, idle_seconds
from titanlite_planner.time.simulation import simulate_schedule
from titanlite_planner.time.step import estimate_step, model_parameters
from titanlite_planner.workload import ExpertExchange, Layout, Numerics, Overlap, Workload

LLAMA_8B = ModelShape("8B", 32, 4096, 32, 8, 128, 14336, 128256)
BASE = Workload(LLAMA_8B, Layout(shard=8, micro_batch=1, n_microbatches=4), 8192)
H100 = parse_gpus("8xH100")


def seconds(workload=BASE, cluster=H100, **layout):
    changed = dataclasses.replace(workload, layout=dataclasses.replace(workload.layout, **layout))
    return estimate_step(changed, cluster)


def test_the_parts_add_up_to_the_step_and_mfu_is_below_the_efficiency():
    step = seconds()
    assert sum(step.parts.values()) == pytest.approx(step.total)
    mfu = model_flops(BASE) / 8 / 989.5e12 / step.total
    assert 0.3 < mfu < find_efficiency("H100").matmul


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"recompute": "full"}, "matmuls"),
        ({"seq_len": 16384}, "attention"),
        ({"compiled": False}, "memory_bound"),
        ({"attention_kernel": "flash2"}, "attention"),
        ({"attention_kernel": "flash1"}, "attention"),
        ({"fused_attention": False}, "memory_bound"),
        ({"offload_activations": True}, "offload"),
        ({"offload_optimizer": True}, "offload"),
        ({"offload_parameters": True}, "offload"),
        ({"checkpoint_interval": 1}, "checkpoint"),
        ({"blocking_launches": True}, "memory_bound"),
    ],
    ids=str,
)
def test_what_costs_more_shows_in_its_part(change, part):
    slow_host = dataclasses.replace(H100.machine, host_gb_per_s=1)
    cluster = dataclasses.replace(H100, machine=slow_host)
    before = seconds(cluster=cluster)
    after = seconds(dataclasses.replace(BASE, **change), cluster)
    assert getattr(after, part) > getattr(before, part)
    assert after.total > before.total


def test_an_offloaded_optimizer_state_is_copied_to_the_gpu_and_back():
    step = seconds(dataclasses.replace(BASE, offload_optimizer=True))
    state = BASE.numerics.state_bytes * model_parameters(LLAMA_8B) / 8
    assert step.offload == pytest.approx(2 * state / (H100.machine.host_gb_per_s * 1e9))
    assert step.optimizer == seconds().optimizer
    on_the_cpu = dataclasses.replace(BASE, offload_parameters=True)
    # with the parameters, the optimizer is in host memory, too, and nothing more is copied
    both = dataclasses.replace(on_the_cpu, offload_optimizer=True)
    assert seconds(both) == seconds(on_the_cpu)
    assert seconds(both).optimizer > 5 * step.optimizer


def test_float8_makes_matmuls_faster_and_quantizes():
    numerics = Numerics(matmuls="float8")
    float8 = seconds(dataclasses.replace(BASE, numerics=numerics))
    rowwise = dataclasses.replace(numerics, quantize_bytes=10.0)
    assert float8.matmuls < seconds().matmuls
    assert float8.memory_bound > seconds().memory_bound
    assert seconds(dataclasses.replace(BASE, numerics=rowwise)).memory_bound > float8.memory_bound


def test_tensor_parallelism_belongs_inside_a_server():
    inside = seconds(cluster=parse_gpus("64xH100"), tensor=8, shard=8)
    across = seconds(cluster=parse_gpus("64xH100"), tensor=16, shard=4)
    rack = seconds(cluster=parse_gpus("64xGB200"), tensor=16, shard=4)
    assert across.tensor > 1.3 * inside.tensor  # for half of the matmuls
    assert rack.tensor < across.tensor / 2


def test_asynchronous_tensor_parallelism_and_float8_gathers_send_less():
    whole = seconds(tensor=8, shard=1)
    overlapped = dataclasses.replace(BASE, overlap=Overlap(tensor=True))
    gathered = dataclasses.replace(BASE, numerics=Numerics("float8", float8_gather=True))
    assert seconds(overlapped, tensor=8, shard=1).tensor < 0.6 * whole.tensor
    assert seconds(gathered, tensor=8, shard=1).tensor < 0.9 * whole.tensor


def test_small_micro_batches_do_not_hide_the_gathers_of_fsdp():
    short = dataclasses.replace(BASE, seq_len=512)
    network = parse_gpus("8xA100-40GB")
    assert seconds().shard < 0.01 * seconds().total
    assert seconds(short, network).shard > 0.05 * seconds(short, network).total


def test_communication_without_cores_of_its_own_is_not_hidden():
    busy = dataclasses.replace(H100, overlaps=False)
    assert seconds(cluster=busy).shard > 5 * seconds().shard
    assert seconds(cluster=busy).total > seconds().total
    measured = dataclasses.replace(H100.gpu, attention_tflops={"bfloat16": 1.0})
    slow = dataclasses.replace(H100, gpu=measured)
    assert seconds(cluster=slow).attention > 10 * seconds().attention


def test_gradients_are_reduced_in_every_micro_batch_or_in_the_last():
    short = dataclasses.replace(BASE, seq_len=512)
    once = seconds(short, reduce_every_microbatch=False)
    assert once.shard < 0.6 * seconds(short).shard


def test_replicas_reduce_their_gradients_behind_the_last_backward():
    layout = {"replicate": 8, "shard": 1, "sharded": "nothing", "n_microbatches": 1}
    hidden = seconds(**layout)
    exposed = seconds(dataclasses.replace(BASE, overlap=Overlap(data=False)), **layout)
    assert 0 < hidden.replicate < exposed.replicate


def test_replicas_of_shards_reduce_in_every_micro_batch():
    layout = {"replicate": 4, "shard": 2, "n_microbatches": 8}
    every = seconds(cluster=parse_gpus("64xA100"), **layout)
    last = seconds(cluster=parse_gpus("64xA100"), reduce_every_microbatch=False, **layout)
    assert every.replicate == pytest.approx(8 * last.replicate)


def test_a_run_of_the_pipeline_reduces_once():
    short = dataclasses.replace(BASE, seq_len=256)
    layout = {"pipeline": 2, "shard": 4, "n_microbatches": 8}
    once, often = seconds(short, runs=1, **layout), seconds(short, runs=8, **layout)
    assert once.shard < 0.6 * often.shard


def test_a_context_group_exchanges_keys_and_values():
    long = dataclasses.replace(BASE, seq_len=131072)
    one = seconds(long, shard=1, n_microbatches=1)
    eight = seconds(long, shard=1, context=8, n_microbatches=1)
    assert eight.context > 0
    assert one.attention == pytest.approx(8 * eight.attention, rel=0.01)


def test_experts_send_tokens_to_other_ranks():
    sparse = dataclasses.replace(LLAMA_8B, experts=Experts(64, 4, 2048, dense_layers=2))
    workload = dataclasses.replace(BASE, model=sparse)
    assert seconds(workload, expert=8).expert > 0
    assert seconds(workload, expert=1).expert == 0
    assert model_parameters(sparse) > 5 * model_parameters(LLAMA_8B)


SPARSE = dataclasses.replace(LLAMA_8B, experts=Experts(64, 8, 2048))
FAR = {"expert": 32, "shard": 32, "n_microbatches": 1}


def exchange(cluster="32xH100", workload=BASE, **options):
    model = SPARSE if workload.model == LLAMA_8B else workload.model
    workload = dataclasses.replace(workload, model=model, exchange=ExpertExchange(**options))
    return seconds(workload, parse_gpus(cluster), **FAR)


def test_a_token_crosses_the_network_once_or_for_each_expert():
    # 6 of 8 experts are in the 3 other servers, of which 2.7 have one
    assert exchange().expert == pytest.approx(2.2 * exchange(once_per_rank=True).expert, rel=0.05)
    rack = exchange("32xGB200").expert
    assert exchange("32xGB200", once_per_rank=True).expert > rack  # slower kernels, no network


def test_an_exchange_hides_behind_another_micro_batch():
    hidden = exchange("32xGB200", overlapped=True).expert
    assert 0 < hidden < exchange("32xGB200").expert / 2


def test_small_experts_wait_for_the_host_unless_the_step_is_one_graph():
    model = dataclasses.replace(SPARSE, experts=Experts(1024, 8, 256))
    tiny = dataclasses.replace(BASE, model=model, seq_len=512)
    float8 = dataclasses.replace(tiny, numerics=Numerics("float8"))
    scaled = dataclasses.replace(tiny, numerics=Numerics("float8", block_scales=True))
    assert exchange(workload=tiny).host > 0
    assert exchange(workload=tiny, one_graph=True).host == 0
    assert exchange(workload=scaled).total > 1.3 * exchange(workload=float8).total


def test_a_gpu_whose_multiprocessors_are_not_known_still_waits_for_the_host():
    gpu = dataclasses.replace(H100.gpu, multiprocessors=1)
    short = dataclasses.replace(BASE, seq_len=32)
    assert seconds(short).host > 0
    assert seconds(short, dataclasses.replace(H100, gpu=gpu)).host > 0


def test_equal_matmuls_fill_the_multiprocessors_together():
    kernels = KernelTimes(H100.gpu, find_efficiency("H100"))
    alone = kernels.matmul(128, 7168, 2048, "bfloat16")
    assert kernels.matmul(128, 7168, 2048, "bfloat16", at_once=4) < alone / 2
    large = kernels.matmul(8192, 8192, 8192, "bfloat16")
    assert kernels.matmul(8192, 8192, 8192, "bfloat16", 4) == pytest.approx(large, rel=0.1)


def test_an_unaligned_vocabulary_slows_the_output_layer_as_reported():
    def gpt2(vocab_size, cluster):
        model = ModelShape(
            "gpt2", 12, 768, 12, 12, 64, 3072, vocab_size, gated=False, tied_embeddings=True
        )
        layout = Layout(shard=8, sharded="nothing", micro_batch=12, n_microbatches=5)
        workload = Workload(model, layout, 1024, attention_kernel="flash2", loss="pytorch")
        return estimate_step(workload, cluster).total

    a100, cpu = parse_gpus("8xA100"), dataclasses.replace(H100.gpu, name=CPU)
    assert 1.15 < gpt2(50257, a100) / gpt2(50304, a100) < 1.35  # nanoGPT: "~25% speedup"
    assert gpt2(50257, H100) / gpt2(50304, H100) > 1.5  # whose aligned matmuls are faster
    kernels = KernelTimes(cpu, find_efficiency(CPU))
    assert kernels.unaligned(50257, "bfloat16") == 1.0
    assert KernelTimes(H100.gpu, find_efficiency("H100")).unaligned(50257, "float32") == 1.0


def test_a_matmul_in_fp32_writes_fp32():
    kernels = KernelTimes(H100.gpu, find_efficiency("H100"))
    seconds = kernels.matmul(4096, 1, 4096, "float32") - KERNEL_S
    assert seconds == pytest.approx(kernels.memory_bound(4 * (2 * 4096 + 4096**2)))


def test_sums_of_gradients_are_read_and_written():
    def memory_bound(workload=BASE, **layout):
        return seconds(workload, **layout).memory_bound

    every = {"reduce_every_microbatch": True}
    alone = memory_bound(**every)  # FSDP reduces the gradients of each micro-batch
    summed = memory_bound(reduce_every_microbatch=False)
    fused = memory_bound(dataclasses.replace(BASE, fused_sums=True), reduce_every_microbatch=False)
    assert summed - fused == pytest.approx((fused - alone) / 4)  # 2 bytes beside 8
    assert memory_bound(shard=1, pipeline=8, **every) > memory_bound(
        shard=1, pipeline=8, runs=4, **every
    )


def test_a_window_and_few_heads_change_attention():
    window = dataclasses.replace(LLAMA_8B, window=1024, full_attention_every=2)
    windowed = seconds(dataclasses.replace(BASE, model=window)).attention
    assert 0.5 < windowed / seconds().attention < 0.7
    few = seconds(dataclasses.replace(BASE, seq_len=1024), tensor=8, shard=1).attention
    assert few > seconds(dataclasses.replace(BASE, seq_len=1024)).attention / 6  # idle processors


def test_latent_attention_has_narrow_projections_and_wide_heads():
    latent = LatentAttention(1536, 512, 64, 128)
    deepseek = dataclasses.replace(LLAMA_8B, n_kv_heads=32, head_dim=192, latent=latent)
    plain = dataclasses.replace(LLAMA_8B, n_kv_heads=32, head_dim=192)
    found, wide = (seconds(dataclasses.replace(BASE, model=m)) for m in (deepseek, plain))
    assert found.matmuls < wide.matmuls
    assert found.attention == pytest.approx(wide.attention * (192 + 128) / 384, rel=0.02)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_the_closed_form_of_the_bubble_equals_the_simulation(schedule, ranks, microbatches):
    stages = 1 if schedule in ("GPipe", "1F1B") else 2
    order = build_schedule_order(schedule, ranks, ranks * stages, microbatches)
    rows = simulate_schedule(order, [1.0] * ranks * stages)
    simulated = max(row[-1].end for row in rows) - 3.0 * stages * microbatches
    costs = [3.0 * stages] * ranks
    found = idle_seconds(schedule, ranks, stages, microbatches, costs)
    assert found == pytest.approx(simulated)


def test_unequal_stages_wait_for_the_slowest():
    costs = [1.0, 1.0, 2.0, 1.0]
    order = build_schedule_order("1F1B", 4, 4, 8)
    end = max(row[-1].end for row in simulate_schedule(order, [cost / 3 for cost in costs]))
    assert 8 * 2.0 + idle_seconds("1F1B", 4, 1, 8, costs) == pytest.approx(end, rel=0.05)


def test_a_zero_bubble_schedule_waits_less():
    costs = [1.0] * 4
    plain = idle_seconds("Interleaved1F1B", 4, 2, 16, costs)
    assert 0 <= idle_seconds("ZBVZeroBubble", 4, 2, 16, costs) < plain
    together = idle_seconds("ZBVZeroBubble", 4, 2, 16, costs, splits_backward=False)
    assert together >= plain  # weight gradients fill no bubble


def test_blocks_are_divided_by_what_the_ends_cost():
    assert divide_layers(32, 4, 0.0, 3.0) == (8, 8, 8, 8)  # equal where they divide
    assert sum(divide_layers(126, 16, 0.1, 1.0)) == 126
    assert max(divide_layers(126, 16, 0.1, 1.0)) == 8
    assert divide_layers(10, 4, 0.0, 2.0)[-1] < 3


def test_every_fraction_is_below_its_peak():
    for name, efficiency in efficiency_sets().items():
        if name == "CPU":  # its peaks are measured rates
            continue
        values = dataclasses.asdict(efficiency).values()
        assert all(0.1 <= value <= 0.98 for value in values), name
    assert find_efficiency("MI300X") == efficiency_sets()["default"]


def estimated_bytes(job: str, monkeypatch) -> dict[str, float]:
    """What the planner estimates of a job of gpu_bytes.targets, by the beginnings of metrics."""
    ranks, *settings = job.split()
    data = ["--data.tokenizer=none", "--data.sources=[{name='any', path='any'}]"]
    off = ["--data.validation=[]", "--validation.enable=false"]
    workload = workload_of(read_job([*settings, *data, *off], int(ranks), here=False))
    gpu = dataclasses.replace(H100.gpu, memory_gb_per_s=1e-9)  # a byte takes a second
    efficiency = dataclasses.replace(find_efficiency("H100"), memory=1.0)
    cluster = dataclasses.replace(H100, gpu=gpu)
    case = block_case(
        workload, KernelTimes(gpu, efficiency), CollectiveTimes(cluster.resized(0), efficiency)
    )
    monkeypatch.setattr(expert_times, "PERMUTED", 1.0)  # slower bytes, not more of them
    block = block_passes(case, block_kinds(workload.model)[-1])
    output = output_passes(case)
    update = estimate_step(workload, cluster, efficiency).optimizer / model_parameters(
        workload.model
    )
    found = {
        "GB a block": (block.forward.memory + block.backward.memory) / 1e9,
        "bytes a logit": (output.forward.memory + output.backward.memory)
        / (case.tokens * workload.model.vocab_size),
        "bytes a bf16 parameter": update,
        "bytes an fp32 parameter": update,
    }
    if workload.model.experts:
        forward = expert_times.expert_passes(case).forward.memory
        found["bytes a token and dim"] = forward / case.tokens / workload.model.dim
    return found


@pytest.mark.parametrize(
    "job", [job for job, metrics in JOBS.items() if "waits" not in metrics[0].name]
)
def test_the_planner_estimates_the_bytes_that_were_counted(job, monkeypatch):
    estimates, page = estimated_bytes(job, monkeypatch), read_page()
    compared = {
        metric.name: estimate
        for metric in JOBS[job]
        for beginning, estimate in estimates.items()
        if metric.name.startswith(beginning)
    }
    counted = {name: page[name][0] for name in compared}
    assert counted and compared == pytest.approx(counted, rel=0.15)
