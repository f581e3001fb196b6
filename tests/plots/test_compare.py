"""Two runs are said to agree where they do, and to part where they do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from titanlite.errors import ConfigError, DataError
from titanlite.plots.compare import compare_runs, describe, draw_comparison, verdict

ROOT = Path(__file__).parents[2]
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
    """Compares a run with a plain one of 100 steps."""
    plain = write_run(tmp_path / "a", [*map(step_line, STEPS), validation(50, 3.5)])
    return lambda lines, tolerance=1e-4: compare_runs(
        plain, write_run(tmp_path / "b", lines), tolerance
    )


def words_of(comparison, name: str) -> list[str]:
    """The row of a number in the table."""
    line = next(line for line in describe(comparison).splitlines() if line.startswith(name + " "))
    return line.removeprefix(name).split()


def differing(key: str, by: dict[int, float]) -> list[dict]:
    """The plain run, with `key` larger by a share at some steps."""
    return [step_line(n, **{key: step_line(n)[key] * (1 + by.get(n, 0.0))}) for n in STEPS]


def test_rounding_is_no_parting(compare):
    comparison = compare(differing("loss", dict.fromkeys(STEPS, 9e-5)))
    assert not comparison.parted
    assert verdict(comparison).startswith("They agree at 100 steps")
    assert words_of(comparison, "loss")[0] == "9.0e-05"


@pytest.mark.parametrize("key", ["loss", "grad_norm", "lr"])
def test_the_first_step_apart_is_named_with_both_values_and_whether_they_meet_again(compare, key):
    comparison = compare(differing(key, {30: -2e-4, 31: 1e-5, 60: 3e-2, 99: 1e-3, 100: 1e-3}))
    a, b = step_line(30)[key], step_line(30)[key] * (1 - 2e-4)
    apart, worst, parts, of_a, of_b, for_good = words_of(comparison, key)
    assert (apart, worst, parts, for_good) == ("2.9e-02", "60", "30", "99")
    assert (float(of_a), float(of_b)) == (pytest.approx(a, rel=1e-7), pytest.approx(b, rel=1e-7))
    assert verdict(comparison) == f"They part at step 30, in {key} (tolerance 0.0001)."
    assert [pair.name for pair in comparison.parted] == [key]


def test_z_losses_are_compared_where_there_are_some(tmp_path):
    runs = [[step_line(n, z_loss=z / n) for n in STEPS] for z in (0.1, 0.1001)]
    a, b = (write_run(tmp_path / name, run) for name, run in zip("ab", runs, strict=True))
    assert [pair.name for pair in compare_runs(a, b, 1e-4).parted] == ["z_loss"]


def test_the_verdict_names_the_first_parting_and_not_its_followers(compare):
    lines = [step_line(n, lr=1.0, samples=n) for n in STEPS]
    lines[30]["loss"] = 9.0
    assert verdict(compare(lines)) == "They part at step 1, in lr, samples (tolerance 0.0001)."


def test_runs_that_meet_again_do_not_part_for_good(compare):
    assert words_of(compare(differing("grad_norm", {60: 0.5})), "grad_norm")[-1] == "never"


@pytest.mark.parametrize("key", ["tokens", "samples"])
def test_a_batch_of_one_token_more_parts_whatever_the_tolerance(compare, key):
    lines = [step_line(n, **{key: step_line(n)[key] + (n == 100)}) for n in STEPS]
    assert words_of(compare(lines, tolerance=0.5), key)[1:3] == ["100", "100"]


def test_what_a_larger_tolerance_allows_is_allowed(compare):
    assert not compare(differing("loss", {7: 0.09}), tolerance=0.1).parted


def test_with_tolerance_0_the_last_bit_parts(compare):
    lines = [step_line(n) for n in STEPS]
    lines[3]["loss"] = math.nextafter(lines[3]["loss"], math.inf)
    assert verdict(compare(lines, tolerance=0.0)) == "They part at step 4, in loss (tolerance 0)."


def test_a_nan_in_one_run_parts_and_in_both_agrees(tmp_path):
    a, b = ([step_line(1), step_line(2, loss=None), step_line(3, loss=bad)] for bad in (None, 5.0))
    b[1]["loss"] = math.nan  # as a hand that does not know null would write it
    comparison = compare_runs(write_run(tmp_path / "a", a), write_run(tmp_path / "b", b), 1e-4)
    assert words_of(comparison, "loss") == ["NaN", "3", "3", "nan", "5.0000000", "3"]


def test_two_zeros_agree_and_a_zero_is_not_near_anything(tmp_path):
    a, b = ([step_line(1, lr=0.0), step_line(2, lr=rate)] for rate in (0.0, 1e-12))
    comparison = compare_runs(write_run(tmp_path / "a", a), write_run(tmp_path / "b", b), 1e-4)
    assert words_of(comparison, "lr")[:3] == ["1.0e+00", "2", "2"]


def test_a_step_taken_twice_counts_as_it_was_taken_last(compare):
    astray = [step_line(n, loss=99.0) for n in range(41, 61)] + [validation(50, 99.0)]
    again = [*map(step_line, range(41, 101)), validation(50, 3.5)]
    comparison = compare([*map(step_line, range(1, 41)), *astray, *again])
    assert not comparison.parted and len(comparison.pairs[0].steps) == 100


def test_validation_is_compared_by_the_name_of_its_text_and_its_step(compare):
    others = [validation(50, 2.0, "code"), validation(60, 9.0), validation(50, 3.6)]
    comparison = compare([*map(step_line, STEPS), *others])
    assert words_of(comparison, "validation prose")[1:3] == ["50", "50"]
    assert words_of(comparison, "validation code") == ["not", "in", "both"]
    assert verdict(comparison) == "They part at step 50, in validation prose (tolerance 0.0001)."


def test_steps_that_only_one_run_has_are_told_and_not_compared(compare):
    lines = [step_line(n, loss=99.0 if n > 100 else step_line(n)["loss"]) for n in range(41, 106)]
    comparison = compare(lines)
    assert not comparison.parted
    said = describe(comparison).splitlines()[2:5]
    assert said == [
        "compared   60 steps: 41 to 100",
        "only in A  40 steps: 1 to 40",
        "only in B  5 steps: 101 to 105",
    ]


def test_steps_logged_rarely_are_one_range_and_many_ranges_are_cut_short(compare):
    comparison = compare([step_line(n) for n in range(10, 121, 10)])
    said = describe(comparison).splitlines()[2:5]
    assert said == [
        "compared   10 steps: 10, 20, ..., 100",
        "only in A  90 steps: 1 to 9, 11 to 19, ..., 91 to 99",
        "only in B  2 steps: 110 to 120",
    ]


@pytest.mark.parametrize("tolerance", [-1e-9, math.nan, math.inf])
def test_a_tolerance_that_would_pass_or_refuse_everything_is_a_mistake(compare, tolerance):
    with pytest.raises(ConfigError, match="--tolerance"):
        compare([step_line(1)], tolerance)


@pytest.mark.parametrize(
    "lines, said",
    [
        ([step_line(n) for n in range(200, 301)], "no step in common: 1 to 100 against 200 to 300"),
        ([validation(50, 3.5)], "holds no step"),
        ([{"step": 1, "loss": 2.0}], "not the metrics.jsonl of a run .*grad_norm"),
        ([["step", 1]], "line 1 is not a JSON object"),
        ([5, step_line(1)], "line 1 is not a JSON object"),
        ([{**step_line(1), "loss": 10**400}], "not the metrics.jsonl of a run"),
    ],
)
def test_what_cannot_be_compared_is_said_and_not_called_agreement(compare, lines, said):
    with pytest.raises(DataError, match=said):
        compare(lines)


def colour(picture: np.ndarray, code: int) -> np.ndarray:
    """Where the picture has a colour."""
    rgb = np.array([code >> 16, code >> 8 & 255, code & 255]) / 255
    return np.abs(picture[..., :3] - rgb).max(axis=-1) < 0.02


def test_the_picture_shows_both_runs_and_where_they_part(compare, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    pictures = []
    for name, by in (("apart", dict.fromkeys(range(51, 101), 0.2)), ("agree", {})):
        lines = differing("loss", by)
        lines[20]["grad_norm"] = None  # a hole in the other curve
        draw_comparison(compare(lines, 1e-4), tmp_path / "new" / f"{name}.png")
        pictures.append(image.imread(tmp_path / "new" / f"{name}.png"))
    apart, agree = (picture[:, : picture.shape[1] // 2] for picture in pictures)  # the loss
    blue, red, amber = 0x2F6FB2, 0xD1495B, 0xC48A00
    assert colour(agree, blue).sum() > 500 and colour(agree, red).sum() > 100
    assert not colour(agree, amber).any()
    upright = np.flatnonzero(colour(apart, amber).sum(axis=0) > 200)  # the line at the parting
    left, right = np.flatnonzero(colour(apart, blue)[150:].any(axis=0))[[0, -1]]
    assert (upright.mean() - left) / (right - left) == pytest.approx(0.5, abs=0.02)


def compare_as_a_user(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compare_runs.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )


def test_a_script_can_ask_for_agreement_by_exit_code(tmp_path):
    a = write_run(tmp_path / "a", [step_line(n) for n in STEPS])
    b = write_run(tmp_path / "b", differing("loss", {5: 1e-3}))
    parting = compare_as_a_user(a, b)
    assert (parting.returncode, parting.stderr) == (1, "")
    assert parting.stdout.splitlines()[-1].startswith("They part at step 5, in loss")
    assert f"picture: {b / 'compare.png'}" in parting.stdout and (b / "compare.png").exists()

    out = tmp_path / "picture.png"
    agreeing = compare_as_a_user(a / "metrics.jsonl", b, "--tolerance", "1e-2", "--out", out)
    assert (agreeing.returncode, agreeing.stderr) == (0, "")
    assert agreeing.stdout.splitlines()[-1].startswith("They agree at 100 steps") and out.exists()


def test_a_mistake_is_answered_with_a_sentence_and_exit_code_2(tmp_path):
    run = compare_as_a_user(tmp_path / "nowhere", write_run(tmp_path / "a", [step_line(1)]))
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("titanlite: ") and run.stderr.count("\n") == 1
    assert "nowhere" in run.stderr


def test_a_picture_that_cannot_be_written_is_a_sentence_too(compare, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="cannot be written.*--out"):
        draw_comparison(compare([step_line(1)]), tmp_path)
