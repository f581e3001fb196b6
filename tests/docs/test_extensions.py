"""The code of the extension guides works, from a folder outside of the repository.

Of each guide, in order: a block whose first line is `# file: PATH` is added to PATH; a `diff` block
whose first line is `--- PATH` replaces its lines with `-` by those with `+`, below and above its
unchanged lines; a `bash` block is run unless an HTML comment skips it; a `toml` block with entry
points is installed. One job then uses everything that was added: on one process by `--job.import`,
and under FSDP 2 x TP 2 by the entry points.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import HANG_SECONDS, ROOT
from tests.docs.pages import CodeBlock, code_blocks
from tests.docs.test_commands import environment_for
from titanlite import extensions
from titanlite.errors import ConfigError
from titanlite.extensions import load_extensions
from titanlite.files import parse_toml

GUIDES = (  # a later one may change files of an earlier one
    "add-a-model",
    "add-a-parallel-style",
    "add-an-optimizer",
    "add-a-schedule",
    "add-a-data-format",
    "add-a-metric-sink",
    "add-a-periodic-action",
)
JOB = """
include = [{fragments}]
[job]
device = "cpu"
[model]
vocab_size = 258
[training]
seq_len = 32
local_batch_size = 2
global_batch_size = 8
steps = 3
mixed_precision_param = "float32"
[metrics]
log_freq = 1
"""


def test_every_extension_guide_is_tested():
    pages = {path.stem for path in (ROOT / "docs" / "how-to").glob("add-a*.md")}
    assert pages == set(GUIDES)


def apply_diff(block: CodeBlock, folder: Path) -> None:
    """Edit the file that a diff block names; its old lines must be there once."""
    head, *lines = block.text.splitlines()
    path = folder / head.removeprefix("--- ")
    old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path}: {text.count(old)} places for:\n{old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def apply_guide(page: Path, folder: Path, environment: dict[str, str]) -> None:
    for block in code_blocks(page):
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:  # every guide adds to my_registry.py
                file.write(block.text)
        elif block.language == "diff":
            apply_diff(block, folder)
        elif block.language == "toml" and "entry-points" in block.text:
            install(folder / "site", parse_toml(block.text)["project"]["entry-points"])
        elif block.language == "bash" and not block.skip:
            command = ["bash", "-euo", "pipefail", "-c", block.commands]
            subprocess.run(command, cwd=folder, env=environment, check=True)


def install(site: Path, groups: dict[str, dict[str, str]], name: str = "my-extensions") -> None:
    """Add entry points to the package `name`, as pip records them."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("a") as file:
        for group, points in groups.items():
            lines = (f"{point} = {value}\n" for point, value in points.items())
            file.write(f"[{group}]\n{''.join(lines)}")


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A folder with the files of all guides, and a job that uses all of them."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copy(ROOT / "README.md", folder)
    environment = environment_for(ROOT, Path(sys.executable).parent)
    for guide in GUIDES:
        apply_guide(ROOT / "docs" / "how-to" / f"{guide}.md", folder, environment)
    fragments = sorted(f"extensions/{path.name}" for path in (folder / "extensions").iterdir())
    text = JOB.format(fragments=", ".join(f'"{fragment}"' for fragment in fragments))
    (folder / "job.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def runs(extended, python) -> dict[str, list[dict]]:
    """The lines of metrics.jsonl of the job that uses all extensions."""
    environment = environment_for(ROOT, Path(python).parent)

    def train(out: str, launch: list[object], *options: str, path: str = "") -> list[dict]:
        job = ["--job.config_file", "job.toml", "--job.dump_folder", out, *options]
        result = subprocess.run(
            [*map(str, launch), "-m", "titanlite.train", *job],
            cwd=extended,
            env={**environment, "PYTHONPATH": f"{path}:{environment['PYTHONPATH']}"},
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
        assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
        return [json.loads(line) for line in (extended / out / "metrics.jsonl").open()]

    launch = ["bash", ROOT / "scripts" / "launch.sh", 4]
    sharded = ("--parallelism.tensor_parallel_degree", "2")
    return {
        "one": train("one", [python], "--job.import", "my_registry"),
        "sharded": train("sharded", launch, *sharded, path=f"{extended}:{extended}/site"),
    }


def steps_of(lines: list[dict], key: str) -> list[float]:
    return [line[key] for line in lines if "event" not in line]


def test_the_extensions_learn_the_same_on_one_process_and_under_fsdp_and_tp(runs):
    one, sharded = runs["one"], runs["sharded"]
    assert steps_of(one, "step") == [1, 2, 3]
    for key in ("loss", "grad_norm"):
        assert steps_of(sharded, key) == pytest.approx(steps_of(one, key), rel=1e-5)
    assert steps_of(one, "loss")[0] > steps_of(one, "loss")[-1]


def test_the_job_uses_what_the_guides_add(extended, runs):
    config = (extended / "one" / "config.toml").read_text("utf-8")
    for setting in (
        'name = "relu2"',
        'format = "numpy"',
        'name = "Signum"',
        'decay_type = "quadratic"',
    ):
        assert setting in config, setting


def test_the_periodic_action_logs_the_same_norm_under_both_layouts(runs):
    norms = {
        name: [line["norm"] for line in lines if line.get("event") == "weight_norm"]
        for name, lines in runs.items()
    }
    assert len(norms["one"]) == 3
    assert norms["sharded"] == pytest.approx(norms["one"], rel=1e-5)


def test_the_metric_sink_writes_every_step(extended, runs):
    rows = (extended / "one" / "metrics.csv").read_text("utf-8").splitlines()
    assert rows[0].startswith("step,") and len(rows) == 4


def test_every_kind_of_extension_has_a_guide(extended):
    text = (extended / "site" / "my_extensions-1.0.dist-info" / "entry_points.txt").read_text()
    assert {line.strip("[]") for line in text.splitlines() if line[0] == "["} == set(
        extensions.TABLES
    )


@pytest.mark.parametrize(
    "points, problem",
    [
        ({"my": "no_such_module:X"}, "broken-one 1.0: .*ModuleNotFoundError"),
        ({"SGD": "titanlite.optim:OptimizerSet"}, "the name is taken"),
    ],
)
def test_a_package_that_breaks_every_command_is_named(tmp_path, monkeypatch, points, problem):
    install(tmp_path, {"titanlite.optimizers": points}, name="broken-one")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=problem) as error:
        load_extensions([])
    assert "broken-one 1.0" in str(error.value) and next(iter(points)) in str(error.value)


def test_only_job_import_is_taken_from_the_arguments(tmp_path, monkeypatch):
    """The working directory is searched, which torchrun does not add."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_module.py").write_text("")
    with pytest.raises(ConfigError, match=r"--job.import no_such_module: .*working directory"):
        load_extensions(["--job.import=json,no_such_module"])
    others = ["--training.steps", "3", "--", "--job.import", "of_another_program"]
    assert load_extensions(["--job.import", "json,my_own_module", *others]) == others
    assert "my_own_module" in sys.modules
