"""Looking into the checkpoints of a run by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import checkpoint
from tests.checkpoint.test_checkpointer import DAMAGE, save_two
from tests.conftest import ROOT
from tests.distributed.ranks import run_on_ranks


@pytest.fixture
def script(capsys):
    """Runs the script here; (exit code, what it wrote, what it complained of)."""

    def call(*argv) -> tuple[int, str, str]:
        code = checkpoint.main([str(word) for word in argv])
        return code, *capsys.readouterr()

    return call


def test_the_script_starts():
    command = [sys.executable, str(ROOT / "scripts" / "checkpoint.py"), "--help"]
    assert "verify" in subprocess.run(command, capture_output=True, text=True).stdout


def test_a_person_sees_what_is_there_and_what_is_wrong_with_it(tmp_path, script):
    run_on_ranks(save_two, 2, str(tmp_path / "checkpoint"))
    DAMAGE["a flipped bit"](tmp_path / "checkpoint" / "step-2")
    code, listed, _ = script("ls", tmp_path)
    first, second = listed.splitlines()
    assert code == 0 and first.startswith("step-1") and second.startswith("step-2")
    assert "position 100" in first and "weights, moments" in first and "position 200" in second

    code, verified, _ = script("verify", tmp_path)
    assert code == 2 and verified.count("all true") == 1
    assert "step-2: is damaged: " in verified and "its hash differs" in verified

    code, shown, _ = script("show", tmp_path / "checkpoint" / "step-1")
    assert code == 0 and "model.tok_embeddings.weight [509 x 32]" in shown

    (tmp_path / "checkpoint" / "step-2").rename(tmp_path / "checkpoint" / "step-2.aside-1")
    (tmp_path / "checkpoint" / "step-1-hf").mkdir()  # an export is no checkpoint
    assert "step-2.aside-1" in script("ls", tmp_path)[1]
    code, verified, _ = script("verify", tmp_path)
    assert code == 0 and verified.count("\n") == 1, "only what a run would go on from"
    assert script("rm", tmp_path / "checkpoint" / "step-2.aside-1")[0] == 0
    assert script("ls", tmp_path)[1].splitlines() == [first]
    for wrong in (
        ("rm", tmp_path),
        ("ls", tmp_path / "nowhere"),
        ("show", tmp_path),
        ("ls", "nosuch://bucket"),
    ):
        code, _, complaint = script(*wrong)
        assert code == 2 and complaint.startswith("titanlite: "), wrong
    assert (tmp_path / "checkpoint" / "step-1" / "manifest.json").exists()
