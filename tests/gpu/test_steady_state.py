"""In the steady state the host runs ahead of the device, and nothing is recompiled."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed.mesh import Degrees, ParallelismConfig, build_mesh
from titanlite.guard.judge import PendingSteps, StepJudge
from titanlite.guard.policy import GuardConfig
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize import ModelTransforms, ParallelLayout, build_parallel_modules
from titanlite.parallelize.activation_checkpoint import ActivationCheckpointConfig
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite.training.engine import build_engine
from titanlite.training.state import TrainState
from titanlite.training.step import StepSettings, take_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
FAMILY = FAMILIES["llama3"]
SIZES = Llama3Sizes(dim=256, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=512, vocab_size=1024)
BATCH, LENGTH = 4, 512
DOCUMENT_END = 0  # token id


@pytest.fixture
def one_rank():
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


def build_training(device, transforms: ModelTransforms, steps: int):
    """(a function that takes `steps` steps of a small job, the list of its losses)."""
    section = ParallelismConfig(data_parallel_shard_degree=1)
    mesh = build_mesh(Degrees(), "cuda")
    plan, problems = plan_pipeline(section, FAMILY, SIZES, LENGTH, BATCH)
    assert plan is not None, problems
    layout = ParallelLayout(mesh, section, plan)
    modules = build_parallel_modules(FAMILY, SIZES, layout, transforms)
    sharded = modules.materialize(device, seed=0)
    engine = build_engine(
        sharded, layout, device, local_batch=BATCH // 2, document_end_id=DOCUMENT_END
    )
    optimizer = build_optimizer(sharded.model, OptimizerConfig.of(lr=1e-3))
    judge = StepJudge(GuardConfig(spike="skip"), device)
    state = TrainState(sharded.model, optimizer)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZES.vocab_size, (BATCH, LENGTH + 1), generator=generator)
    settings = StepSettings(mesh, clip_norm=1.0, judge=judge.judge)
    losses, pending = [], PendingSteps()

    def train() -> None:
        for _ in range(steps):
            ids[:, 30 + 40 * state.step] = DOCUMENT_END  # another number of documents in each step
            batch = engine.prepare(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
            batch = batch.pin_memory().to(device)
            before = state.host_state()
            result = take_step(state, engine, batch, settings=settings)
            pending.add(state.step, before, result)
            assert not pending.poll()
            losses.append(result.loss)

    return train, losses


def transforms_of(name: str) -> ModelTransforms:
    recompute = ActivationCheckpointConfig(mode="none")
    if name == "offload":
        recompute = ActivationCheckpointConfig(mode="full", offload=True)
    if name == "op":
        recompute = ActivationCheckpointConfig(selective_ac_option="op")
    return ModelTransforms(
        activation_checkpoint=recompute,
        compile=CompileConfig("compile" in name),
        compute_dtype=torch.bfloat16,
        document_mask="documents" in name,
    )


NAMES = ["eager", "compile", "op", "offload", "documents", "documents, compile"]


@pytest.mark.parametrize("name", NAMES)
def test_no_step_waits_for_the_device(one_rank, name):
    train, _ = build_training(one_rank, transforms_of(name), steps=3)
    train()  # loads kernels, allocates buffers, plans
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert not waits, waits


@pytest.mark.parametrize("name", ["compile", "documents, compile"])
def test_later_steps_do_not_recompile(one_rank, name):
    train, _ = build_training(one_rank, transforms_of(name), steps=2)
    train()
    with torch.compiler.set_stance("fail_on_recompile"):
        train()


@pytest.mark.parametrize("name", ["compile", "op", "offload"])
def test_every_transform_trains_like_the_plain_model(one_rank, name):
    curves = []
    for each in ("eager", name):
        train, losses = build_training(one_rank, transforms_of(each), steps=5)
        train()
        curves.append(torch.stack(losses).tolist())
    assert curves[1] == pytest.approx(curves[0], rel=2e-3)


def test_offloaded_activations_are_not_on_the_device(one_rank):
    def activation_bytes(offload: bool) -> int:
        section = ParallelismConfig(data_parallel_shard_degree=1)
        mesh = build_mesh(Degrees(), "cuda")
        plan, problems = plan_pipeline(section, FAMILY, SIZES, LENGTH, BATCH)
        assert plan is not None, problems
        recompute = ActivationCheckpointConfig(mode="none", offload=offload)
        transforms = ModelTransforms(activation_checkpoint=recompute, compute_dtype=torch.bfloat16)
        layout = ParallelLayout(mesh, section, plan)
        modules = build_parallel_modules(FAMILY, SIZES, layout, transforms)
        model = modules.materialize(one_rank, seed=0).model
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=one_rank)
        before = torch.cuda.memory_allocated()
        loss = model(ids, labels=ids)
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        loss.backward()
        return after - before

    assert activation_bytes(offload=True) < 0.7 * activation_bytes(
        offload=False
    )  # two of eight blocks, and small tensors
