"""The loss plot shows all curves of a run, and rejects files that no run wrote."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from titanlite.errors import DataError
from titanlite_lab.loss_curve import draw_loss, smooth
from titanlite_lab.run_metrics import read_metrics

ROOT = Path(__file__).parents[3]


def write_run(folder: Path, last_line: str = "") -> Path:
    """A metrics.jsonl with a NaN among its losses, validations and events."""
    lines = []
    for step in range(1, 101):
        loss = None if step == 50 else 8.0 / step**0.3
        lines.append({"step": step, "loss": loss, "lr": 1e-3 * (1 - step / 100), "tokens": step})
        if step % 25 == 0:
            for name, loss in (("code", 3.0), ("prose", 3.5)):
                lines.append({"event": "validation", "step": step, "name": name, "loss": loss})
            lines.append({"event": "checkpoint_saved", "step": step, "path": "x"})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + last_line)
    return path


def test_a_run_with_a_nan_and_a_partial_last_line_is_drawn(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    draw_loss(write_run(tmp_path, last_line='{"step": 101, "lo'), tmp_path / "plots" / "loss.png")
    picture = image.imread(tmp_path / "plots" / "loss.png")[..., :3]
    blue = np.abs(picture - np.array([0x2F, 0x6F, 0xB2]) / 255).max(axis=-1) < 0.02
    red = np.abs(picture - np.array([0xD1, 0x49, 0x5B]) / 255).max(axis=-1) < 0.02
    assert blue.sum() > 500 and red.sum() > 100  # training and validation loss
    columns = np.flatnonzero(blue.any(axis=0))
    assert columns.max() - columns.min() > 0.8 * picture.shape[1]  # from the first step to the last


def test_a_damaged_line_is_reported_and_not_skipped(tmp_path):
    path = write_run(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "\0\0\0\n", *lines[3:]]))
    with pytest.raises(DataError, match="line 4 is not JSON"):
        read_metrics(path)


@pytest.mark.parametrize(
    "line", [pytest.param("[" * 100_000, id="deep"), '"an event"', '{"step": 1}', '{"step": [[1]]}']
)
def test_metrics_that_no_run_wrote_are_rejected(tmp_path, line):
    path = write_run(tmp_path)
    path.write_text(f"{line}\n" + path.read_text())
    with pytest.raises(
        DataError, match="line 1 is not (JSON|a JSON object)|is not the metrics of a run"
    ):
        draw_loss(path, tmp_path / "loss.png")


def test_smoothing_does_not_bend_a_line_and_skips_nan():
    line = np.linspace(5.0, 1.0, 200)
    assert smooth(line, 0.1) == pytest.approx(line)  # without lag at the ends
    flat = np.full(200, 2.0)
    flat[[0, 100]] = np.nan
    assert smooth(flat, 0.1)[1:] == pytest.approx(2.0)


@pytest.mark.slow
def test_a_wrong_folder_is_one_error_line_and_exit_code_2(python, tmp_path):
    script = [python, "-m", "titanlite_lab", "loss"]
    run = subprocess.run(
        [*script, str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'extras'}", "PATH": ""},
    )
    assert run.returncode == 2
    assert run.stderr.startswith("titanlite: ") and run.stderr.count("\n") == 1
    assert "nowhere" in run.stderr
