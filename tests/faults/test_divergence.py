"""An inf or NaN in any weight or gradient ends the run with exit code 3, and is never saved."""

from __future__ import annotations

import json
import math
import os
from functools import partial

import pytest

from tests.faults.launch import LaunchedRun, events_of, steps_of
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.storage import StorageFolder

BAD_STEP = 5
CASES = {
    "one element of a gradient": ("layers.1.feed_forward.w2.weight", "gradient", ()),
    "an unused row, without clipping": (
        "tok_embeddings.weight", "gradient", ("--training.max_norm", "0"),
    ),
    "optimizer steps in backward": (
        "norm.weight", "gradient",
        ("--optimizer.early_step_in_backward", "true", "--training.max_norm", "0"),
    ),
    "a weight that does not affect the loss": ("tok_embeddings.weight", "weight", ()),
    "float16 at the lowest loss scale": (
        "output.weight", "gradient",
        ("--training.mixed_precision_param", "float16", "--loss_scale.initial", "1"),
    ),
}  # fmt: skip


def inject_inf(name: str, kind: str) -> None:
    """Write an inf into the last row of one tensor, on rank 1 only, in step `BAD_STEP`."""
    from titanlite.job import build as builders

    build, calls = builders.build_sharded_model, [0]

    def write_inf(parameter) -> None:
        calls[0] += 1  # once a step: one micro-batch
        if calls[0] == BAD_STEP and os.environ["RANK"] == "1":
            tensor = parameter if kind == "weight" else parameter.grad
            tensor.detach().to_local().flatten()[-1] = math.inf

    def build_and_register_hook(*args, **options):
        sharded = build(*args, **options)
        dict(sharded.model.named_parameters())[name].register_post_accumulate_grad_hook(write_inf)
        return sharded

    builders.build_sharded_model = build_and_register_hook


@pytest.mark.parametrize("case", CASES)
def test_an_inf_on_one_rank_ends_the_run_and_is_never_saved(case, run_toml, tmp_path):
    name, kind, argv = CASES[case]
    out = tmp_path / "out"
    argv = (
        "--job.config_file", str(run_toml), "--training.local_batch_size", "4",
        "--model.vocab_size", "260",  # two more than the tokenizer has: the last row is never used
        "--training.steps", "8", "--metrics.log_freq", "3", "--validation.enable", "false",
        "--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "2",
        "--checkpoint.async_mode", "async", *argv,
    )  # fmt: skip
    with LaunchedRun(2, out, *argv, prepare=partial(inject_inf, name, kind)) as run:
        assert run.wait() == [3, 3], run.output
    step = BAD_STEP if kind == "gradient" else BAD_STEP + 1  # weights are checked before a save
    (event,) = events_of(out, "diverged")
    reported = (event["step"], event["rank"], event["parameter"], event["kind"])
    assert reported == (step, 1, name, kind), run.output
    assert run.output.count("titanlite: training diverged") == 1 and "Traceback" not in run.output
    assert f"at step {step}:" in run.output and f"{kind} of {name} on rank 1" in run.output
    saved = [folder.name for folder in (out / "checkpoint").glob("step-*")]
    assert sorted(saved) == ["step-2", "step-4"]
    assert json.loads((out / "starts.jsonl").read_text().splitlines()[-1])["code"] == 3
    assert BAD_STEP not in steps_of(out) and all(line < 8 for line in steps_of(out))
    if case != next(iter(CASES)):
        return
    with LaunchedRun(2, out, *argv) as resumed:  # the same command, without the inf
        assert resumed.wait() == [0, 0], resumed.output
    assert [e["step"] for e in events_of(out, "resumed")] == [4]
    assert read_checkpoint_manifest(StorageFolder(out / "checkpoint" / "step-8")).step == 8
