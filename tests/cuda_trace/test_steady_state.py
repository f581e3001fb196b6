"""In the steady state the host never waits for the GPU, and nothing is compiled again.

Each job is trained for three steps on a fake GPU (benchmarks/gpu_bytes); the second is the steady
state. The counts are exact, and do not depend on the machine. tests/gpu asserts the same on a real
GPU.
"""

from __future__ import annotations

import pytest

FLOAT8 = "quantize.linear.float8"
TENSORWISE = f"{FLOAT8}.recipe_name=tensorwise"
FLOAT8_GATHERS = f"{TENSORWISE} {FLOAT8}.enable_fsdp_float8_all_gather=true"
FLOAT8_SCALES = f"{FLOAT8_GATHERS} {FLOAT8}.precompute_float8_dynamic_scale_for_fsdp=true"
COMPILE = "compile.enable=true compile.backend=aot_eager"  # Inductor needs the device's properties
OFFLOAD = (  # tensors of 1 MiB or more, and more blocks than the two that stay on the device
    "activation_checkpoint.offload=true model.n_layers=3 model.dim=512 training.seq_len=1024"
)
UNCOMPILED = "optimizer.implementation=for-loop"
DOCUMENTS = "attention.mask=document"
# Options that do not depend on each other share a trace: whichever waits, the trace names its call.
ONE_GPU = {  # name -> settings
    "default": "model.n_layers=2",
    "tied, qk-norm, foreach, no clipping": "model.tied_embeddings=true model.qk_norm=true"
    " optimizer.implementation=foreach training.max_norm=0",
    "cudnn, chunked loss, bf16 params": "attention.backend=cudnn loss.chunk_tokens=32"
    " loss.z_loss=1e-4 training.dtype=bfloat16",
    "Muon, efficient, recompute full": "optimizer.name=Muon attention.backend=efficient"
    " activation_checkpoint.mode=full",
    "Muon per head, bf16 params": "optimizer.name=Muon optimizer.muon_per_head=true"
    " training.dtype=bfloat16",
    "SGD, fp32": "optimizer.name=SGD training.mixed_precision_param=float32"
    " attention.backend=efficient",
    "SGD, foreach, math, recompute off": "optimizer.name=SGD optimizer.momentum=0.9"
    " optimizer.nesterov=true optimizer.implementation=foreach attention.backend=math"
    " activation_checkpoint.mode=none",
    "Lion, bf16 params, accumulation, recompute op": "optimizer.name=Lion training.dtype=bfloat16"
    " training.global_batch_size=4 activation_checkpoint.selective_ac_option=op",
    "Adafactor, accumulation, last micro-batch": "optimizer.name=Adafactor"
    " training.global_batch_size=4 parallelism.fsdp_gradient_reduction=last_microbatch",
    "SOAP, Float8 rowwise": f"optimizer.name=SOAP {FLOAT8}.recipe_name=rowwise",
    "in backward, Float8 rowwise_with_gw_hp": "optimizer.early_step_in_backward=true"
    f" training.max_norm=0 {FLOAT8}.recipe_name=rowwise_with_gw_hp",
    "4-bit state, adaptive clipping, spikes": f"optimizer.state_dtype=4bit {UNCOMPILED}"
    " training.clipping=adaptive guard.spike=skip",
    "Float8 state, documents": f"optimizer.state_dtype=float8 {UNCOMPILED} {DOCUMENTS}",
    "offloaded 8-bit state, Float8 tensorwise": "optimizer.state_dtype=8bit"
    f" optimizer.offload=true {UNCOMPILED} {TENSORWISE}",
    "offloaded bf16 state, offload, recompute full": "optimizer.state_dtype=bfloat16"
    f" optimizer.offload=true {UNCOMPILED} {OFFLOAD} activation_checkpoint.mode=full",
    "offload, Float8 scales": f"{OFFLOAD} {FLOAT8_SCALES}",
    "Float8 scales, compile": f"{FLOAT8_SCALES} {COMPILE}",
    "compile, memory budget, Sophia": f"{COMPILE} activation_checkpoint.mode=memory_budget"
    " optimizer.name=Sophia optimizer.hessian_frequency=1",
    "compile, documents, accumulation, average": f"{COMPILE} {DOCUMENTS}"
    " training.global_batch_size=4 weight_average.decay=0.9",
}


READS_FLAG = "tied, qk-norm, foreach, no clipping"  # torch's foreach AdamW decides on the host


def assert_host_runs_ahead(step: dict, waits: tuple[str, ...] = ()) -> None:
    assert step["operations"] > 100, "nothing ran on the device"
    assert step["waits"] == list(waits)
    assert step["later_graphs"] == 0, "compiled again"


@pytest.mark.parametrize("name", ONE_GPU)
def test_no_step_waits_for_the_device(worker, name):
    step = worker.trace(ONE_GPU[name])
    waits = ("step: aten::_local_scalar_dense",) if name == READS_FLAG else ()
    assert_host_runs_ahead(step, waits)
    assert bool(step["graphs"]) == ("compile" in name)


@pytest.mark.parametrize(
    "settings",
    [
        "guard.spike=skip training.clipping=adaptive",
        "optimizer.name=SOAP metrics.layer_norms_freq=3 metrics.noise_scale_freq=3",
    ],
)
def test_a_deterministic_run_calls_no_function_that_refuses_it(worker, settings):
    assert worker.trace(f"{settings} debug.deterministic=true")["steps"] == 3


def test_without_a_guard_no_optimizer_reads_a_flag(worker):
    settings = "guard.nonfinite=off optimizer.implementation=foreach"
    assert_host_runs_ahead(worker.trace(settings))


def test_float16_reads_one_flag_a_step(worker):
    step = worker.trace("training.mixed_precision_param=float16")
    assert step["waits"] == ["step: aten::_local_scalar_dense"]  # whether to skip the step


def test_cpu_offload_waits_for_gradients_only(worker):
    step = worker.trace("training.enable_cpu_offload=true")
    # FSDP waits for each gradient before the update, and the guard for the loss, to judge the step
    # where the parameters are.
    assert set(step["waits"]) == {"backward: Event.synchronize", "step: blocking copy to the host"}


def test_logging_reads_three_numbers(worker):
    step = worker.trace(ONE_GPU["default"])
    reads = [wait for wait in step["waits_when_logging"] if "Event" not in wait]
    logged = ["log: aten::_local_scalar_dense"] * 3  # loss, z-loss, gradient norm
    assert reads == ["step: aten::_local_scalar_dense", *logged]  # first, whether it diverged


# name -> (ranks, settings, dtypes of each kind of collective)
SUMS = {"allreduce_": ["float32", "int64"]}  # loss, gradient norm; valid labels
FSDP = {"_allgather_base_": ["bfloat16"], "_reduce_scatter_base_": ["float32"]}
RANKS = {
    "FSDP": (4, "model.n_layers=2", FSDP | SUMS),
    "replicas": (4, "parallelism.data_parallel_replicate_degree=2", FSDP | SUMS),
    "Float8 gathers": (
        4,
        FLOAT8_SCALES,
        {
            "_allgather_base_": ["bfloat16", "uint8"],  # embedding and output; Float8 as bytes
            "_reduce_scatter_base_": ["float32"],
            "all_reduce": ["float32"],  # all scales at once
        }
        | SUMS,
    ),
    "TP": (
        2,
        "parallelism.tensor_parallel_degree=2",
        {
            "all_gather_into_tensor": ["bfloat16"],  # activations
            "reduce_scatter_tensor": ["bfloat16"],
            "all_reduce": ["float32"],  # gradients of norms
            "allreduce_": ["float32"],
        },
    ),
    "Muon, FSDP and TP": (
        4,
        "optimizer.name=Muon parallelism.tensor_parallel_degree=2",
        FSDP
        | SUMS
        | {
            "all_gather_into_tensor": ["bfloat16"],
            "reduce_scatter_tensor": ["bfloat16"],
            "all_reduce": ["float32"],
            "alltoall_base_": ["bfloat16"],  # momentum to its owner, and the update back
        },
    ),
    "CP, all-gather": (
        2,
        "parallelism.context_parallel_degree=2",
        FSDP | {"allreduce_": ["float32"], "alltoall_base_": ["float32"]},
    ),
    "CP, ring": (
        2,
        "parallelism.context_parallel_degree=2 parallelism.context_parallel_rotate_method=alltoall",
        FSDP | {"allreduce_": ["float32"], "alltoall_base_": ["bfloat16", "float32"]},
    ),
    "PP, tied": (
        2,
        "parallelism.pipeline_parallel_degree=2 model.n_layers=2 model.tied_embeddings=true",
        {
            "send": ["bfloat16", "float32"],  # activations; the embedding to the last stage
            "recv_": ["bfloat16", "float32"],  # their gradients
            "allreduce_": ["float32"],
        },
    ),
}


@pytest.mark.parametrize("name", RANKS)
def test_collectives_have_the_configured_dtypes(worker, name):
    ranks, settings, dtypes = RANKS[name]
    step = worker.trace(settings, ranks)
    assert_host_runs_ahead(step)
    assert step["collectives"] == dict(sorted(dtypes.items()))


def test_a_layer_of_experts_waits_once_for_the_numbers_of_rows(worker):
    """And not again when it is recomputed; gpt-oss has biases and sinks as well.

    With idle sequences: this rank has two of its own among three.
    """
    experts = "model.name=gpt_oss model.n_layers=2 model.expert_hidden_dim=64 model.n_experts=8"
    experts += " model.n_active_experts=2 parallelism.expert_parallel_degree=4"
    idle = "elastic.enable=true training.global_batch_size=5 training.local_batch_size=3"
    settings = f"{experts} {idle} {COMPILE} experts.aux_loss_coef=0.01"
    step = worker.trace(f"{settings} activation_checkpoint.mode=full", ranks=4)
    assert_host_runs_ahead(step, ("forward: blocking copy to the host",) * 2)
    assert step["collectives"]["alltoall_base_"] == ["bfloat16", "int64"]  # rows, numbers of rows


@pytest.mark.parametrize("backend", ["flash", "auto"])
def test_context_parallel_runs_the_configured_kernel(worker, backend):
    settings = f"parallelism.context_parallel_degree=4 attention.backend={backend}"
    step = worker.trace(f"{settings} activation_checkpoint.mode=none", ranks=4)
    assert_host_runs_ahead(step)
    (forward, calls), (backward, backward_calls) = step["attention"].items()
    if backend != "auto":
        assert forward == f"{backend}_attention"
    assert backward == f"{forward}_backward"
    assert calls == backward_calls == 4  # tiles of the block: one with the keys of each rank


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ("model.mtp_layers=1 parallelism.context_parallel_degree=2", 2),
        (f"attention.linear_backend=fla {DOCUMENTS} {COMPILE}", 1),
    ],
)
def test_linear_attention_waits_for_nothing(worker, settings, ranks):
    """Also with the prediction of further tokens. The kernels of fla-core are fake ones."""
    model = "model.name=qwen3_next model.n_layers=2 model.full_attention_every=2"
    model += " model.n_experts=0"
    step = worker.trace(f"{model} {settings}", ranks)
    assert_host_runs_ahead(step)
    assert ("fla" in step["attention"]) == ("fla" in settings)
