"""Runs with adapters: what their checkpoints have, resuming, what is not computed, bad input."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.oracle import Layout, batch_at, build_sharded
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_oracle import RECIPES
from tests.faults.launch import LaunchedRun, lines_of
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.errors import UserError
from titanlite.job import read_job
from titanlite.parallelize.lora import CODEBOOKS, ROW_BYTES, pack, unpack
from titanlite.storage import StorageFolder


def settings(**values) -> list[str]:
    """Settings on a command line; "__" stands for the dot of a key."""
    return [
        text
        for key, value in values.items()
        for text in (f"--{key.replace('__', '.')}", str(value))
    ]


def train(ranks: int, out: Path, *argv: str) -> str:
    """Train, and return the log."""
    with LaunchedRun(ranks, out, *argv, "--job.dump_folder", str(out)) as run:
        assert run.wait() == [0] * ranks, run.output
        return run.output


@pytest.fixture
def base(tmp_path, run_toml) -> str:
    return save_base(tmp_path / "base", run_toml)


def save_base(folder: Path, run_toml: Path, **changes) -> str:
    """Train all weights for a step; returns the checkpoint."""
    argv = settings(training__steps=1, validation__enable="false", **changes)
    train(1, folder, "--job.config_file", str(run_toml), *argv)
    return str(folder / "checkpoint/step-1")


def adapters(run_toml: Path, base: str, **changes) -> list[str]:
    """The command line of a run with adapters."""
    values = {
        "lora__rank": 4,
        "lora__targets": '["*"]',
        "checkpoint__initial_load_path": base,
        "validation__enable": "false",
        **changes,
    }
    return ["--job.config_file", str(run_toml), *settings(**values)]


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; of a step that was repeated, the last one."""
    return {line["step"]: line["loss"] for line in lines_of(folder) if "loss" in line}


def tensors_of(step: Path) -> dict[str, str]:
    return {n: t.hash for n, t in read_checkpoint_manifest(StorageFolder(step)).tensors.items()}


def test_a_killed_run_resumes_under_another_layout_and_a_changed_base_is_refused(
    tmp_path, run_toml, base
):
    argv = adapters(run_toml, base)
    train(1, tmp_path / "whole", *argv)
    killed = tmp_path / "killed"
    with LaunchedRun(1, killed, *argv, "--job.dump_folder", str(killed)) as run:
        run.wait_for(lambda: (killed / "checkpoint/step-3/manifest.json").exists())
        run.signal(0, signal.SIGKILL)
        run.wait()
    train(2, killed, *argv, *settings(parallelism__tensor_parallel_degree=2))
    assert losses(killed) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    saved = tensors_of(killed / "checkpoint/step-6")
    assert saved and all("lora_" in name for name in saved)
    other = save_base(tmp_path / "other", run_toml, debug__seed=3)
    changed = [*adapters(run_toml, other, training__steps=8), "--job.dump_folder", str(killed)]
    with LaunchedRun(1, killed, *changed) as run:
        assert run.wait() == [2], run.output
        assert "differs from this job: base_weights" in run.output


def test_a_quantised_base_is_read_under_every_layout(tmp_path, run_toml):
    sizes = {"model__dim": 64, "model__hidden_dim": 128}
    base = save_base(tmp_path / "base", run_toml, **sizes)
    argv = adapters(run_toml, base, training__steps=3, lora__base_dtype="nf4", **sizes)
    train(1, tmp_path / "one", *argv)
    train(2, tmp_path / "two", *argv)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    plain = adapters(run_toml, base, training__steps=3, lora__base_dtype="bfloat16", **sizes)
    train(1, tmp_path / "plain", *plain)
    assert losses(tmp_path / "plain") != pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize(("name", "largest"), [("nf4", 0.16), ("int4", 0.08), ("float8", 0.04)])
def test_a_quantised_weight_has_the_nearest_codes(name, largest):
    """`largest`: half of the largest distance of codes, in units of the largest weight of 64."""
    weight = torch.randn(8, 192, generator=torch.Generator().manual_seed(0))
    weight[0, :64] = 0.0
    packed = pack(weight, name)
    rounded = unpack(packed, name, torch.float32)
    assert packed.dtype == torch.uint8 and packed.shape == (8, 3 * ROW_BYTES[name])
    scale = weight.unflatten(1, (3, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(1)
    assert ((rounded - weight).abs() <= largest * scale).all()
    if name in CODEBOOKS:
        book = torch.tensor(CODEBOOKS[name])
        nearest = (weight.unsqueeze(-1) - book * scale.unsqueeze(-1)).abs().amin(-1)
        torch.testing.assert_close((rounded - weight).abs(), nearest)
    assert torch.equal(unpack(pack(rounded, name), name, torch.float32), rounded)


class MatmulShapes(TorchDispatchMode):
    """Records the shapes of the results of all matmuls."""

    def __init__(self):
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "mm" in str(func):
            self.seen.add(tuple(out.shape))
        return out


def shapes_of_gradients(layout: Layout) -> list[str]:
    """The frozen weights for which a step computes a gradient."""
    model, _, engine = build_sharded(layout, RECIPES["adapters"])
    frozen = {tuple(p.shape): name for name, p in model.named_parameters() if not p.requires_grad}
    with MatmulShapes() as matmuls:
        batch = engine.prepare(*batch_at(0, RECIPES["adapters"]))
        engine.forward_backward(batch, torch.tensor(1.0))
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    return [frozen[shape] for shape in matmuls.seen & frozen.keys()]


def test_no_gradient_of_a_frozen_weight_is_computed():
    assert run_on_ranks(shapes_of_gradients, 1, Layout()) == [[]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora__rank": 0}, "lora.rank = 0: no adapters, but other keys"),
        ({"lora__targets": '["layers.*.wx"]'}, '"layers.*.wx" matches no linear layer'),
        ({"lora__targets": "[]"}, "matches no linear layer"),
        ({"lora__targets": '["output"]'}, "layers.*.feed_forward.w2"),
        ({"lora__base_dtype": "int3"}, "lora.base_dtype"),
        ({"checkpoint__initial_load_path": "none"}, "the frozen weights would be random"),
        ({"checkpoint__last_save_in_hf": "true"}, "checkpoints have only the adapters"),
        ({"optimizer__name": "Muon", "optimizer__muon_per_head": "true"}, "muon_per_head has no"),
        ({"quantize__linear__float8__recipe_name": "rowwise"}, "recipe_name has no rule"),
        ({"lora__base_dtype": "nf4"}, "a rank has 32 columns of layers.0.attention.wq"),
        (
            {"lora__targets": '["layers.0.*"]', "parallelism__pipeline_parallel_degree": 2},
            "no layer of pipeline stage 1",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_its_key(run_toml, changes, message):
    with pytest.raises(UserError) as error:
        read_job(adapters(run_toml, "anywhere", **changes), 2)
    assert message in str(error.value)


def test_groups_of_parameters_are_those_of_adapters(run_toml):
    group = '[{match = ["*.lora_b"], lr_factor = 16}]'
    read_job(adapters(run_toml, "anywhere", optimizer__groups=group), 1)
    with pytest.raises(UserError, match="matches no parameter"):
        group = group.replace("lora_b", "wq.weight")
        read_job(adapters(run_toml, "anywhere", optimizer__groups=group), 1)
