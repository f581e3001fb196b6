"""Train small models at several learning rates and widths, with muP and without, and draw it."""

from __future__ import annotations

from pathlib import Path

import torch

from titanlite.job import read_job
from titanlite.models.mup import BaseWidths, MupConfig, base_sizes, width_scales
from titanlite.optim import build_optimizer
from titanlite.parallelize.weight_init import init_weights
from titanlite_lab.figure import FAINT, INK, new_figure, save_figure
from titanlite_lab.loss_curve import style_panel

STEPS, SEQUENCES, TOKENS, LAST = 150, 8, 64, 20  # the loss is the mean over the last steps
WIDTHS, LEARNING_RATES = (32, 64, 128), tuple(2.0**-n for n in (10, 9, 8, 7, 6, 5, 4))
BASE = BaseWidths(dim=32, n_heads=2, hidden_dim=96, n_kv_heads=2)
JOB = (
    *("--model.n_layers=2", "--model.dim=32", "--model.n_heads=2", "--model.n_kv_heads=2"),
    *(
        "--model.hidden_dim=96",
        "--model.vocab_size=256",
        "--training.mixed_precision_param=float32",
    ),
)
COLOURS = ("#9ec3e6", "#3f83c4", "#1d2733")
Losses = dict[str, dict[str, list[float]]]  # with or without muP -> dim -> loss at each rate


def train_widths(root: Path) -> Losses:
    """Losses on the source of the package titanlite, as bytes."""
    files = sorted((root / "titanlite").rglob("*.py"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    losses: Losses = {}
    for title, config in (("with muP", MupConfig(BASE)), ("without", MupConfig())):
        for width in WIDTHS:
            of_rates = [_final_loss(text, config, width, lr) for lr in LEARNING_RATES]
            losses.setdefault(title, {})[str(width)] = of_rates
            print(title, width, " ".join(f"{loss:.3f}" for loss in of_rates), flush=True)
    return losses


def _final_loss(text: torch.Tensor, config: MupConfig, width: int, lr: float) -> float:
    job, factor = read_job([*JOB, f"--optimizer.lr={lr}"], 1, here=False), width // 32
    wide = BaseWidths(width, 2 * factor, 96 * factor, 2 * factor)
    sizes = base_sizes(wide, job.sizes)
    widths = width_scales(config, job.spec, sizes)
    model = job.spec.build(sizes)
    init_weights(model, job.spec, sizes, 0, widths)
    optimizer = build_optimizer(model, job.config.optimizer, widths=widths)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        starts = torch.randint(len(text) - TOKENS, (SEQUENCES,), generator=generator)
        rows = torch.stack([text[start : start + TOKENS + 1] for start in starts])
        loss = model(rows[:, :-1], labels=rows[:, 1:]) / (SEQUENCES * TOKENS)
        loss.backward()
        optimizer.set_lr(lr * min(1.0, (step + 1) / 10))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST


def draw_transfer(losses: Losses, path: Path) -> None:
    """Final loss against the learning rate, one curve for each width."""
    figure = new_figure(10, 4, layout="constrained")
    panels = figure.subplots(1, len(losses), sharey=True)
    for panel, (title, widths) in zip(panels, losses.items(), strict=True):
        for colour, (width, of_rates) in zip(COLOURS, widths.items(), strict=True):
            panel.plot(LEARNING_RATES, of_rates, color=colour, marker="o", label=f"dim {width}")
            best = min(range(len(of_rates)), key=of_rates.__getitem__)
            panel.plot(LEARNING_RATES[best], of_rates[best], "*", color=colour, markersize=15)
        panel.set_xscale("log", base=2)
        panel.set_title(title, loc="left", color=INK, fontsize=11)
        panel.set_xlabel("learning rate", color=FAINT)
        style_panel(panel)
    panels[0].set_ylabel(f"loss after {STEPS} steps", color=FAINT)
    panels[0].set_ylim(top=min(4.0, panels[0].get_ylim()[1]))
    panels[-1].legend(frameon=False, labelcolor=INK, fontsize=9)
    save_figure(figure, path)
