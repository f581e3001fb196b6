"""A wrong request to the planner is refused with all problems; a right one keeps what is set."""

from __future__ import annotations

import math

import pytest

from titanlite.errors import UserError, format_error
from titanlite_planner.plan.request import PlanArguments, read_plan_request

GOOD = {"model": "llama3/70B", "gpus": "64xH100", "seq_len": "8192", "global_batch": "256"}


def read(**changes):
    return read_plan_request(PlanArguments(**{**GOOD, **changes}))


def test_all_problems_are_reported_together():
    with pytest.raises(UserError) as refused:
        read(
            model="llama3/71B",
            gpus="64 H100",
            global_batch="-3",
            tokens="many",
            precision="fp8",
            reserve="100",
            fix=["tensor=x", "width=3", "recompute=some"],
        )
    text = format_error(refused.value)
    assert text.startswith("titanlite: 9 problems")
    for part in ("llama3/70B", '"64 H100"', "--global-batch -3", "--tokens many"):
        assert part in text
    for part in ("--precision fp8", "--reserve 100", "--fix tensor x", "width=3", "recompute=some"):
        assert part in text


@pytest.mark.parametrize("missing", GOOD)
def test_what_is_missing_is_named(missing):
    option = f"--{missing.replace('_', '-')}"
    with pytest.raises(UserError, match=option):
        read(**{missing: None})


def test_a_searched_setting_is_fixed_with_fix():
    key = "parallelism.tensor_parallel_degree"
    with pytest.raises(UserError, match=rf"{key}: is chosen.* Use --fix tensor=VALUE"):
        read(overrides=[f"--{key}", "8"])
    assert read(fix=["tensor=8", "reshard=yes"]).space.fixed == {"tensor": 8, "reshard": True}


@pytest.mark.parametrize(
    ("key", "option"),
    [("training.seq_len", "--seq-len"), ("training.global_batch_size", "--global-batch")],
)
def test_a_setting_that_an_option_sets_is_refused(key, option):
    with pytest.raises(UserError, match=rf"{key}: {option} sets it, too. Give one of the two"):
        read(overrides=[f"--{key}=64"])


@pytest.mark.parametrize("value", ["0.0", "-0.5", "1.5", "nan", '"many"'])
def test_an_efficiency_that_no_gpu_has_is_refused(value, tmp_path):
    names = ("attention", "memory", "link", "network", "float8", "float4")
    lines = [*(f"{name} = 0.5" for name in names), f"matmul = {value}"]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    with pytest.raises(UserError, match="is not a set of efficiencies"):
        read(efficiency=str(tmp_path / "own.toml"))


def test_a_character_that_is_no_digit_is_no_number():
    with pytest.raises(UserError, match="--seq-len ²: must be a positive integer"):
        read(seq_len="²")


def test_a_job_keeps_its_settings(run_toml):
    request = read(
        model=None, job=str(run_toml), seq_len=None, tokens="1e9", overrides=["--optimizer.lr=0.25"]
    )
    base = request.base
    assert base.optimizer.lr == 0.25
    assert base.model.n_layers == request.space.sizes.n_layers
    assert request.space.seq_len == base.training.seq_len
    assert base.training.steps == math.ceil(1e9 / (256 * base.training.seq_len))


def test_a_model_has_the_settings_of_its_own_toml():
    request = read()
    assert request.base.model.flavor == "70B"
    assert request.base.optimizer.lr == 1.5e-4  # llama3_70b.toml
    assert request.base.compile.enable
    assert request.base.validation.seq_len == 8192
    assert request.tokens == pytest.approx(20 * 70.55e9, rel=1e-3)  # without --tokens
    assert request.base.training.steps == math.ceil(request.tokens / request.tokens_per_step)
    assert request.usable_bytes == pytest.approx(0.9 * request.cluster.gpu.memory_gib * 2**30)
