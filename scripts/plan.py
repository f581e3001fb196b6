"""Find the fastest layout of a model on a cluster, with its memory, time and cost.

  python scripts/plan.py --model llama3/70B --gpus 512xH100 --seq-len 8192 --global-batch 1024
  python scripts/plan.py --job RUN.toml --gpus 64xA100 [--section.key value ...]

It needs no GPU. Settings override those of the TOML, as for train.py; --fix fixes what the search
chooses. --out writes the job's TOML, the ten best layouts as JSON, and pictures.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.planning.plan_changes import ChangedAnswer, changed_answers
from titanlite.planning.plan_files import write_plan
from titanlite.planning.plan_report import report_lines
from titanlite.planning.plan_request import PRECISION_OPTIONS, PlanArguments, read_plan_request
from titanlite.planning.search import LayoutSearch, PlannedStep
from titanlite.plots.job_layout import computed_timelines, draw_job_layout
from titanlite.plots.plan import draw_memory_time, draw_stacked_bars
from titanlite.runtime.out_of_memory import GIB

CONFIGS = Path(__file__).parents[1] / "train_configs"
KEPT = 10  # layouts in the table


def main(argv: list[str]) -> int:
    arguments, overrides = _parser().parse_known_args(argv)
    try:
        request = read_plan_request(_plan_arguments(arguments, overrides), CONFIGS)
        search = LayoutSearch(
            request.space, request.base, request.cluster, request.usable_bytes, KEPT
        )
        result = search.run()
        changes: list[ChangedAnswer] = []
        if not arguments.quick:
            changes += changed_answers(request, result.best[0], search.bounds)
        print(*report_lines(request, result, changes), sep="\n")
        if arguments.out is not None:
            files = write_plan(request, result, arguments.out)
            print("", *files, *_draw(search, result.best, arguments.out), sep="\n")
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE


def _draw(search: LayoutSearch, steps: list[PlannedStep], folder: Path) -> list[Path]:
    """Write the pictures of a plan."""
    labels = [f"{number}  {step.choice.frame.degrees}" for number, step in enumerate(steps, 1)]
    usable = search.usable_bytes / GIB
    memory = {
        label: {part: size / GIB for part, size in step.memory.parts.items()}
        for label, step in zip(labels, steps, strict=True)
    }
    time = {label: step.time.parts for label, step in zip(labels, steps, strict=True)}
    points = {
        label: [(size / GIB, seconds) for size, seconds in search.points(step)]
        for label, step in zip(labels, steps, strict=True)
    }
    files = [folder / f"{name}.png" for name in ("memory", "time", "memory_time")]
    draw_stacked_bars(
        "Memory of the worst rank at its peak", memory, "GiB", files[0], ("usable memory", usable)
    )
    draw_stacked_bars("Time of a step", time, "seconds", files[1])
    draw_memory_time("Recomputation and offload: memory against time", points, usable, files[2])
    job = steps[0].job
    return files + draw_job_layout(job, computed_timelines(job), folder / "layout")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan = parser.add_argument_group("what to plan")
    plan.add_argument("--model", help="a model family and its flavor, such as llama3/70B")
    plan.add_argument("--job", help="a TOML of train.py; its layout is not used")
    plan.add_argument("--gpus", help='a number and a GPU or machine, such as "512xH100"')
    plan.add_argument("--hardware", help="a TOML with GPUs and machines of your own")
    plan.add_argument("--seq-len", help="tokens of a sequence (default: of --job)")
    plan.add_argument("--global-batch", help="sequences of one step (default: of --job)")
    plan.add_argument(
        "--tokens", help="tokens of the whole training, for days and cost (default: 1e12)"
    )
    plan.add_argument(
        "--precision",
        default="bf16",
        help=f"of the matmuls: {', '.join(PRECISION_OPTIONS)} (default: bf16)",
    )
    plan.add_argument(
        "--reserve", default="5", help="percent of a GPU's memory to leave free (default: 5)"
    )
    plan.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix what is searched, such as tensor=8 or recompute=full; may be repeated",
    )
    plan.add_argument("--quick", action="store_true", help="leave out what would change the answer")
    plan.add_argument("--out", type=Path, help="folder for the TOML, the table and the pictures")
    return parser


def _plan_arguments(arguments: argparse.Namespace, overrides: list[str]) -> PlanArguments:
    names = ("gpus", "model", "job", "seq_len", "global_batch", "tokens", "precision", "reserve")
    given = {name: getattr(arguments, name) for name in (*names, "fix", "hardware")}
    return PlanArguments(**given, overrides=overrides)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the script without a traceback
    sys.exit(main(sys.argv[1:]))
