"""Find the fastest layout of a model on a cluster, with its memory, time and cost.

  titanlite plan --model llama3/70B --gpus 512xH100 --seq-len 8192 --global-batch 1024
  titanlite plan --job RUN.toml --gpus 64xA100 [--section.key value ...]
  titanlite plan --rows runs.csv [--out predictions.csv] [--table]
  titanlite plan --calibrate RUN [RUN ...] --gpus 8xH100 [--out efficiency.toml]

It needs no GPU. Settings override those of the TOML, as for train.py; --fix fixes what the search
chooses. --out writes the recommended layout as the job's TOML, the layouts shown as JSON, and
pictures. --rows predicts measured runs, and --table compares the predictions. --calibrate fits the
efficiency of the GPUs to runs of your own, by their job.dump_folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError, UserError, format_error
from titanlite.runtime.out_of_memory import GIB
from titanlite.settings import raise_together
from titanlite_planner.accuracy.calibrate import calibrate, calibration_report, read_measured_run
from titanlite_planner.accuracy.row_errors import error_table
from titanlite_planner.accuracy.rows import predict_rows, read_rows, write_predictions
from titanlite_planner.hardware import parse_gpus
from titanlite_planner.pictures.job_layout import computed_timelines, draw_job_layout
from titanlite_planner.pictures.plan import draw_memory_time, draw_stacked_bars
from titanlite_planner.plan.alternatives import find_alternatives
from titanlite_planner.plan.changes import ChangedAnswer, changed_answers
from titanlite_planner.plan.files import write_plan, write_text_files
from titanlite_planner.plan.report import MEMORY_PARTS, part_title, report_lines
from titanlite_planner.plan.request import PRECISION_OPTIONS, PlanArguments, read_plan_request
from titanlite_planner.plan.search import LayoutSearch, PlannedLayout


def main(argv: list[str]) -> int:
    arguments, overrides = _parser().parse_known_args(argv)
    try:
        if arguments.rows is not None:
            _check_mode("--rows", arguments, overrides, ("rows", "out", "table"))
            _predict(arguments)
        elif arguments.calibrate is not None:
            _check_mode(
                "--calibrate", arguments, overrides, ("calibrate", "gpus", "hardware", "out")
            )
            _calibrate(arguments)
        elif arguments.table:
            raise ConfigError("--table: needs the measured runs.", fix="Give them with --rows.")
        else:
            _plan(arguments, overrides)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE


def _check_mode(
    mode: str, arguments: argparse.Namespace, overrides: list[str], used: tuple[str, ...]
) -> None:
    """Refuse options that have no effect with `mode`."""
    defaults = vars(_parser().parse_args([]))
    unused = [
        f"--{name.replace('_', '-')}"
        for name, default in defaults.items()
        if name not in used and getattr(arguments, name) != default
    ]
    unused += [text for text in overrides if text.startswith("--")]
    raise_together([ConfigError(f"{option}: has no effect with {mode}.") for option in unused])


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> None:
    names = [field.name for field in dataclasses.fields(PlanArguments) if field.name != "overrides"]
    given = {name: getattr(arguments, name) for name in names}
    request = read_plan_request(PlanArguments(**given, overrides=overrides))
    gc.freeze()  # of torch's objects, which each collection during the search would visit
    search = LayoutSearch(request.space, request.target, 1)
    layouts = find_alternatives(search)
    steps = [layout.step for layout in layouts]
    changes: list[ChangedAnswer] = []
    if not arguments.quick:
        changes += changed_answers(request, steps[0], search.bounds, search.estimates)
    print(*report_lines(request, search.counts, layouts, changes), sep="\n")
    if arguments.out is not None:
        print("", *write_plan(request, layouts, arguments.out), sep="\n")
        print(*_draw(search, steps, arguments.out), sep="\n")


def _draw(search: LayoutSearch, steps: list[PlannedLayout], folder: Path) -> list[Path]:
    """Write the pictures of a plan."""
    labels = [f"{number}  {step.choice.frame.degrees}" for number, step in enumerate(steps, 1)]
    usable = search.target.usable_bytes / GIB
    memory = {  # all parts, so that each has the same colour in all plans
        label: {part_title(n): getattr(step.memory.worst, n) / GIB for n in MEMORY_PARTS}
        for label, step in zip(labels, steps, strict=True)
    }
    time = {
        label: {part_title(part): seconds for part, seconds in vars(step.time).items()}
        for label, step in zip(labels, steps, strict=True)
    }
    points = {
        label: [(size / GIB, seconds) for size, seconds in search.points(step)]
        for label, step in zip(labels, steps, strict=True)
    }
    chosen = steps[0].memory.total / GIB, steps[0].time.total
    files = [folder / f"{name}.png" for name in ("memory", "time", "memory_time")]
    draw_stacked_bars(
        "Memory of the worst rank at its peak", memory, "GiB", files[0], ("usable memory", usable)
    )
    draw_stacked_bars("Time of a step", time, "seconds", files[1])
    title = "Recomputation and offload: memory against time"
    draw_memory_time(title, points, chosen, usable, files[2])
    job = steps[0].job
    return files + draw_job_layout(job, computed_timelines(job), folder / "layout")


def _predict(arguments: argparse.Namespace) -> None:
    """Predict the rows of a file; without --out, only the table of errors is of use."""
    predictions = predict_rows(read_rows(arguments.rows))
    if arguments.out is not None:
        write_predictions(predictions, arguments.out)
        print(arguments.out)
    if arguments.table or arguments.out is None:
        print(error_table(predictions))


def _calibrate(arguments: argparse.Namespace) -> None:
    """Fit the efficiency to runs, and print it with the errors before and after."""
    if arguments.gpus is None:
        raise ConfigError("--gpus: is missing.", fix='Give the GPUs of the runs: "8xH100".')
    cluster = parse_gpus(arguments.gpus, arguments.hardware and Path(arguments.hardware))
    runs = [read_measured_run(folder) for folder in arguments.calibrate]
    found = calibrate(runs, cluster)
    print(calibration_report(runs, found))
    if arguments.out is not None:
        values = dataclasses.asdict(found.efficiency).items()
        text = "".join(f"{name} = {value:.4f}\n" for name, value in values)
        print(*write_text_files({arguments.out: text}), sep="\n")


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
    plan.add_argument("--efficiency", help="a file that --calibrate wrote")
    plan.add_argument("--seq-len", help="tokens of a sequence (default: of --job)")
    plan.add_argument("--global-batch", help="sequences of one step (default: of --job)")
    plan.add_argument(
        "--tokens", help="tokens of the whole training, for days and cost (default: 20 a parameter)"
    )
    plan.add_argument(
        "--precision",
        default="bf16",
        help=f"of the matmuls: {', '.join(PRECISION_OPTIONS)} (default: bf16)",
    )
    plan.add_argument(
        "--reserve",
        default="10",
        help="percent of a GPU's memory that CUDA, NCCL and fragmentation take (default: 10)",
    )
    plan.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="fix what is searched, such as tensor=8 or recompute=full; may be repeated",
    )
    plan.add_argument(
        "--trusted", action="store_true", help="search only what published runs have, and --fix"
    )
    plan.add_argument("--quick", action="store_true", help="leave out what would change the answer")
    other = parser.add_argument_group("measured runs")
    other.add_argument("--rows", type=Path, help="predict the rows of this CSV file")
    other.add_argument("--table", action="store_true", help="the errors of the predicted rows")
    other.add_argument("--calibrate", type=Path, nargs="+", metavar="RUN", help="runs to fit")
    parser.add_argument("--out", type=Path, help="folder, or file with --rows and --calibrate")
    return parser
