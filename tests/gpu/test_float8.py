"""Float8 on the units that it is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed.mesh import Degrees, ParallelismConfig, build_mesh
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.parallelize import ModelTransforms, build_sharded_model
from titanlite.parallelize.float8 import Float8Config, float8_device_problems
from titanlite.parallelize.pipeline import plan_pipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CUDA = torch.device("cuda", 0)
SHAPE = Llama3Sizes(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=512, vocab_size=1024)
TENSORWISE = Float8Config(recipe_name="tensorwise")
GATHERED = replace(
    TENSORWISE,
    enable_fsdp_float8_all_gather=True,
    precompute_float8_dynamic_scale_for_fsdp=True,
)


def has_units() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(CUDA) >= (8, 9)


def test_a_gpu_without_units_is_refused_and_one_with_them_is_not():
    problems = list(float8_device_problems(TENSORWISE, CUDA))
    assert bool(problems) != has_units()
    assert not list(float8_device_problems(replace(TENSORWISE, emulate=True), CUDA))


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=CUDA
    )
    yield
    dist.destroy_process_group()


def step(float8: Float8Config) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) of one batch in bfloat16."""
    spec, section, mesh = FAMILIES["llama3"], ParallelismConfig(), build_mesh(Degrees(), "cuda")
    plan, problems = plan_pipeline(section, spec, SHAPE, 128, 4)
    assert plan is not None, problems
    transforms = ModelTransforms(float8=float8, compute=torch.bfloat16)
    held = build_sharded_model(spec, SHAPE, mesh, section, plan, transforms, CUDA, seed=0)
    held.rescale()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPE.vocab_size, (4, 129), generator=generator).to(CUDA)
    loss = held.model(ids[:, :-1], labels=ids[:, 1:]) / ids[:, 1:].numel()
    loss.backward()
    gradients = {n: p.grad.full_tensor().float() for n, p in held.model.named_parameters()}
    return loss.item(), gradients


@pytest.mark.skipif(not has_units(), reason="needs Float8 units")
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
def test_the_units_compute_what_emulation_says(float8, alone):
    """They add the same products in another order; bfloat16 without Float8 is farther away."""
    loss, found = step(float8)
    emulated_loss, right = step(replace(float8, emulate=True))
    plain_loss, plain = step(Float8Config())
    assert loss == pytest.approx(emulated_loss, rel=2e-3) and loss != plain_loss

    def far(from_: dict[str, torch.Tensor], name: str) -> float:
        return ((found[name] - from_[name]).norm() / from_[name].norm()).item()

    names = [name for name in found if "feed_forward" in name]
    assert sum(far(right, n) for n in names) < sum(far(plain, n) for n in names)
    assert all(far(right, n) < 0.25 for n in names)
