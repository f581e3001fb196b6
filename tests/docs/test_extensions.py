"""The code of the extension guides works: added to a copy of the package, it trains.

Of each guide, in order: a block whose first line is `# file: PATH` is written to PATH; a `diff`
block whose first line is `--- PATH` replaces its lines with `-` by those with `+`, below and above
its unchanged lines; a `bash` block is run unless an HTML comment skips it. One job then uses
everything that was added, on one process and under FSDP 2 x TP 2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import HANG_SECONDS, ROOT
from tests.docs.pages import CodeBlock, code_blocks
from tests.docs.test_commands import copy_repository, environment_for
from tests.preloaded_python import preloaded_python

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
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "diff":
            apply_diff(block, folder)
        elif block.language == "bash" and not block.skip:
            command = ["bash", "-euo", "pipefail", "-c", block.commands]
            subprocess.run(command, cwd=folder, env=environment, check=True)


def train(environment: dict[str, str], folder: Path, out: str, *launch: str) -> list[dict]:
    """Run the job that uses all extensions; returns the lines of metrics.jsonl."""
    command = [*launch, "train.py", "--job.config_file", "job.toml", "--job.dump_folder", out]
    if launch[0] == "bash":
        command += ["--parallelism.tensor_parallel_degree", "2"]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return [json.loads(line) for line in (folder / out / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the repository with all guides applied, and a job that uses all of them."""
    folder = copy_repository(tmp_path_factory.mktemp("extended"))
    for guide in GUIDES:
        # with a Python that imports what the guide has changed so far
        environment = environment_for(folder, Path(sys.executable).parent)
        apply_guide(ROOT / "docs" / "how-to" / f"{guide}.md", folder, environment)
    fragments = sorted(f"extensions/{path.name}" for path in (folder / "extensions").iterdir())
    text = JOB.format(fragments=", ".join(f'"{fragment}"' for fragment in fragments))
    (folder / "job.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def runs(extended, tmp_path_factory) -> dict[str, list[dict]]:
    with preloaded_python(tmp_path_factory.mktemp("preloaded"), extended) as programs:
        environment = environment_for(extended, programs)
        return {
            "one": train(environment, extended, "one", "python"),
            "sharded": train(environment, extended, "sharded", "bash", "scripts/launch.sh", "4"),
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
