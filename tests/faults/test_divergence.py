"""inf or NaN in any weight or gradient is skipped or ends the run with 3, and is never saved."""

from __future__ import annotations

import json
import math
import os
from functools import partial

import pytest

from tests.faults.launch import LaunchedRun, events_of, steps_of
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.distributed.collectives import local_shard
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


def inject_inf(name: str, kind: str, only: tuple[int, ...] = ()) -> None:
    """Write an inf into the last row of one tensor, on rank 1 only, from step `BAD_STEP` on.

    `only`: in these backward passes instead, counted from 1.
    """
    from titanlite.job import build as builders

    build, calls = builders.build_model, [0]

    def write_inf(parameter) -> None:
        calls[0] += 1  # once a step: one micro-batch
        is_bad = calls[0] in only if only else calls[0] >= BAD_STEP
        if is_bad and os.environ["RANK"] == "1":
            tensor = parameter if kind == "weight" else parameter.grad
            local_shard(tensor.detach()).flatten()[-1] = math.inf

    def build_and_register_hook(*args, **options):
        sharded = build(*args, **options)
        dict(sharded.model.named_parameters())[name].register_post_accumulate_grad_hook(write_inf)
        return sharded

    builders.build_model = build_and_register_hook


@pytest.mark.parametrize("case", CASES)
def test_an_inf_on_one_rank_ends_the_run_and_is_never_saved(case, run_toml, tmp_path):
    name, kind, argv = CASES[case]
    out = tmp_path / "out"
    argv = (
        "--job.config_file", str(run_toml), "--training.local_batch_size", "4",
        "--model.vocab_size", "260",  # two more than the tokenizer has: the last row is never used
        "--training.steps", "8", "--metrics.log_freq", "3", "--validation.enable", "false",
        "--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "2",
        "--checkpoint.async_mode", "async", "--guard.max_violations", "1", *argv,
    )  # fmt: skip
    with LaunchedRun(2, out, *argv, prepare=partial(inject_inf, name, kind)) as run:
        assert run.wait() == [3, 3], run.output
    step = BAD_STEP if kind == "gradient" else BAD_STEP + 1  # weights are checked before a save
    (event,) = events_of(out, "diverged")
    reported = (event["step"], event["rank"], event["parameter"], event["kind"])
    assert reported == (step, 1, name, kind), run.output
    assert "resumes from step-4" in run.output
    assert (event["batch"] != "") == (out / "guard" / f"step-{step}.json").exists()
    assert bool(event["batch"]) == (kind == "gradient")
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


def test_a_bad_batch_is_skipped_once_and_written_with_its_text(run_toml, tmp_path):
    out = tmp_path / "out"
    argv = (
        "--job.config_file", str(run_toml), "--training.steps", "8", "--metrics.log_freq", "3",
        "--validation.enable", "false", "--checkpoint.interval", "8",
    )  # fmt: skip
    # The host learns of step 5 after it has started step 6; then step 5 is replayed.
    passes = (BAD_STEP, BAD_STEP + 2)
    prepare = partial(inject_inf, "layers.1.feed_forward.w2.weight", "gradient", passes)
    with LaunchedRun(2, out, *argv, "--training.local_batch_size", "4", prepare=prepare) as run:
        assert run.wait() == [0, 0], run.output
    (event,) = events_of(out, "step_skipped")
    named = (event["step"], event["rank"], event["parameter"], event["loss"] is not None)
    assert named == (BAD_STEP, 1, "layers.1.feed_forward.w2.weight", True)
    batch = json.loads((out / "guard" / f"step-{BAD_STEP}.json").read_text())
    assert event["batch"] == str(out / "guard" / f"step-{BAD_STEP}.json")
    assert [sample["position"] for sample in batch["samples"]] == list(range(32, 40))
    assert {sample["source"] for sample in batch["samples"]} == {"code"}
    assert all(len(sample["tokens"]) == 49 and sample["text"] for sample in batch["samples"])
    assert steps_of(out) == [1, 3, 6, 8]
    progress = read_checkpoint_manifest(StorageFolder(out / "checkpoint" / "step-8")).progress
    assert (progress["step"], progress["position"]) == (8, 64)
    assert progress["guard"]["history"]["last_step"] == BAD_STEP
