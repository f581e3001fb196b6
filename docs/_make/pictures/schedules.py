"""Draw learning rate, weight decay and batch size of the examples of a how-to guide."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pictures.canvas import FAINT, INK, save_png
from titanlite.errors import ConfigError
from titanlite.files import parse_toml
from titanlite.job import JobConfig
from titanlite.job.checks import build_job_schedule
from titanlite.optim import StepSpan
from titanlite.settings import build_dataclass, raise_together
from titanlite.training.batch_schedule import build_batch_schedule

POINTS = 400  # of a curve
LR, WEIGHT_DECAY, BATCH = "#3f6ea8", "#b9793a", "#5da271"


@dataclass
class Curves:
    """What changes during a run, at some of its steps."""

    tokens: list[float]  # in billions
    lr: list[float]
    weight_decay: list[float]
    batch: list[float]
    group_lr: list[list[float]]  # of each entry of optimizer.groups


def read_examples(page: Path) -> dict[str, JobConfig]:
    """The TOML blocks of a page, by the headings above them; raises ConfigError."""
    found = re.findall(r"^## ([^\n]*)\n+```toml\n(.*?)```", page.read_text("utf-8"), re.M | re.S)
    if not found:
        raise ConfigError(f"{page}: has no examples.")
    examples = {}
    for heading, text in found:
        examples[heading], problems = build_dataclass(JobConfig, parse_toml(text))
        raise_together(problems)
    return examples


def compute_curves(config: JobConfig) -> Curves:
    """The curves of a job whose global batch does not depend on the layout."""
    batches = build_batch_schedule(config.training, config.training.global_batch_size)
    schedule, steps = build_job_schedule(config, batches), config.training.steps
    section = config.optimizer
    groups = [(g.lr_factor, schedule.replace(g.schedule_overrides())) for g in section.groups]
    curves = Curves([], [], [], [], [[] for _ in groups])
    for step in sorted({n * (steps - 1) // (POINTS - 1) for n in range(POINTS)}):
        tokens = batches.tokens_after(step)
        batch = batches.batch_at(tokens)
        progress = StepSpan(step, tokens, batch * batches.seq_len)
        curves.tokens.append(tokens / 1e9)
        curves.lr.append(section.lr * schedule.lr_factor(progress))
        decay = section.weight_decay * schedule.weight_decay_factor(progress)
        curves.weight_decay.append(decay)
        curves.batch.append(batch)
        for (factor, own), values in zip(groups, curves.group_lr, strict=True):
            values.append(section.lr * factor * own.lr_factor(progress))
    return curves


def draw_schedules(page: Path, path: Path) -> None:
    """One column for each example; tokens in billions along the bottom."""
    examples = read_examples(page)
    figure = Figure(figsize=(11, 5.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(3, len(examples), sharex="col", sharey="row")
    for column, (heading, config) in enumerate(examples.items()):
        curves = compute_curves(config)
        lr, weight_decay, batch = rows[:, column]
        lr.plot(curves.tokens, curves.lr, color=LR, linewidth=1.8)
        for values in curves.group_lr:
            lr.plot(curves.tokens, values, color=LR, linewidth=1.4, linestyle="--")
        weight_decay.plot(curves.tokens, curves.weight_decay, color=WEIGHT_DECAY, linewidth=1.8)
        batch.step(curves.tokens, curves.batch, color=BATCH, linewidth=1.8, where="post")
        lr.set_title(heading.replace(", with ", ",\nwith "), fontsize=9.5, color=INK, loc="left")
        batch.set_xlabel("tokens (billions)", fontsize=9, color=FAINT)
        for axes in (lr, weight_decay, batch):
            _style(axes)
    for axes, label in zip(
        rows[:, 0], ("learning rate", "weight decay", "batch (sequences)"), strict=True
    ):
        axes.set_ylabel(label, fontsize=9, color=FAINT)
    save_png(figure, path)


def _style(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.tick_params(labelsize=8, colors=FAINT)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    axes.yaxis.get_offset_text().set(color=FAINT, fontsize=8)
    axes.grid(True, color="#e6e9ed")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
