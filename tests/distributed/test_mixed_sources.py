"""A run on a mixture whose weights change reads the same samples under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import ROOT
from tests.distributed.test_train import losses_of, run_ranks
from tests.faults.launch import LaunchedRun, lines_of

STEPS, BATCH, SEQ_LEN = 6, 8, 48
# from position 10 in step 2 to position 20 in step 3
FIRST = "{ first_token = 480, weights = { code = 0.2, optim = 0.8 }, ramp_tokens = 480 }"
SECOND = "{ first_token = 1200, weights = { optim = 0.0 } }"  # position 25, in step 4


def options(corpus: Path, *phases: str) -> list[str]:
    sources = (
        f'[{{ name = "code", path = "{corpus}/train", weight = 0.7 }},'
        f' {{ name = "optim", path = "{corpus}/validation", weight = 0.3, max_epochs = 2.0 }}]'
    )
    argv = ["--data.sources", sources, "--data.mixture.phases", f"[{', '.join(phases)}]"]
    argv += ["--lr_scheduler.total_steps", "6", "--metrics.source_loss_freq", "1"]
    return [*argv, "--validation.enable", "false"]


def source_losses(folder: Path) -> dict[int, dict]:
    return {line["step"]: line for line in lines_of(folder) if line.get("event") == "source_losses"}


def test_weights_changed_on_resuming_under_another_layout_give_the_same_run(
    run_toml, corpus, tmp_path
):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    known = options(corpus, FIRST, SECOND)
    run_ranks(1, whole, run_toml, "--job.dump_folder", str(whole), *known)
    to = ("--job.dump_folder", str(resumed))
    run_ranks(2, resumed, run_toml, *to, *options(corpus, FIRST), "--training.steps", "3")
    tensor = ("--parallelism.tensor_parallel_degree", "2")
    run_ranks(2, resumed, run_toml, *to, *known, *tensor)

    assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-5)
    expected, found = source_losses(whole), source_losses(resumed)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, line in expected.items():
        assert found[step]["tokens"] == line["tokens"] and found[step]["epochs"] == line["epochs"]
        assert sum(line["tokens"].values()) == step * BATCH * SEQ_LEN
        for name, loss in line["loss"].items():  # None: the source is not in this batch
            assert found[step]["loss"][name] == (loss and pytest.approx(loss, rel=1e-5))
    last, before = expected[6]["tokens"], expected[5]["tokens"]
    assert last["optim"] == before["optim"] and last["code"] - before["code"] == BATCH * SEQ_LEN

    with LaunchedRun(1, resumed, "--job.config_file", str(run_toml), *to, *options(corpus)) as run:
        assert run.wait() == [2]
    assert "data.phases (10: {" in run.output and "} saved, None now" in run.output
    assert "first_token = 2304" in run.output and "Traceback" not in run.output


def validations(folder: Path) -> dict[int, dict]:
    return {line["step"]: line for line in lines_of(folder) if line.get("event") == "validation"}


def write_texts(folder: Path) -> None:
    """The package's own files, as documents in .jsonl files of about 120 KB."""
    folder.mkdir()
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "titanlite").rglob("*.py"))]
    for number in range(8):
        lines = (json.dumps({"text": text}) for text in texts[number::8])
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n")


def test_streamed_text_stopped_at_2_ranks_goes_on_at_3_and_1_as_in_one_process(run_toml, tmp_path):
    write_texts(tmp_path / "texts")
    sources = f'[{{ name = "docs", path = "{tmp_path}/texts/*.jsonl", format = "text" }}]'
    (tmp_path / "held.txt").write_text("A validation set of one document. " * 40)
    held_out = f'[{{ name = "held", path = "{tmp_path}/held.txt", format = "text" }}]'
    argv = ["--data.sources", sources, "--data.validation", held_out, "--validation.freq", "2"]
    argv += ["--lr_scheduler.total_steps", "6", "--training.local_batch_size", "1"]
    argv += ["--elastic.enable", "true"]  # 3 ranks do not divide the batch
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_ranks(1, whole, run_toml, "--job.dump_folder", str(whole), *argv)
    for ranks, steps in ((2, 2), (3, 4), (1, 6)):
        to = ("--job.dump_folder", str(resumed), "--training.steps", str(steps))
        run_ranks(ranks, resumed, run_toml, *to, *argv)
    assert losses_of(resumed) == pytest.approx(losses_of(whole), rel=1e-5)
    for step, line in (expected := validations(whole)).items():
        assert validations(resumed)[step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert list(expected) == list(validations(resumed)) == [2, 4, 6]
    manifest = json.loads((resumed / "checkpoint/step-4/manifest.json").read_text())
    lanes = manifest["progress"]["lanes"]["docs"]
    assert sorted(index for index, _ in lanes.values()) == [2] * 16  # of 32 samples


def test_a_run_that_needs_more_epochs_than_allowed_is_refused_before_it_starts(
    run_toml, corpus, tmp_path
):
    sources = f'[{{ name = "code", path = "{corpus}/validation", max_epochs = 0.001 }}]'
    argv = ("--job.config_file", str(run_toml), "--data.sources", sources, "--job.check", "true")
    with LaunchedRun(1, tmp_path / "out", *argv) as run:
        assert run.wait() == [2]
    assert "the run needs 48 samples" in run.output and "Traceback" not in run.output
