"""scripts/plan.py: its TOML passes train.py's check, its pictures exist, mistakes exit with 2."""

from __future__ import annotations

import json

import pytest

import train
from conftest import ROOT
from titanlite_planner.commands.plan import main as plan


def test_the_planned_toml_passes_the_check_of_train_py(run_toml, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan"
    given = ["--job", str(run_toml), "--gpus", "8xH100", "--tokens", "1e6", "--out", str(out)]
    assert plan([*given, "--fix", "pipeline=2", "--fix", "tensor=2", "--quick"]) == 0
    text = capsys.readouterr().out
    assert "PP 2 x" in text and "GPU-hours" in text
    assert "recommended: the simplest within 3% of the fastest" in text
    assert "assumed: eager; FlashAttention-2; links in a domain of 8 GPUs 450 GB/s" in text
    assert (
        "$6.16 each (2026-02, CoreWeave" in text
        and "no published run of dense fp32 on H100" in text
    )
    names = {"run.toml", "plan.json", "memory.png", "time.png", "memory_time.png"}
    assert {path.name for path in out.iterdir()} == names | {"layout.png", "layout.svg"}
    best = json.loads((out / "plan.json").read_text())[0]
    assert best["degrees"]["pipeline"] == best["degrees"]["tensor"] == 2
    written = (out / "run.toml").read_text()
    assert f"--job.config_file {out / 'run.toml'} " in written and "local_batch_size = " in written
    assert "lanes" not in written  # of the sources: a default
    argv = ["--job.config_file", str(out / "run.toml"), "--job.check", "true"]
    assert train.main([*argv, "--job.check_ranks", "8"]) == 0
    assert train.main([*argv, "--job.check_ranks", "6"]) == 2  # it is checked for its GPUs


def test_an_unaligned_vocabulary_is_reported(capsys):
    given = ["--model", "llama3/debugmodel", "--gpus", "2xH100", "--seq-len", "64"]
    given += ["--global-batch", "4", "--quick"]
    for size, reported in ((2052, True), (2056, False)):
        assert plan([*given, "--model.vocab_size", str(size)]) == 0
        text = capsys.readouterr().out
        assert ("2056 is fast" in text) == reported
        assert "warning: 256 tokens a step are 128 for each GPU" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8xH100", "--model", "llama3/8B"], "--seq-len: is missing"),
        (["--table"], "--table: needs the measured runs"),
        (["--rows", "no.csv"], '"no.csv" cannot be read'),
        (["--rows", "x.csv", "--quick", "--gpus", "8xH100"], "2 problems"),
        (["--calibrate", "run"], "--gpus: is missing"),
    ],
)
def test_a_mistake_exits_with_2(arguments, message, capsys):
    assert plan(arguments) == 2
    assert message in capsys.readouterr().err


def test_rows_are_predicted(tmp_path, capsys):
    rows = ROOT / "benchmarks" / "published_runs.csv"
    head = tmp_path / "rows.csv"
    head.write_text("".join(rows.read_text("utf-8").splitlines(keepends=True)[:6]), "utf-8")
    assert plan(["--rows", str(head), "--out", str(tmp_path / "predictions.csv")]) == 0
    written = (tmp_path / "predictions.csv").read_text("utf-8").splitlines()
    assert written[0] == "id,step_s,rest_gib,peak_gib,fits,note" and len(written) == 6
