"""Draw the mean reward of the tutorial "From base model to chat model"."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pictures.canvas import FAINT, INK, save_png
from titanlite_lab.run_metrics import read_metrics


def read_rewards(run: Path) -> dict[str, float]:
    """Step -> mean reward of the completions that the step was taken on."""
    events = read_metrics(run / "metrics.jsonl")[1]
    return {str(e["step"]): round(e["reward"], 4) for e in events if e["event"] == "rollout"}


def draw_rewards(rewards: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(8, 3.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.085, 0.15, 0.89, 0.7))
    axes.plot([int(step) for step in rewards], [*rewards.values()], color="#3f6ea8", marker=".")
    axes.axhline(0.9, color=FAINT, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, 1)
    axes.set_xlabel("step", fontsize=9, color=FAINT)
    axes.set_ylabel("mean reward", fontsize=9, color=FAINT)
    axes.tick_params(labelsize=8.5, colors=FAINT)
    axes.grid(True, color="#e6e9ed")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    title = "Share of right answers while GRPO trains, 256 answers a point"
    figure.text(0.015, 0.91, title, fontsize=11, weight="bold", color=INK)
    save_png(figure, path)
