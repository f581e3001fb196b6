"""scripts/checkpoint.py: list, verify, show and remove checkpoints by hand."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from conftest import ROOT
from tests.checkpoint.test_checkpointer import DAMAGE, save_two_steps
from tests.distributed.ranks import run_on_ranks
from titanlite_cli.commands import checkpoint


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run with the checkpoints step-1 and step-2."""
    folder = tmp_path_factory.mktemp("run")
    run_on_ranks(save_two_steps, 2, str(folder / "checkpoint"))
    return folder


@pytest.fixture
def script(capsys):
    """Runs the script in this process; returns its exit code, stdout and stderr."""

    def call(*argv) -> tuple[int, str, str]:
        code = checkpoint.main([str(argument) for argument in argv])
        return code, *capsys.readouterr()

    return call


def test_show_prints_tables_that_a_person_can_read(run_folder, script):
    code, shown, _ = script("show", run_folder / "checkpoint" / "step-1")
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert code == 0 and ["position", "100 samples"] in lines and ["layout", "shard 2"] in lines
    assert ["debug.seed", "7"] in lines and ["data.sources:", 'code  "weight 1"'] in lines
    assert "model.tok_embeddings.weight [509 x 32]" in shown
    assert "{" not in shown, "a raw dictionary"


def test_ls_and_verify_report_what_is_damaged_or_set_aside(run_folder, tmp_path, script):
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", str(run_folder), str(run)], check=True)
    DAMAGE["a flipped bit"](run / "checkpoint" / "step-2")
    code, listed, _ = script("ls", run)
    first, second = listed.splitlines()
    assert code == 0 and first.startswith("step-1") and second.startswith("step-2")
    assert "position 100" in first and "weights, optimizer" in first and "position 200" in second

    code, verified, _ = script("verify", run)
    assert code == 2 and verified.count("all hashes match") == 1
    assert "step-2: is damaged: " in verified and "its hash differs" in verified

    (run / "checkpoint" / "step-2").rename(run / "checkpoint" / "step-2.aside-1")
    (run / "checkpoint" / "step-1-hf").mkdir()  # an export is not a checkpoint
    assert "step-2.aside-1" in script("ls", run)[1]
    code, verified, _ = script("verify", run)
    assert code == 0 and verified.count("\n") == 1, "what is set aside is not verified"
    assert script("rm", run / "checkpoint" / "step-2.aside-1")[0] == 0
    assert script("ls", run)[1].splitlines() == [first]


@pytest.mark.parametrize(
    "argv", [("rm", "."), ("ls", "missing"), ("show", "."), ("ls", "nosuch://bucket")], ids=" ".join
)
def test_a_folder_without_a_checkpoint_is_a_user_error(run_folder, argv, script):
    command, folder = argv
    code, _, stderr = script(command, folder if "://" in folder else run_folder / folder)
    assert code == 2 and stderr.startswith("titanlite: ")
    assert (run_folder / "checkpoint" / "step-1" / "manifest.json").exists()


@pytest.mark.parametrize(
    "argv", [("checkpoint.py", "show"), ("checkpoint.py", "--help")], ids=" ".join
)
def test_a_pipe_to_head_ends_without_a_traceback(run_folder, argv, python):
    script, *arguments = argv
    if arguments == ["show"]:
        arguments.append(str(run_folder / "checkpoint" / "step-1"))
    read_end, write_end = os.pipe()
    os.close(read_end)  # `head` has printed its lines and exited
    command = [python, str(ROOT / "scripts" / script), *arguments]
    run = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert run.stderr == "" and run.returncode == -signal.SIGPIPE
