"""What a rank of an 8B model holds under each memory option, by the planner's estimates."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pictures.canvas import FAINT, INK, save_png
from titanlite.job import read_job
from titanlite_planner.memory.job import estimate_job_memory

RANKS = 8
GIB = 2**30
NONE = ("--activation_checkpoint.mode", "none")
FULL = ("--activation_checkpoint.mode", "full")
OPTIONS = {  # label -> overrides of llama3_8b
    "no activation checkpointing": NONE,
    'selective "2" (the default)': (),
    'selective "op"': ("--activation_checkpoint.selective_ac_option", "op"),
    "full activation checkpointing": FULL,
    "activations offloaded": (*NONE, "--activation_checkpoint.offload", "true"),
    "full + logits in chunks of 1,024": (*FULL, "--loss.chunk_tokens", "1024"),
    "full + 8-bit optimizer state": (*FULL, "--optimizer.state_dtype", "8bit"),
    "full + bf16 params and state": (*FULL, "--training.dtype", "bfloat16"),
    "full + optimizer step in backward": (
        *FULL,
        "--optimizer.early_step_in_backward",
        "true",
        "--training.max_norm",
        "0",
    ),
    "full + optimizer state on the host": (*FULL, "--optimizer.offload", "true"),
    "full + TP 2": (*FULL, "--parallelism.tensor_parallel_degree", "2"),
    "full + CP 2": (*FULL, "--parallelism.context_parallel_degree", "2"),
}
COLOURS = ("#3f6ea8", "#7fa6d6", "#b9d0ec", "#e2a94f", "#5da271", "#c96f62")


def draw_memory(path: Path) -> None:
    """Stacked bars, one for each option, in GiB on the fullest of 8 ranks."""
    rows = {}
    for label, overrides in OPTIONS.items():
        argv = ["--job.config_file", "llama3_8b", f"--job.check_ranks={RANKS}"]
        argv += ["--training.global_batch_size", "-1"]  # no accumulation
        job = read_job([*argv, *overrides], RANKS, here=False)
        worst = estimate_job_memory(job).worst
        rows[label] = {
            "parameters": worst.parameters,
            "gradients": worst.gradients,
            "optimizer_state": worst.optimizer_state,
            "gathered": worst.gathered + worst.unsharded_gradients,
            "activations": worst.activations,
            "logits": worst.logits,
        }
    figure = Figure(figsize=(10, 4.9), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.285, 0.12, 0.66, 0.70))
    labels = list(rows)[::-1]
    starts = [0.0] * len(labels)
    parts = [part for part in next(iter(rows.values())) if any(row[part] for row in rows.values())]
    for part, colour in zip(parts, COLOURS, strict=True):
        sizes = [rows[label][part] / GIB for label in labels]
        axes.barh(labels, sizes, 0.62, starts, color=colour, label=part.replace("_", " "))
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, total in enumerate(starts):
        axes.text(total + 0.6, place, f"{total:.0f}", va="center", fontsize=8.5, color=INK)
    axes.set_xlabel("GiB on the fullest rank (estimate)", fontsize=9, color=FAINT)
    axes.set_xlim(0, max(starts) * 1.08)
    axes.tick_params(labelsize=9, length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.xaxis.grid(True, color="#e6e9ed")
    axes.set_axisbelow(True)
    figure.text(0.015, 0.95, "Memory by option", fontsize=12, weight="bold", color=INK)
    figure.text(
        0.215,
        0.951,
        f"Llama 3 8B on {RANKS} GPUs, FSDP, 1 x 8,192 tokens a rank, bf16 compute, fp32 params",
        fontsize=9,
        color=FAINT,
    )
    figure.legend(
        loc="upper left",
        bbox_to_anchor=(0.275, 0.93),
        ncols=6,
        frameon=False,
        fontsize=9,
        handlelength=1,
        columnspacing=1.2,
    )
    save_png(figure, path)
