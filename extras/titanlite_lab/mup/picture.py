"""Plot of a coordinate check: the change of each module's output against the width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlite_lab.figure import FAINT, INK, new_figure, save_figure
from titanlite_lab.loss_curve import style_panel

_COLOURS = ("#2f6fb2", "#d1495b", "#3c8d5a", "#8e5ea2", "#c48a00", "#2a9d8f", "#6d597a")


def draw_coordinate_check(
    panels: Mapping[str, Mapping[str, Sequence[float]]], widths: Sequence[int], out: Path
) -> None:
    """One panel for each title: module -> change at each width.

    Raises ConfigError without matplotlib, or if `out` cannot be written.
    """
    figure = new_figure(1.6 + 4.2 * len(panels), 4.0, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    kinds = list(dict.fromkeys(_kind(m) for modules in panels.values() for m in modules))
    colours = {kind: _COLOURS[n % len(_COLOURS)] for n, kind in enumerate(kinds)}
    for panel, (title, modules) in zip(axes, panels.items(), strict=True):
        labelled = set()
        for module, change in modules.items():
            kind = _kind(module)
            label = None if kind in labelled else kind
            labelled.add(kind)
            panel.loglog(
                widths, change, marker="o", markersize=3.5, color=colours[kind], label=label
            )
        style_panel(panel)
        panel.minorticks_off()
        panel.set_xticks(widths, [str(width) for width in widths])
        panel.set_title(title, loc="left", color=INK, fontsize=11)
        panel.set_xlabel("width (dim)", color=FAINT)
    axes[0].set_ylabel("mean absolute change since the start", color=FAINT)
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, labelcolor=INK, fontsize=9, loc="outside right upper"
    )
    save_figure(figure, out)


def _kind(module: str) -> str:
    """What a module is in every block: its name without the index of the block."""
    parts = [part for part in module.split(".") if not part.isdigit()]
    return ".".join(parts[1:]) or "block" if len(parts) < len(module.split(".")) else module
