"""compare_runs reports agreement and the first difference of two runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from titanlite.errors import ConfigError, DataError
from titanlite_lab.compare import compare_runs, draw_comparison, format_comparison, verdict

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PATHS = f"{ROOT}:{ROOT / 'extras'}"
STEPS = range(1, 101)


def step_line(step: int, **other) -> dict:
    line = {"step": step, "loss": 8.0 / step**0.3, "grad_norm": 1.0 + 1.0 / step, "lr": 1e-3 / step}
    return {**line, "tokens": 4096 * step, "samples": 8 * step, **other}


def validation(step: int, loss: float | None, name: str = "prose") -> dict:
    return {"event": "validation", "step": step, "name": name, "loss": loss}


def write_run(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


@pytest.fixture
def compare(tmp_path):
    """Compare a run with a reference run of 100 steps."""
    reference = write_run(tmp_path / "a", [*map(step_line, STEPS), validation(50, 3.5)])
    return lambda lines, tolerance=1e-4: compare_runs(
        reference, write_run(tmp_path / "b", lines), tolerance
    )


def table_row(comparison, name: str) -> list[str]:
    """The cells of a metric in the table."""
    line = next(
        line for line in format_comparison(comparison).splitlines() if line.startswith(name + " ")
    )
    return line.removeprefix(name).split()


def with_differences(key: str, by: dict[int, float]) -> list[dict]:
    """The reference run, with `key` increased by a relative amount at some steps."""
    return [step_line(n, **{key: step_line(n)[key] * (1 + by.get(n, 0.0))}) for n in STEPS]


def test_rounding_within_the_tolerance_is_agreement(compare):
    comparison = compare(with_differences("loss", dict.fromkeys(STEPS, 9e-5)))
    assert not comparison.different
    assert verdict(comparison).startswith("The runs agree at 100 steps")
    assert table_row(comparison, "loss")[0] == "9.0e-05"


@pytest.mark.parametrize("key", ["loss", "grad_norm", "lr"])
def test_the_first_difference_is_reported_with_both_values_and_whether_it_is_permanent(
    compare, key
):
    comparison = compare(
        with_differences(key, {30: -2e-4, 31: 1e-5, 60: 3e-2, 99: 1e-3, 100: 1e-3})
    )
    a, b = step_line(30)[key], step_line(30)[key] * (1 - 2e-4)
    largest, largest_at, first, value_a, value_b, always_from = table_row(comparison, key)
    assert (largest, largest_at, first, always_from) == ("2.9e-02", "60", "30", "99")
    assert (float(value_a), float(value_b)) == (
        pytest.approx(a, rel=1e-7),
        pytest.approx(b, rel=1e-7),
    )
    assert verdict(comparison) == f"The runs first differ at step 30, in {key} (tolerance 0.0001)."
    assert [metric.name for metric in comparison.different] == [key]


@pytest.mark.parametrize("changed", [0.1001, None])  # a run writes NaN as null
def test_z_losses_are_compared_if_both_runs_have_them(tmp_path, changed):
    runs = [[step_line(n, z_loss=z if n > 1 else 0.1) for n in STEPS] for z in (0.1, changed)]
    a, b = (write_run(tmp_path / name, run) for name, run in zip("ab", runs, strict=True))
    assert [metric.name for metric in compare_runs(a, b, 1e-4).different] == ["z_loss"]


def test_the_verdict_names_only_the_metrics_that_differ_first(compare):
    lines = [step_line(n, lr=1.0, samples=n) for n in STEPS]
    lines[30]["loss"] = 9.0
    assert (
        verdict(compare(lines))
        == "The runs first differ at step 1, in lr, samples (tolerance 0.0001)."
    )


def test_a_temporary_difference_is_not_reported_as_permanent(compare):
    assert table_row(compare(with_differences("grad_norm", {60: 0.5})), "grad_norm")[-1] == "never"


@pytest.mark.parametrize("key", ["tokens", "samples"])
def test_a_batch_with_one_more_token_differs_at_any_tolerance(compare, key):
    lines = [step_line(n, **{key: step_line(n)[key] + (n == 100)}) for n in STEPS]
    assert table_row(compare(lines, tolerance=0.5), key)[1:3] == ["100", "100"]


def test_a_larger_tolerance_accepts_a_larger_difference(compare):
    assert not compare(with_differences("loss", {7: 0.09}), tolerance=0.1).different


def test_tolerance_0_detects_a_difference_in_the_last_bit(compare):
    lines = [step_line(n) for n in STEPS]
    lines[3]["loss"] = math.nextafter(lines[3]["loss"], math.inf)
    assert (
        verdict(compare(lines, tolerance=0.0))
        == "The runs first differ at step 4, in loss (tolerance 0)."
    )


def test_a_nan_in_one_run_differs_and_in_both_agrees(tmp_path):
    a, b = ([step_line(1), step_line(2, loss=None), step_line(3, loss=bad)] for bad in (None, 5.0))
    b[1]["loss"] = math.nan  # a run writes null; a file edited by hand may have NaN
    comparison = compare_runs(write_run(tmp_path / "a", a), write_run(tmp_path / "b", b), 1e-4)
    assert table_row(comparison, "loss") == ["NaN", "3", "3", "nan", "5.0000000", "3"]


def test_two_zeros_agree_and_zero_differs_from_any_other_value(tmp_path):
    a, b = ([step_line(1, lr=0.0), step_line(2, lr=rate)] for rate in (0.0, 1e-12))
    comparison = compare_runs(write_run(tmp_path / "a", a), write_run(tmp_path / "b", b), 1e-4)
    assert table_row(comparison, "lr")[:3] == ["1.0e+00", "2", "2"]


def test_a_repeated_step_counts_with_its_last_values(compare):
    rolled_back = [step_line(n, loss=99.0) for n in range(41, 61)] + [validation(50, 99.0)]
    repeated = [*map(step_line, range(41, 101)), validation(50, 3.5)]
    comparison = compare([*map(step_line, range(1, 41)), *rolled_back, *repeated])
    assert not comparison.different and len(comparison.metrics[0].steps) == 100


def test_validation_losses_are_compared_by_set_name_and_step(compare):
    others = [validation(50, 2.0, "code"), validation(60, 9.0), validation(50, 3.6)]
    comparison = compare([*map(step_line, STEPS), *others])
    assert table_row(comparison, "validation prose")[1:3] == ["50", "50"]
    assert table_row(comparison, "validation code") == ["no", "common", "step"]
    assert (
        verdict(comparison)
        == "The runs first differ at step 50, in validation prose (tolerance 0.0001)."
    )


def test_steps_that_only_one_run_has_are_listed_but_not_compared(compare):
    lines = [step_line(n, loss=99.0 if n > 100 else step_line(n)["loss"]) for n in range(41, 106)]
    comparison = compare(lines)
    assert not comparison.different
    listed = format_comparison(comparison).splitlines()[2:5]
    assert listed == [
        "compared   60 steps: 41 to 100",
        "only in A  40 steps: 1 to 40",
        "only in B  5 steps: 101 to 105",
    ]


def test_sparse_steps_are_one_range_and_many_ranges_are_abbreviated(compare):
    comparison = compare([step_line(n) for n in range(10, 121, 10)])
    listed = format_comparison(comparison).splitlines()[2:5]
    assert listed == [
        "compared   10 steps: 10, 20, ..., 100",
        "only in A  90 steps: 1 to 9, 11 to 19, ..., 91 to 99",
        "only in B  2 steps: 110 to 120",
    ]


@pytest.mark.parametrize("tolerance", [-1e-9, math.nan, math.inf])
def test_a_negative_or_infinite_tolerance_is_rejected(compare, tolerance):
    with pytest.raises(ConfigError, match="--tolerance"):
        compare([step_line(1)], tolerance)


@pytest.mark.parametrize(
    "lines, message",
    [
        ([step_line(n) for n in range(200, 301)], "no step in common: 1 to 100 and 200 to 300"),
        ([validation(50, 3.5)], "has no step"),
        ([{"step": 1, "loss": 2.0}], "not the metrics.jsonl of a run .*grad_norm"),
        ([["step", 1]], "line 1 is not a JSON object"),
        ([5, step_line(1)], "line 1 is not a JSON object"),
        ([{**step_line(1), "loss": 10**400}], "not the metrics.jsonl of a run"),
        ([{**step_line(1), "z_loss": [1]}], r"line 1: z_loss \[1\]"),
        ([{**step_line(1), "step": None}, step_line(2)], "line 1: step None"),
    ],
)
def test_runs_that_cannot_be_compared_are_an_error_and_not_agreement(compare, lines, message):
    with pytest.raises(DataError, match=message):
        compare(lines)


def colour(picture: np.ndarray, code: int) -> np.ndarray:
    """Which pixels have a colour."""
    rgb = np.array([code >> 16, code >> 8 & 255, code & 255]) / 255
    return np.abs(picture[..., :3] - rgb).max(axis=-1) < 0.02


def test_the_plot_shows_both_runs_and_their_first_difference(compare, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    plots = []
    for name, by in (("different", dict.fromkeys(range(51, 101), 0.2)), ("agree", {})):
        lines = with_differences("loss", by)
        lines[20]["grad_norm"] = None  # a gap in the other curve
        draw_comparison(compare(lines, 1e-4), tmp_path / "new" / f"{name}.png")
        plots.append(image.imread(tmp_path / "new" / f"{name}.png"))
    different, agree = (picture[:, : picture.shape[1] // 2] for picture in plots)  # the loss panel
    blue, red, amber = 0x2F6FB2, 0xD1495B, 0xC48A00
    assert colour(agree, blue).sum() > 500 and colour(agree, red).sum() > 100
    assert not colour(agree, amber).any()
    line = np.flatnonzero(
        colour(different, amber).sum(axis=0) > 200
    )  # vertical line at the first difference
    left, right = np.flatnonzero(colour(different, blue)[150:].any(axis=0))[[0, -1]]
    assert (line.mean() - left) / (right - left) == pytest.approx(0.5, abs=0.02)


def run_script(python: str, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, "-m", "titanlite_lab", "compare", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": PATHS, "PATH": ""},
    )


def test_the_exit_code_states_whether_the_runs_agree(python, tmp_path):
    a = write_run(tmp_path / "a", [step_line(n) for n in STEPS])
    b = write_run(tmp_path / "b", with_differences("loss", {5: 5e-5}))
    differing = run_script(python, a, b)  # the default is what docs/how-to promises: 3e-5
    assert (differing.returncode, differing.stderr) == (1, "")
    assert differing.stdout.splitlines()[-1].startswith("The runs first differ at step 5, in loss")
    assert f"plot: {b / 'compare.png'}" in differing.stdout and (b / "compare.png").exists()

    out = tmp_path / "plot.png"
    agreeing = run_script(python, a / "metrics.jsonl", b, "--tolerance", "1e-2", "--out", out)
    assert (agreeing.returncode, agreeing.stderr) == (0, "")
    assert (
        agreeing.stdout.splitlines()[-1].startswith("The runs agree at 100 steps") and out.exists()
    )


def test_a_missing_run_is_one_error_line_and_exit_code_2(python, tmp_path):
    run = run_script(python, tmp_path / "nowhere", write_run(tmp_path / "a", [step_line(1)]))
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("titanlite: ") and run.stderr.count("\n") == 1
    assert "nowhere" in run.stderr


def test_a_plot_that_cannot_be_written_is_a_user_error(compare, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="cannot be written.*--out"):
        draw_comparison(compare([step_line(1)]), tmp_path)


def test_a_reader_that_stops_early_gets_no_traceback(python, tmp_path):
    run = write_run(tmp_path / "a", [step_line(n) for n in STEPS])
    script = f"{python} -m titanlite_lab compare {run} {run}"
    environment = {"PYTHONPATH": PATHS, "PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    piped = subprocess.run(
        ["bash", "-c", f"{script} | true"], capture_output=True, text=True, env=environment
    )
    assert piped.stderr == ""
