"""The commands of the README and the tutorials run as they are written, on the CPU and small.

A copy of the repository is the working directory of all pages, so that one page continues where the
one before it ended. `<!-- test: add ARGUMENTS -->` above a block makes it smaller;
`<!-- test: skip, REASON -->` leaves it out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from tests.docs.pages import code_blocks
from tests.preloaded_python import preloaded_python

PAGES = (  # in the order in which a newcomer reads them
    "README.md",
    "docs/tutorial/quickstart.md",
    "docs/tutorial/your-own-text.md",
    "docs/tutorial/stop-and-resume.md",
    "docs/tutorial/eight-gpus.md",
    "docs/how-to/prove-your-trainer-agrees.md",
    "docs/how-to/fine-tune.md",
    "docs/how-to/fine-tune-with-lora.md",
    "docs/tutorial/base-to-chat.md",
    "docs/how-to/prepare-a-corpus.md",
    "docs/how-to/fit-a-scaling-law.md",
)
TIMEOUT_SECONDS = 600
SMALL_LIBRARY = """
import sysconfig
get_paths = sysconfig.get_paths
sysconfig.get_paths = lambda *args, **options: {{**get_paths(*args, **options), "stdlib": {!r}}}
"""


def copy_repository(folder: Path) -> Path:
    """The files that git tracks, and those it would track; with an environment that is ready."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # git also lists what was deleted and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    _pretend_environment(folder)
    _shrink_library(folder / ".venv")
    return folder


def _pretend_environment(folder: Path) -> None:
    """A .venv that is this Python: scripts/environment.sh takes its stamp as up to date."""
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("")
    stamp = 'echo "$(cat pyproject.toml constraints.txt | cksum) $PWD +dev" > .venv/stamp'
    subprocess.run(["bash", "-c", stamp], cwd=folder, check=True)


def _shrink_library(folder: Path) -> None:
    """Let `collect-python` find a twentieth of Python's library: see `environment_for`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for package in ("email", "http", "json", "logging", "unittest"):
        shutil.copytree(library / package, folder / "library" / package)
    (folder / "sitecustomize.py").write_text(SMALL_LIBRARY.format(str(folder / "library")))


def environment_for(folder: Path, programs: Path) -> dict[str, str]:
    """The environment of commands in a copy of the repository; `programs` has their Python."""
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    modules = f"{folder}:{folder}/extras:{folder}/.venv"
    return {**os.environ, **hidden, "PATH": path, "PYTHONPATH": modules}


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return copy_repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def environment(repository, tmp_path_factory) -> Iterator[dict[str, str]]:
    with preloaded_python(tmp_path_factory.mktemp("preloaded"), repository) as programs:
        yield environment_for(repository, programs)


@pytest.fixture(scope="module")
def done() -> set[str]:
    """Commands that another page has run."""
    return set()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page_run(page, repository, environment, done):
    for block in code_blocks(ROOT / page):
        if block.file:
            (repository / block.file).parent.mkdir(parents=True, exist_ok=True)
            (repository / block.file).write_text(block.text)
        if block.language != "bash" or block.skip or block.commands in done:
            continue
        done.add(block.commands)
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.commands],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        output = f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        assert result.returncode == 0, f"{block.commands}\n{output}"


def test_every_block_that_is_not_run_states_the_reason():
    for page in PAGES:
        for block in code_blocks(ROOT / page):
            assert "test: skip -->" not in block.text
            assert block.file or block.language in ("", "bash", "toml"), (page, block.language)
