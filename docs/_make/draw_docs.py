"""Draw the pictures of the documentation: python docs/_make/draw_docs.py [NAME …]

layers, step, commit and watchdog are diagrams; memory is estimated; schedules are those of a guide;
layout is drawn by the planner, mup_check and scaling_law by titanlite_lab. `losses` and
`mup_transfer` train small models on the CPU first (some minutes), and store what they measured
beside the picture, as does `rewards`, which needs the run of docs/tutorial/base-to-chat.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pictures.canvas import PALETTE_COLOURS
from pictures.diagrams import draw_commit, draw_layers, draw_step, draw_watchdog
from pictures.losses import draw_losses, train_all
from pictures.memory import draw_memory
from pictures.mup import JOB, draw_transfer, train_widths
from pictures.rewards import draw_rewards, read_rewards
from pictures.schedules import draw_schedules
from PIL import Image

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "pictures"
LAYOUT = (
    "llama3_8b", "--ranks", "16", "--training.local_batch_size", "8",
    "--parallelism.tensor_parallel_degree", "2", "--parallelism.pipeline_parallel_degree", "4",
    "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B",
)  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PICTURES)}")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    args = parser.parse_args(argv)
    names = args.names or list(PICTURES)
    if unknown := set(names) - set(PICTURES):
        parser.error(f"no picture is named {', '.join(sorted(unknown))}")
    for name in names:
        path = args.out / f"{name}.png"
        PICTURES[name](path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


def _layers(path: Path) -> None:
    draw_layers(read_layers(ROOT / "tests" / "test_architecture.py"), path)


def read_layers(test: Path) -> list[set[str]]:
    """LAYERS of the architecture test, lowest first, without importing the test."""
    for node in ast.parse(test.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS":
            return ast.literal_eval(node.value)
    raise SystemExit(f"{test}: LAYERS is not there")


def _memory(path: Path) -> None:
    draw_memory(path)


def _schedules(path: Path) -> None:
    draw_schedules(ROOT / "docs" / "how-to" / "choose-a-schedule.md", path)


def _losses(path: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        losses = train_all(ROOT, Path(work))
    path.with_suffix(".json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    draw_losses(losses, path)


def _layout(path: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "layout"
        command = [sys.executable, "-m", "titanlite_planner", "draw", *LAYOUT, "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        image = Image.open(out.with_suffix(".png")).convert("RGB")
        image.thumbnail((1600, 1600))
        image.quantize(PALETTE_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def _mup_check(path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "titanlite_lab",
        "check-mup",
        *JOB,
        "--optimizer.lr=2e-3",
        "--out",
    ]
    subprocess.run([*command, str(path)], cwd=ROOT, check=True)


def _mup_transfer(path: Path) -> None:
    losses = train_widths(ROOT)
    path.with_suffix(".json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    draw_transfer(losses, path)


def _rewards(path: Path) -> None:
    rewards = read_rewards(ROOT / "outputs" / "sums" / "grpo")
    path.with_suffix(".json").write_text(json.dumps(rewards, indent=1) + "\n", encoding="utf-8")
    draw_rewards(rewards, path)


def _scaling_law(path: Path) -> None:
    table = "extras/titanlite_lab/tests/data/chinchilla.csv"
    command = [
        sys.executable,
        "-m",
        "titanlite_lab",
        "scaling-laws",
        "fit",
        table,
        "--flops",
        "flops",
    ]
    command += ["--drop-highest", "5", "--picture", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    image = Image.open(path).convert("RGB")
    image.quantize(PALETTE_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


PICTURES: dict[str, Callable[[Path], None]] = {
    "layers": _layers,
    "step": draw_step,
    "commit": draw_commit,
    "watchdog": draw_watchdog,
    "memory": _memory,
    "schedules": _schedules,
    "layout": _layout,
    "losses": _losses,
    "mup_check": _mup_check,
    "mup_transfer": _mup_transfer,
    "scaling_law": _scaling_law,
    "rewards": _rewards,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
