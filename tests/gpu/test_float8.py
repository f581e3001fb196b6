"""Float8 on hardware that supports it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed.collectives import local_shard
from titanlite.distributed.mesh import Degrees, ParallelismConfig, build_mesh
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.parallelize import ModelTransforms, ParallelLayout, build_parallel_modules
from titanlite.parallelize.float8 import Float8Config, check_float8_device, find_gpu
from titanlite.parallelize.pipeline_plan import plan_pipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CUDA = torch.device("cuda", 0)
SIZES = Llama3Sizes(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=512, vocab_size=1024)
TENSORWISE = Float8Config(recipe_name="tensorwise")
GATHERED = replace(
    TENSORWISE,
    enable_fsdp_float8_all_gather=True,
    precompute_float8_dynamic_scale_for_fsdp=True,
)


def has_float8_hardware() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) >= (8, 9)


def test_a_gpu_without_float8_is_refused_and_one_with_it_is_accepted():
    gpu = find_gpu(CUDA)
    errors = list(check_float8_device(TENSORWISE, gpu, compiles_blocks=True))
    assert bool(errors) != has_float8_hardware()
    emulated = replace(TENSORWISE, emulate=True)
    assert not list(check_float8_device(emulated, gpu, compiles_blocks=False))


@pytest.fixture
def single_process_group():
    """A process group of one rank."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA
    )
    yield
    dist.destroy_process_group()


def run_step(float8: Float8Config) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of one batch in bfloat16."""
    spec, section, mesh = FAMILIES["llama3"], ParallelismConfig(), build_mesh(Degrees(), "cuda")
    plan, problems = plan_pipeline(section, spec, SIZES, 128, 4)
    assert plan is not None, problems
    transforms = ModelTransforms(float8=float8, compute_dtype=torch.bfloat16)
    layout = ParallelLayout(mesh, section, plan)
    modules = build_parallel_modules(spec, SIZES, layout, transforms)
    sharded = modules.materialize(CUDA, seed=0)
    sharded.update_float8_scales()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZES.vocab_size, (4, 129), generator=generator).to(CUDA)
    loss = sharded.model(ids[:, :-1], labels=ids[:, 1:]) / ids[:, 1:].numel()
    loss.backward()
    gradients = {
        name: local_shard(parameter.grad).float()
        for name, parameter in sharded.model.named_parameters()
        if parameter.grad is not None
    }
    return loss.item(), gradients


@pytest.mark.skipif(not has_float8_hardware(), reason="needs Float8 hardware")
@pytest.mark.parametrize(
    "float8",
    [
        TENSORWISE,
        GATHERED,
        Float8Config(recipe_name="rowwise"),
        Float8Config(recipe_name="rowwise_with_gw_hp"),
    ],
    ids=str,
)
def test_the_hardware_computes_what_emulation_computes(float8, single_process_group):
    """They add in another order, which is a smaller difference than bf16 without Float8."""
    loss, gradients = run_step(float8)
    emulated_loss, emulated = run_step(replace(float8, emulate=True))
    bf16_loss, bf16 = run_step(Float8Config())
    assert loss == pytest.approx(emulated_loss, rel=2e-3) and loss != bf16_loss

    def relative_difference(expected: dict[str, torch.Tensor], name: str) -> float:
        return ((gradients[name] - expected[name]).norm() / expected[name].norm()).item()

    names = [name for name in gradients if "feed_forward" in name]
    from_emulated = [relative_difference(emulated, name) for name in names]
    assert sum(from_emulated) < sum(relative_difference(bf16, name) for name in names)
    assert max(from_emulated) < 0.25
