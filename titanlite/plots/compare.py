"""Whether two runs learned the same: their metrics.jsonl, number by number and step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from titanlite.errors import ConfigError, DataError
from titanlite.metrics import METRICS_FILE
from titanlite.plots.figure import FAINT, INK, new_figure
from titanlite.plots.loss_curve import BLUE, RED, quieten, read_metrics

_CLOSE = ("loss", "grad_norm", "lr")  # equal up to the tolerance
_EXACT = ("tokens", "samples")  # positions: equal, or it was another batch
_BEYOND = "#c48a00"

Told = dict[str, dict[int, float]]  # of each kind of number, its value by step


@dataclass(frozen=True)
class Pair:
    """One kind of number in both runs, at the steps that both have; arrays are [N], steps rise."""

    name: str
    allowed: float  # relative difference
    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @cached_property
    def apart(self) -> np.ndarray:
        """|a - b| / max(|a|, |b|); 0 where both are NaN, infinite where one is."""
        with np.errstate(invalid="ignore"):
            apart = np.abs(self.a - self.b) / np.maximum(np.abs(self.a), np.abs(self.b))
        same = (self.a == self.b) | (np.isnan(self.a) & np.isnan(self.b))
        return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))

    @property
    def parting(self) -> int | None:
        """The first place where they are further apart than allowed."""
        beyond = np.flatnonzero(self.apart > self.allowed)
        return int(beyond[0]) if len(beyond) else None

    @property
    def for_good(self) -> int | None:
        """The place from which on they always are."""
        within = np.flatnonzero(self.apart <= self.allowed)
        place = int(within[-1]) + 1 if len(within) else 0
        return place if place < len(self.steps) else None


@dataclass(frozen=True)
class Comparison:
    """Two runs, and what was compared of them."""

    paths: tuple[Path, Path]
    told: tuple[Told, Told]
    tolerance: float
    pairs: list[Pair]  # loss and grad_norm first

    @property
    def parted(self) -> list[Pair]:
        """Those that part; none if the runs agree."""
        return [pair for pair in self.pairs if pair.parting is not None]


def compare_runs(a: Path, b: Path, tolerance: float) -> Comparison:
    """Loss, grad_norm, lr, tokens, samples and validation losses of two runs.

    A run is its job.dump_folder or its metrics.jsonl; `tolerance` is a relative difference. Raises
    ConfigError for a tolerance below 0, DataError for a file that no run wrote or if no step is in
    both.
    """
    if not 0 <= tolerance < np.inf:
        raise ConfigError(
            f"--tolerance {tolerance:g}: must be a number of at least 0.", fix="0 is equality."
        )
    told = _read(a), _read(b)
    pairs = []
    for name in dict.fromkeys([*told[0], *told[1]]):
        runs = [of.get(name, {}) for of in told]
        steps = sorted(runs[0].keys() & runs[1].keys())
        values = (np.array([run[step] for step in steps], dtype=float) for run in runs)
        pairs.append(Pair(name, 0.0 if name in _EXACT else tolerance, np.array(steps), *values))
    if not len(pairs[0].steps):
        of_a, of_b = (_ranges(of["loss"]) for of in told)
        raise DataError(
            f"{a} and {b} have no step in common: {of_a} against {of_b}.",
            fix="Compare runs with the same steps and metrics.log_freq.",
        )
    return Comparison((a, b), told, tolerance, pairs)


def _read(path: Path) -> Told:
    """What a run told; of a step told twice, as by a run that turned back, the later."""
    path = path / METRICS_FILE if path.is_dir() else path
    steps, events = read_metrics(path)
    if not steps:
        raise DataError(f"{path}: holds no step.", fix="Give the folder of a run that has begun.")
    try:
        told = {
            key: {line["step"]: _number(line[key]) for line in steps} for key in (*_CLOSE, *_EXACT)
        }
        if z_losses := {line["step"]: line["z_loss"] for line in steps if line.get("z_loss")}:
            told["z_loss"] = z_losses
        for event in events:
            if event["event"] == "validation":
                losses = told.setdefault(f"validation {event['name']}", {})
                losses[event["step"]] = _number(event["loss"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: is not the {METRICS_FILE} of a run ({why}).") from None
    return told


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)  # null is how a run writes NaN


# --- in words ------------------------------------------------------------------------------------


def describe(comparison: Comparison) -> str:
    """The steps that were compared, and a table of how far apart each number is, and where."""
    of_a, of_b = (set(told["loss"]) for told in comparison.told)
    facts = [("A", comparison.paths[0]), ("B", comparison.paths[1])]
    sets = {"compared": of_a & of_b, "only in A": of_a - of_b, "only in B": of_b - of_a}
    for what, steps in sets.items():
        if steps:
            facts += [(what, f"{_count(len(steps))}: {_ranges(steps, of_a | of_b)}")]
    head = ["relative difference", "largest", "at step"]
    if comparison.parted:
        head += ["parts at", "A", "B", "for good from"]
    rows = [head, *(_row(pair, len(head)) for pair in comparison.pairs)]
    return "\n".join([*(f"{what:9}  {fact}" for what, fact in facts), "", *_aligned(rows)])


def verdict(comparison: Comparison) -> str:
    """One line: they agree, or where they part first and in what."""
    allowed, parted = f"{comparison.tolerance:g}", comparison.parted
    if not parted:
        compared = _count(len(comparison.pairs[0].steps))
        return f"They agree at {compared}: tokens and samples exactly, all else to {allowed}."
    first = min(pair.steps[pair.parting] for pair in parted)
    names = [pair.name for pair in parted if pair.steps[pair.parting] == first]
    return f"They part at step {first:,}, in {', '.join(names)} (tolerance {allowed})."


def _row(pair: Pair, width: int) -> list[str]:
    row = [pair.name, "not in both"]
    if len(pair.steps):
        most = int(pair.apart.argmax())
        row = [pair.name, _shown(pair.apart[most])]
        row += [f"{pair.steps[most]:,}" if pair.apart[most] else ""]
    if pair.parting is not None:
        digits = ",.0f" if pair.name in _EXACT else "#.8g"
        row += [f"{pair.steps[pair.parting]:,}"]
        row += [f"{run[pair.parting]:{digits}}" for run in (pair.a, pair.b)]
        row += [f"{pair.steps[pair.for_good]:,}" if pair.for_good is not None else "never"]
    return row + [""] * (width - len(row))


def _shown(apart: float) -> str:
    return "NaN" if apart == np.inf else f"{apart:.1e}" if apart else "0"


def _count(steps: int) -> str:
    return f"{steps:,} step{'s' * (steps != 1)}"


def _ranges(steps: Iterable[int], among: Iterable[int] = ()) -> str:
    """Steps as ranges, without a gap `among` all that there are; of many, the outer ones."""
    steps = sorted(steps)
    place = {step: number for number, step in enumerate(sorted(among) or steps)}
    runs: list[list[int]] = []
    for step in steps:
        if runs and place[step] == place[runs[-1][-1]] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    words = [f"{run[0]:,}" + (f" to {run[-1]:,}" if len(run) > 1 else "") for run in runs]
    return ", ".join(words if len(words) <= 4 else [*words[:2], "...", words[-1]])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines; the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        words = [word.rjust(width) for word, width in zip(numbers, widths[1:], strict=True)]
        lines.append("   ".join([name.ljust(widths[0]), *words]).rstrip())
    return lines


# --- in a picture --------------------------------------------------------------------------------

_FARTHEST = 2.0  # that two numbers can be apart


def draw_comparison(comparison: Comparison, png: Path) -> None:
    """Loss and gradient norm of both runs, and below how far they are apart.

    Raises ConfigError without matplotlib, or if `png` cannot be written.
    """
    figure = new_figure(11, 6.4, layout="constrained")
    shape = {"height_ratios": [4, 3], "hspace": 0.08}
    panels = figure.subplots(2, 2, sharex=True, gridspec_kw=shape)
    pairs, names = comparison.pairs[:2], ("loss, nats a token", "gradient norm")
    top = max(1e-7, comparison.tolerance, *(pair.apart.max() for pair in pairs))
    for pair, name, (upper, lower) in zip(pairs, names, panels.T, strict=True):
        quieten(upper)
        quieten(lower)
        signs = _draw_values(upper, [told[pair.name] for told in comparison.told])
        signs += _draw_apart(lower, pair)
        lower.set_ylim(0, 4 * min(top, _FARTHEST))  # the same on both sides
        upper.set_title(name, loc="left", color=INK, fontsize=10)
        lower.set_xlabel("step", color=INK)
        if pair.parting is not None:
            for panel in (upper, lower):
                panel.axvline(pair.steps[pair.parting], color=_BEYOND, linewidth=1.0, zorder=0.9)
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.xaxis.set_major_formatter("{x:,.0f}")
    _draw_head(figure, comparison, signs)
    try:
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, format="png")
    except OSError as error:
        raise ConfigError(
            f"{png}: cannot be written ({error.strerror}).", fix="Give another --out."
        ) from None


def _draw_values(panel, runs: Sequence[dict[int, float]]) -> list:
    thick = {"color": BLUE, "linewidth": 2.2, "markersize": 7}
    thin = {"color": RED, "linewidth": 1.1, "markersize": 3.5, "linestyle": (0, (4, 3))}
    lines = []
    for values, look in zip(runs, (thick, thin), strict=True):
        steps = sorted(values)
        lines += panel.plot(steps, [values[step] for step in steps], marker=_marker(steps), **look)
    return lines


def _draw_apart(panel, pair: Pair) -> list:
    apart, beyond = np.minimum(pair.apart, _FARTHEST), pair.apart > pair.allowed
    whole = {"clip_on": False, "zorder": 3}  # at 0 too, where the panel ends
    look = {"linewidth": 0.9, "marker": _marker(apart), "markersize": 3}
    panel.plot(pair.steps, apart, color=FAINT, **look, **whole)
    size = 7 if _marker(apart) else 4
    panel.plot(pair.steps[beyond], apart[beyond], ".", color=_BEYOND, markersize=size, zorder=4)
    panel.set_yscale("symlog", linthresh=1e-8, linscale=0.5)  # logarithmic, and yet it has a 0
    where = f"at most {_shown(pair.apart.max())}"
    if pair.parting is not None:
        where = f"parts at step {pair.steps[pair.parting]:,}"
    panel.set_title(f"relative difference, {where}", loc="left", color=INK, fontsize=10)
    return [panel.axhline(pair.allowed, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), **whole)]


def _marker(points: Sequence) -> str:
    return "o" if len(points) < 30 else ""


def _draw_head(figure, comparison: Comparison, signs: list) -> None:
    a, b = (_short(str(path)) for path in comparison.paths)
    legend = figure.legend(
        signs,
        [f"A  {a}", f"B  {b}", "tolerance"],
        title=verdict(comparison),
        title_fontsize=12,
        loc="outside upper left",
        alignment="left",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    for text in (legend.get_title(), *legend.get_texts()):
        text.set(color=INK, parse_math=False)  # a $ in a path is a $


def _short(path: str, most: int = 48) -> str:
    return path if len(path) <= most else f"…{path[1 - most :]}"
