"""The wheel, without a clone and without the packages of the extras, does what a clone does.

The wheel is made from the sdist. A process of these tests imports titanlite from the unpacked
wheel, and cannot import what `pip install titanlite` does not install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest

import titanlite
from conftest import HANG_SECONDS, ROOT
from tests.docs.test_commands import copy_repository
from tests.preloaded_python import preloaded_python
from titanlite_cli import TABLES

pytestmark = pytest.mark.slow
MISSING = ["matplotlib", "pyarrow", "dask", "distributed", "transformers", "datasets", "lm_eval"]
BLOCK = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {MISSING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the content of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build(copy_repository(folder / "repository"), "sdist", folder)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder)
    build(folder / sdist.name.removesuffix(".tar.gz"), "wheel", folder)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return folder / "site"


def build(source: Path, what: str, out: Path) -> None:
    """Build an sdist or a wheel as pip does, with the setuptools of this environment."""
    program = f"from setuptools import build_meta; build_meta.build_{what}({str(out)!r})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def run(site, tmp_path_factory) -> Iterator[Callable]:
    """Runs `titanlite` or torchrun in an empty folder; returns its output."""
    folder, work = tmp_path_factory.mktemp("blocked"), tmp_path_factory.mktemp("work")
    (folder / "sitecustomize.py").write_text(BLOCK)
    (info,) = site.glob("*.dist-info")
    (script,) = Distribution.at(info).entry_points.select(group="console_scripts")
    assert script.name == "titanlite"
    titanlite = f"import sys; from {script.module} import {script.attr}; sys.exit({script.attr}())"
    preloaded = {"PYTHONPATH": f"{site}:{ROOT}"}
    with preloaded_python(tmp_path_factory.mktemp("python"), site, preloaded) as programs:
        commands = {
            "titanlite": [str(programs / "python"), "-c", titanlite],
            "torchrun": [str(programs / "torchrun")],
        }
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{site}", "OMP_NUM_THREADS": "1"}

        def run_command(name: str, *arguments: object, code: int = 0) -> str:
            done = subprocess.run(
                [*commands[name], *map(str, arguments)],
                cwd=work,
                env=environment,
                capture_output=True,
                text=True,
                timeout=HANG_SECONDS,
            )
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout + done.stderr

        yield run_command


def test_the_wheel_has_every_file_of_the_packages(site):
    listing = subprocess.run(
        ["git", "ls-files", "titanlite", "extras"], cwd=ROOT, capture_output=True, text=True
    )
    tracked = {path.removeprefix("extras/") for path in listing.stdout.splitlines()}
    tracked = {path for path in tracked if not path.endswith("README.md") and "/tests/" not in path}
    present = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert {path for path in present if ".dist-info/" not in path} == tracked
    (info,) = site.glob("*.dist-info")
    assert Distribution.at(info).version == titanlite.__version__


def test_help_lists_commands_that_exist_and_does_not_import_torch(site):
    check = (
        "import sys; from titanlite_cli import run_titanlite; run_titanlite(['--help'])\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    packages = {path.parent.name for path in (ROOT / "extras").glob("*/__main__.py")}
    assert TABLES.keys() == {"titanlite_cli", *packages}
    for package, commands in TABLES.items():
        for name in commands:
            assert f"  {name} " in done.stdout
            assert (site / package / "commands" / f"{name.replace('-', '_')}.py").exists(), name


def test_text_becomes_a_trained_model_that_is_resumed_used_and_converted(run, tmp_path):
    """The job is that of the quickstart, on two processes, then resumed on one."""
    text, corpus = tmp_path / "text", "outputs/quickstart/corpus"
    text.mkdir()
    for number, path in enumerate(sorted((ROOT / "titanlite" / "optim").glob("*.py"))):
        (text / f"{number}.txt").write_text(path.read_text("utf-8"))
    tokenizer = ("--tokenizer", f"{corpus}/tokenizer.model")
    run("titanlite", "tokenizer", text, "--vocab-size", 512, "--out", tokenizer[1])
    run("titanlite", "prepare", text, *tokenizer, "--out", corpus, "--validation-share", 0.2)
    job = ("--job.config_file", "quickstart", "--job.device", "cpu", "--checkpoint.interval", 1)
    job += ("--model.dim", 32, "--model.n_layers", 2, "--model.n_heads", 4, "--model.n_kv_heads", 4)
    job += ("--model.hidden_dim", 64, "--training.seq_len", 32, "--validation.enable", "false")
    ranks = ("--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", 2)
    run("torchrun", *ranks, "-m", "titanlite.train", *job, "--training.steps", 1)
    resumed = run("titanlite", "train", *job, "--training.steps", 2)
    assert "step 1/2  resumed" in resumed and "step 2/2  loss" in resumed
    generate = ("--checkpoint", "outputs/quickstart", "--max-new-tokens", 4, "--prompt", "def")
    run("titanlite", "generate", *generate)
    run("titanlite", "checkpoint", "to-hf", "outputs/quickstart", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()
    plan = ("--model", "llama3/8B", "--gpus", "8xH100", "--seq-len", 8192, "--global-batch", 64)
    assert "FSDP" in run("titanlite", "plan", *plan, "--quick")
    # what needs an extra says which
    recipe = run("titanlite", "prepare", "--recipe", "python_library", code=2)
    assert "pip install 'titanlite[corpus]'" in recipe
    assert "pip install 'titanlite[lab]'" in run("titanlite", "loss", "outputs/quickstart", code=2)
