"""Plot of a fitted scaling law: its points, its isoFLOP curves, and the optimal sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite_lab.figure import FAINT, INK, new_figure, save_figure
from titanlite_lab.loss_curve import BLUE, RED, style_panel

_GREEN = "#3c8d5a"
_MAX_CURVES = 8  # sizes, and budgets, that are drawn as curves
_BEYOND = 100.0  # the optimal sizes are drawn up to this multiple of the largest measured FLOPs
_SAMPLES = 100

Array = np.ndarray


@dataclass(frozen=True)
class IsoFlopCurve:
    """Losses at one budget [k], and the parabola through them."""

    flops: float
    parameters: Array
    losses: Array
    parabola: Callable[[Array], Array]
    minimum: float | None  # the N of its lowest loss; None: outside the sizes


@dataclass(frozen=True)
class LawPicture:
    """What is drawn of a law; arrays [n] of the points it was fitted to."""

    title: str
    parameters_label: str  # what N counts
    parameters: Array
    tokens: Array
    losses: Array
    loss: Callable[[Array, Array], Array]  # (N, D) -> loss of the law
    optimal_size: Callable[[Array], Array]  # FLOPs -> N
    size_interval: Callable[[Array], tuple[Array, Array]]  # FLOPs -> 95 % interval of N
    isoflops: Sequence[IsoFlopCurve]
    envelope: tuple[Array, Array]  # (FLOPs, N) of approach 1, or empty arrays
    flops_per_parameter: float = 6.0

    @property
    def flops(self) -> Array:
        return self.flops_per_parameter * self.parameters * self.tokens


def draw_scaling_law(picture: LawPicture, out: Path) -> None:
    """Draw three panels: loss over FLOPs, loss over N at equal FLOPs, optimal N over FLOPs.

    Raises ConfigError without matplotlib, or if `out` cannot be written.
    """
    figure = new_figure(13.5, 4.4, layout="constrained")
    panels = figure.subplots(1, 3)
    colours = _colours(picture.parameters)
    _plot_losses(figure, panels[0], picture, colours)
    if picture.isoflops:
        _plot_isoflops(panels[1], picture)
    else:
        _plot_residuals(panels[1], picture, colours)
    _plot_optimal_sizes(panels[2], picture)
    for panel in panels:
        style_panel(panel)
        panel.minorticks_off()
    figure.suptitle(picture.title, x=0.01, ha="left", color=INK, fontsize=11, parse_math=False)
    save_figure(figure, out)


def _colours(parameters: Array) -> Any:
    """Colours by log N."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    norm = LogNorm(parameters.min(), parameters.max())
    return ScalarMappable(norm, colormaps["viridis"].resampled(256))


def _plot_losses(figure, panel, picture: LawPicture, colours) -> None:
    panel.scatter(
        picture.flops, picture.losses, s=12, color=colours.to_rgba(picture.parameters), zorder=3
    )
    sizes = np.unique(picture.parameters)
    for size in sizes[np.unique(np.linspace(0, len(sizes) - 1, _MAX_CURVES).astype(int))]:
        tokens = picture.tokens[picture.parameters == size]
        span = np.geomspace(tokens.min() / 2, tokens.max() * 2, _SAMPLES)
        flops = picture.flops_per_parameter * size * span
        panel.plot(flops, picture.loss(size, span), color=colours.to_rgba(size), linewidth=1.0)
    flops = np.geomspace(picture.flops.min() / 2, picture.flops.max() * 2, _SAMPLES)
    best = picture.optimal_size(flops)
    frontier = picture.loss(best, flops / (picture.flops_per_parameter * best))
    panel.plot(flops, frontier, color=RED, linewidth=1.6, label="optimum of the law")
    panel.set_xscale("log")
    panel.set_xlabel("training FLOPs, 6 N D", color=FAINT)
    panel.set_ylabel("loss, nats per token", color=FAINT)
    bar = figure.colorbar(colours, ax=panel, pad=0.01, aspect=35)
    bar.set_label(f"N: {picture.parameters_label}", color=FAINT, fontsize=8, parse_math=False)
    bar.ax.tick_params(colors=FAINT, labelsize=8, length=0)
    bar.outline.set_visible(False)
    panel.legend(frameon=False, labelcolor=INK, fontsize=9)


def _plot_isoflops(panel, picture: LawPicture) -> None:
    from matplotlib import colormaps

    chosen = np.unique(np.linspace(0, len(picture.isoflops) - 1, _MAX_CURVES).astype(int))
    for number, index in enumerate(chosen):
        curve = picture.isoflops[index]
        colour = colormaps["plasma"](0.85 * number / max(1, len(chosen) - 1))
        span = np.geomspace(curve.parameters.min(), curve.parameters.max(), _SAMPLES)
        tokens = curve.flops / (picture.flops_per_parameter * span)
        panel.scatter(curve.parameters, curve.losses, s=12, color=colour, zorder=3)
        label = f"{curve.flops:.2g} FLOPs"
        panel.plot(span, picture.loss(span, tokens), color=colour, linewidth=1.2, label=label)
        panel.plot(span, curve.parabola(span), color=colour, linewidth=1.0, linestyle=(0, (3, 2)))
        if curve.minimum is not None:
            low = float(curve.parabola(np.array([curve.minimum]))[0])
            panel.plot([curve.minimum], [low], "x", color=colour, markersize=7, zorder=4)
    panel.set_xscale("log")
    panel.set_title("equal FLOPs: law, and parabola (dashed)", loc="left", color=INK, fontsize=10)
    panel.set_xlabel("N", color=FAINT)
    panel.legend(frameon=False, labelcolor=INK, fontsize=7)


def _plot_residuals(panel, picture: LawPicture, colours) -> None:
    predicted = picture.loss(picture.parameters, picture.tokens)
    panel.scatter(
        predicted, picture.losses / predicted - 1, s=12, color=colours.to_rgba(picture.parameters)
    )
    panel.axhline(0, color=RED, linewidth=1.0)
    panel.set_title("measured loss / loss of the law - 1", loc="left", color=INK, fontsize=10)
    panel.set_xlabel("loss of the law", color=FAINT)


def _plot_optimal_sizes(panel, picture: LawPicture) -> None:
    measured = picture.flops.max()
    flops = np.geomspace(picture.flops.min(), _BEYOND * measured, _SAMPLES)
    low, high = picture.size_interval(flops)
    panel.fill_between(flops, low, high, color=RED, alpha=0.15, linewidth=0, label="95 % interval")
    panel.plot(flops, picture.optimal_size(flops), color=RED, linewidth=1.6, label="law")
    if len(picture.envelope[0]):
        style = {"color": _GREEN, "markersize": 2, "label": "approach 1: lowest curve"}
        panel.plot(*picture.envelope, ".", **style)
    minima = [(c.flops, c.minimum) for c in picture.isoflops if c.minimum is not None]
    if minima:
        style = {"color": BLUE, "markersize": 4.5, "label": "approach 2: parabolas"}
        panel.plot(*zip(*minima, strict=True), "o", **style)
    panel.axvline(measured, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
    panel.set_xscale("log")
    panel.set_yscale("log")
    title = "optimal N; dotted: largest run measured"
    panel.set_title(title, loc="left", color=INK, fontsize=10)
    panel.set_xlabel("training FLOPs, 6 N D", color=FAINT)
    panel.legend(frameon=False, labelcolor=INK, fontsize=8)
