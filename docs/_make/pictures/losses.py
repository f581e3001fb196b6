"""Train the same job under eight layouts on the CPU, and draw their losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pictures.canvas import FAINT, INK, save_png
from titanlite_lab.run_metrics import read_metrics

STEPS = 30
COLOURS = ("#1d2733", "#3f6ea8", "#5da271", "#e2a94f", "#c96f62", "#8a63b0", "#4ba3a8", "#b0876a")
SHARD, TENSOR = "data_parallel_shard_degree", "tensor_parallel_degree"
PIPELINE, CONTEXT = "pipeline_parallel_degree", "context_parallel_degree"
LAYOUTS: dict[str, dict[str, int]] = {  # label -> degrees of [parallelism]
    "one process": {},
    "FSDP 2": {SHARD: 2},
    "TP 2": {TENSOR: 2},
    "PP 2": {PIPELINE: 2},
    "CP 2": {CONTEXT: 2},
    "FSDP 2 x TP 2": {SHARD: 2, TENSOR: 2},
    "FSDP 2 x PP 2": {SHARD: 2, PIPELINE: 2},
    "TP 2 x CP 2": {TENSOR: 2, CONTEXT: 2},
}
JOB = (
    "--training.steps",
    str(STEPS),
    "--training.mixed_precision_param",
    "float32",
    "--training.global_batch_size",
    "8",
    "--optimizer.lr",
    "1e-3",
    "--metrics.log_freq",
    "1",
    "--lr_scheduler.warmup_steps",
    "5",
    "--job.device",
    "cpu",
)


def train_all(root: Path, work: Path) -> dict[str, list[float]]:
    """Losses by layout; the corpus is the source of the package titanlite, as bytes."""
    corpus = work / "corpus"
    prepare = [
        sys.executable,
        "scripts/prepare_data.py",
        "titanlite/**/*.py",
        "--tokenizer",
        "bytes",
    ]
    _run([*prepare, "--out", str(corpus)], root)
    losses = {}
    for label, degrees in LAYOUTS.items():
        out, ranks = work / label.replace(" ", ""), 1
        overrides = [f"--job.dump_folder={out}"]
        overrides += [f'--data.sources=[{{name = "text", path = "{corpus}/train"}}]']
        for key, degree in degrees.items():
            overrides += [f"--parallelism.{key}", str(degree)]
            ranks *= degree
        launch = ["bash", "scripts/launch.sh", str(ranks), "train.py"]
        config = ["--job.config_file", "debug_model"]
        _run([*launch, *config, *JOB, *overrides], root)
        losses[label] = [line["loss"] for line in read_metrics(out / "metrics.jsonl")[0]]
        print(f"{label}: {losses[label][0]:.6f} to {losses[label][-1]:.6f}", flush=True)
    return losses


def _run(command: list[str], root: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    subprocess.run(command, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)


def largest_difference(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of any loss from that of one process."""
    reference, *others = losses.values()
    return max(abs(b / a - 1) for other in others for a, b in zip(reference, other, strict=True))


def draw_losses(losses: dict[str, list[float]], path: Path) -> None:
    """The curves above, which coincide; their differences from one process below."""
    figure = Figure(figsize=(10, 4.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    upper = figure.add_axes((0.075, 0.42, 0.9, 0.46))
    lower = figure.add_axes((0.075, 0.11, 0.9, 0.25), sharex=upper)
    reference = next(iter(losses.values()))
    steps = range(1, len(reference) + 1)
    for number, (label, curve) in enumerate(losses.items()):
        width = 1.2 + 1.3 * (len(losses) - 1 - number)  # nested, so that all of them are visible
        name = label if number else f"{label} (reference)"
        upper.plot(steps, curve, color=COLOURS[number], linewidth=width, label=name)
        if number:
            difference = [abs(b / a - 1) for a, b in zip(reference, curve, strict=True)]
            floor = [max(value, 1e-8) for value in difference]
            lower.semilogy(steps, floor, color=COLOURS[number], linewidth=1.2)
    worst = largest_difference(losses)
    figure.text(
        0.015, 0.935, "Eight layouts, one loss curve", fontsize=12, weight="bold", color=INK
    )
    figure.text(
        0.315,
        0.936,
        f"largest relative difference {worst:.1e} (fp32, AdamW; curves drawn in different widths)",
        fontsize=9.5,
        color=FAINT,
    )
    upper.set_ylabel("loss (nats/token)", fontsize=9, color=FAINT)
    legend = upper.legend(ncols=4, frameon=False, fontsize=9, loc="upper right")
    for handle in legend.get_lines():
        handle.set_linewidth(3)
    lower.set_ylabel("relative difference\nfrom one process", fontsize=9, color=FAINT)
    lower.set_ylim(1e-8, 1e-3)
    lower.axhline(1e-5, color=FAINT, linewidth=0.8, linestyle="--")
    lower.text(1, 1.6e-5, "limit of the tests", fontsize=8, color=FAINT)
    lower.set_xlabel("step", fontsize=9, color=FAINT)
    for axes in (upper, lower):
        axes.tick_params(labelsize=8.5, colors=FAINT)
        axes.grid(True, color="#e6e9ed")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    save_png(figure, path)
