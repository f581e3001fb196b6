"""Diagrams: the layers of packages, one training step, a checkpoint's states, the watchdog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pictures.canvas import (
    AMBER,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    LINE,
    RED,
    Box,
    draw_arrow,
    draw_box,
    new_canvas,
    save_png,
    write,
)
from titanlite.runtime.diagnosis import SILENT_FRACTION, STUCK_FRACTION
from titanlite.runtime.watchdog import CLEANUP_SECONDS, STACKS_SECONDS, TRACES_SECONDS

PURPOSE = {  # of each package, in two short lines at most
    "train": "one run",
    "extensions": "entry points of packages, --job.import",
    "scripts": "one command each",
    "job": "the checked configuration,\nthe builders of a run",
    "training": "engine, step, loop,\nperiodic actions",
    "guard": "judge, replay,\nroll-back",
    "meters": "replicas, stragglers,\nnorms, source losses",
    "parallelize": "TP, CP, PP, FSDP,\ncompile, Float8",
    "optim": "optimizers, LR,\nclipping",
    "checkpoint": "save, verify,\nload, convert",
    "runtime": "watchdog, lease,\nstop signals",
    "models": "plain single-device modules\nand their specs",
    "elastic": "any number of ranks",
    "data": "tokens, shards,\nsample order",
    "distributed": "mesh,\ncollectives",
    "kernels": "attention\nbackends",
    "metrics": "throughput,\nsinks",
    "storage": "folders,\nlocal or URL",
    "settings": "TOML to\ndataclasses",
    "config_reference": "--help and\nreference",
    "errors": "user errors,\nexit codes",
    "files": "untrusted\nJSON, TOML",
    "labels": "IGNORE_INDEX",
    "threads": "started on\nthe right GPU",
    "log": "one logger",
}


def draw_layers(layers: Sequence[set[str]], path: Path) -> None:
    """The packages by layer, from `layers` (lowest first), which the architecture test enforces."""
    rows = [sorted(layer) for layer in reversed(layers)]
    rows[0].append("scripts")
    width, row_height, gap = 10.0, 0.78, 0.16
    height = len(rows) * (row_height + gap) + 0.62
    figure, axes = new_canvas(width, height)
    write(axes, 0.2, height - 0.28, "Imports go down only", size=12, align="left", weight="bold")
    write(
        axes,
        2.45,
        height - 0.28,
        "never up, and never between two packages of one row (the lowest row excepted)",
        size=9,
        colour=FAINT,
        align="left",
    )
    colours = [GREY, GREY, AMBER, AMBER, BLUE, BLUE, GREEN, GREEN, GREY]
    for number, names in enumerate(rows):
        y = height - 0.55 - (number + 1) * (row_height + gap) + gap
        each = (width - 0.4 - 0.12 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            purpose = PURPOSE[name].split("\n")
            if each > 2.4:
                purpose = [" ".join(purpose)]
            x = 0.2 + place * (each + 0.12)
            colour = colours[min(number, len(colours) - 1)]
            draw_box(axes, Box(x, y, each, row_height, name, purpose, colour))
        if number:
            draw_arrow(axes, (width / 2, y + row_height + gap), (width / 2, y + row_height))
    save_png(figure, path)


# The boxes of a step in the order of the data flow: (column, title, lines, colour).
READ = [
    (0, "position", ["one integer: samples", "read since the start"], GREY),
    (1, "order", ["source, epoch, sample", "data/order.py"], BLUE),
    (2, "tokens [B, T+1]", ["shards, read by position", "a thread reads ahead"], BLUE),
    (3, "rank's slice", ["by dp rank, then by cp", "micro-batches"], BLUE),
    (4, "valid tokens", ["all-reduce, once a step", "over dp ranks"], AMBER),
]
COMPUTE = [
    (4, "forward", ["blocks; FSDP all-gather,", "TP, CP, PP sends"], AMBER),
    (3, "loss", ["sum / valid tokens", "the only division"], BLUE),
    (2, "backward", ["recompute activations", "every micro-batch"], BLUE),
    (1, "reduce", ["gradients summed in fp32", "FSDP reduce-scatter"], AMBER),
    (0, "clip", ["norm over all shards,", "by all-reduce"], AMBER),
]
UPDATE = [
    (0, "optimizer step", ["on this rank's shards", "lr = f(step)"], BLUE),
    (1, "advance", ["step + 1", "position + global batch"], GREY),
    (2, "agree", ["stop? NaN? save failed?", "async all-reduce(MAX)"], AMBER),
    (
        3,
        "periodic actions",
        ["log, validate, checkpoint,", "collect garbage, profile: each when due"],
        GREEN,
    ),
]


def draw_step(path: Path) -> None:
    """The data flow of one optimizer step on one rank, with its collectives."""
    figure, axes = new_canvas(10.0, 5.45)
    write(axes, 0.2, 5.2, "One optimizer step", size=12, align="left", weight="bold")
    write(axes, 2.2, 5.2, "amber: communication between ranks", size=9, colour=FAINT, align="left")
    wide, high, gap = 1.72, 0.95, 0.25
    rows = []
    for y, boxes in ((3.9, READ), (2.35, COMPUTE), (0.8, UPDATE)):
        row = []
        for column, title, lines, colour in boxes:
            width = 2 * wide + gap if title == "periodic actions" else wide
            row.append(Box(0.2 + column * (wide + gap), y, width, high, title, lines, colour))
            draw_box(axes, row[-1])
        rows.append(row)
    read, compute, update = rows
    for first, second in [*pairwise(read), *pairwise(update)]:
        draw_arrow(axes, first.right, second.left)
    for first, second in pairwise(compute):
        draw_arrow(axes, first.left, second.right)
    draw_arrow(axes, read[-1].bottom, compute[0].top)
    draw_arrow(axes, compute[-1].bottom, update[0].top)
    axes.plot([7.97, 7.97, 0.07, 0.07, 0.2], [0.8, 0.4, 0.4, 4.37, 4.37], color=FAINT, lw=1.1)
    draw_arrow(axes, (0.1, 4.37), (0.22, 4.37))
    write(axes, 4.0, 0.25, "next step", size=8.5, colour=FAINT)
    save_png(figure, path)


REMOVAL = ["local: one rename first,", "URL: manifest first"]  # then the files


def draw_commit(path: Path) -> None:
    """The states of a checkpoint folder `step-N`, from the first byte to its removal."""
    figure, axes = new_canvas(10.0, 4.6)
    write(axes, 0.2, 4.33, "States of a folder step-N", size=12, align="left", weight="bold")
    write(axes, 2.75, 4.33, "only the green one is ever loaded", size=9, colour=FAINT, align="left")
    wide, high = 1.85, 0.9
    writing = Box(0.3, 2.9, wide, high, "writing", ["every rank its shards,", "hashed on the way"])
    synced = Box(3.0, 2.9, wide, high, "synced", ["all files and names", "on disk (fsync)"])
    valid = Box(
        7.4,
        2.9,
        2.2,
        high,
        "valid checkpoint",
        ["manifest.json is there,", "written last, atomically"],
        GREEN,
    )
    failed = Box(0.3, 0.75, wide, high, "unfinished", ["no manifest:", "not a checkpoint"], GREY)
    damaged = Box(4.9, 0.75, wide, high, "set aside", ["step-N.aside-1", "kept: the last 4"], RED)
    removed = Box(7.75, 0.75, wide, high, "removed", REMOVAL, GREY)
    for box in (writing, synced, valid, failed, damaged, removed):
        draw_box(axes, box)
    draw_arrow(axes, writing.right, synced.left)
    draw_arrow(axes, synced.right, valid.left)
    write(axes, 6.12, 3.75, "metrics synced,", size=8, colour=FAINT)
    write(axes, 6.12, 3.58, "lease checked again", size=8, colour=FAINT)
    write(axes, 6.12, 3.1, "commit", size=9, weight="bold")
    draw_arrow(axes, writing.bottom, failed.top)
    draw_arrow(
        axes, (synced.x + 0.4, synced.y), (failed.x + wide - 0.1, failed.y + high), dashed=True
    )
    write(axes, 1.1, 2.3, "killed, disk full,", size=8, colour=FAINT, align="right")
    write(axes, 1.1, 2.13, "lease lost", size=8, colour=FAINT, align="right")
    draw_arrow(axes, (valid.x + 0.5, valid.y), (damaged.x + wide - 0.1, damaged.y + high))
    write(axes, 4.75, 2.3, "a hash differs when it is read,", size=8, colour=FAINT, align="left")
    write(axes, 4.75, 2.13, "or load_step went back before it", size=8, colour=FAINT, align="left")
    draw_arrow(axes, (removed.top[0], valid.y), removed.top)
    write(axes, 8.8, 2.3, "retention:", size=8, colour=FAINT, align="left")
    write(axes, 8.8, 2.13, "keep_latest_k", size=8, colour=FAINT, align="left")
    # The arrow from `failed` to `removed` passes below the box between them.
    axes.plot(
        [failed.bottom[0], failed.bottom[0], removed.bottom[0], removed.bottom[0]],
        [failed.y, 0.5, 0.5, 0.6],
        color=FAINT,
        lw=1.1,
        ls="--",
    )
    draw_arrow(axes, (removed.bottom[0], 0.55), removed.bottom)
    write(axes, 3.5, 0.62, "removed by this run, or by the next start", size=8, colour=FAINT)
    draw_arrow(axes, damaged.right, removed.left, dashed=True)
    write(axes, 7.25, 1.4, "keep_aside_k", size=8, colour=FAINT)
    write(
        axes,
        0.3,
        0.22,
        "Restart: the newest valid checkpoint is used; newer ones that fail are reported.",
        size=9,
        align="left",
    )
    save_png(figure, path)


LOSS_TIMEOUT = 100  # seconds; the default of comm.train_timeout_seconds
LOST_RANKS: Mapping[str, tuple[str, float]] = {  # how -> (how it is noticed, after seconds)
    "rank dies": ("the others' collectives fail; five rounds of heartbeats show who is lost", 5),
    "rank freezes": (
        f"no heartbeat for {SILENT_FRACTION:g} of the timeout",
        SILENT_FRACTION * LOSS_TIMEOUT,
    ),
    "rank hangs": (
        f"heartbeats, but no progress for {STUCK_FRACTION:g} of the timeout",
        STUCK_FRACTION * LOSS_TIMEOUT,
    ),
}


def draw_watchdog(path: Path) -> None:
    """What happens after a rank dies, freezes or hangs, on a time axis in seconds."""
    figure, axes = new_canvas(10.0, 4.8)
    write(axes, 0.2, 4.55, "A rank is lost", size=12, align="left", weight="bold")
    write(
        axes,
        1.75,
        4.55,
        f"comm.train_timeout_seconds = {LOSS_TIMEOUT}; every rank sends a heartbeat each second",
        size=9,
        colour=FAINT,
        align="left",
    )
    left, right, first_row = 2.1, 9.6, 3.6
    scale = (right - left) / 105

    def x(seconds: float) -> float:
        return left + scale * seconds

    report = STACKS_SECONDS + TRACES_SECONDS
    for number, (name, (reason, found)) in enumerate(LOST_RANKS.items()):
        y = first_row - 0.85 * number
        write(axes, 0.2, y, name, size=9.5, align="left", weight="bold")
        bars = [(0.0, found, BLUE), (found, report, AMBER)]
        if number == 0:  # the main threads are free, and close what is open
            bars.append((found + report, CLEANUP_SECONDS, RED))
        for start, length, colour in bars:
            axes.barh(y, scale * length, 0.3, x(start), color=colour, edgecolor=LINE, linewidth=0.8)
        axes.plot([x(found)] * 2, [y - 0.22, y + 0.22], color=INK, lw=1.6)
        write(axes, x(0), y - 0.32, reason, size=8, colour=FAINT, align="left")
    axis = first_row - 0.85 * len(LOST_RANKS) + 0.2
    for second in range(0, 101, 20):
        axes.plot(
            [x(second)] * 2, [axis - 0.05, first_row + 0.35], color="#e2e5e9", lw=0.8, zorder=0
        )
        write(axes, x(second), axis - 0.17, f"{second} s", size=8, colour=FAINT)
    key = [
        (0.2, 0.55, BLUE, "the others wait"),
        (0.2, 0.25, AMBER, f"report, stacks/, comm_traces/, exit code 1 (at most {report} s)"),
        (5.2, 0.25, RED, f"files closed first (at most {CLEANUP_SECONDS} s)"),
    ]
    for place, y, colour, text in key:
        axes.barh(y, 0.22, 0.18, place, color=colour, edgecolor=LINE, linewidth=0.8)
        write(axes, place + 0.3, y, text, size=8.5, align="left")
    axes.plot([5.31] * 2, [0.45, 0.65], color=INK, lw=1.6)
    write(axes, 5.5, 0.55, "the others notice it", size=8.5, align="left")
    save_png(figure, path)
