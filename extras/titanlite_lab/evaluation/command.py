"""The command that evaluates a model, or the checkpoints of a run as they appear."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titanlite.distributed.process_group import choose_device
from titanlite.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    ConfigError,
    UserError,
    format_error,
)
from titanlite.files import write_file_atomically
from titanlite.log import configure_log
from titanlite_lab.evaluation.results import EvaluationResult
from titanlite_lab.evaluation.run_tasks import (
    TAG,
    EvaluationSettings,
    evaluate_model,
    load_tasks,
    shipped_tasks,
)
from titanlite_lab.evaluation.watch import Watch, watch_run

DTYPES_OF_WEIGHTS = ("float32", "bfloat16", "float16")
DESCRIPTION = """Evaluate a checkpoint on downstream tasks, with lm-eval.

  python -m titanlite_lab evaluate outputs/my_run
  python -m titanlite_lab evaluate outputs/my_run/checkpoint/step-100 --tasks python_cloze hellaswag
  python -m titanlite_lab evaluate exported --out results.json
  nice python -m titanlite_lab evaluate --watch outputs/my_run --every 1000 --device cpu

The model is a step-N folder, a run (its newest valid checkpoint), or a Hugging Face folder. It is
loaded in one process, without its optimizer, whatever layout saved it.
--watch evaluates the checkpoints of a run that is training, in evaluations.jsonl of its folder."""


def run_evaluation(argv: list[str]) -> int:
    """Run the evaluation that the arguments describe; returns the exit code."""
    args = _build_parser().parse_args(argv)
    try:
        settings, device = _settings_of(args), choose_device(args.device)
        if args.out:
            _check_out(Path(args.out))  # before an evaluation that may take hours
        if args.threads:
            torch.set_num_threads(args.threads)
        if args.watch:
            load_tasks(args.tasks, args.allow_code)  # before a wait that may take hours
            configure_log(0)
            watch = Watch(Path(args.watch), args.every, args.until)
            watch_run(watch, lambda f: evaluate_model(str(f), settings, device, args.tokenizer))
            return EXIT_DONE
        result = evaluate_model(args.model, settings, device, args.tokenizer)
        if args.out:
            _write_result(Path(args.out), result)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    at_step = "" if result.step is None else f", step {result.step}"
    print(f"{result.model}{at_step}: {result.seconds:.1f} s\n\n{result}")
    return EXIT_DONE


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="", help="step-N folder, run, or Hugging Face folder")
    add(
        "--tasks",
        nargs="+",
        default=[TAG],
        metavar="TASK",
        help=f"tasks of titanlite ({', '.join(shipped_tasks())}; {TAG}: all of them), tasks of"
        f" lm-eval, or YAML files of tasks (default: {TAG})",
    )
    add("--out", metavar="FILE", help="also write the results as JSON")
    add("--limit", type=int, default=0, metavar="N", help="only the first N documents of each task")
    add(
        "--shots",
        type=int,
        metavar="N",
        help="examples in the prompt, but 0 where the task sets 0 (default: the task's number)",
    )
    add(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="texts of a forward pass (default: 8)",
    )
    add("--dtype", choices=DTYPES_OF_WEIGHTS, default="float32", help="default: float32")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    add("--tokenizer", metavar="FILE", help="needed if the checkpoint has no copy of its tokenizer")
    add("--threads", type=int, default=0, metavar="N", help="CPU threads (default: torch's own)")
    add("--allow-code", action="store_true", help="run the code that YAML files of tasks name")
    add("--watch", metavar="RUN", help="evaluate the checkpoints of a run as it saves them")
    add(
        "--every",
        type=int,
        default=1,
        metavar="STEPS",
        help="with --watch: only checkpoints of a multiple of STEPS, and the last one",
    )
    add(
        "--until",
        type=int,
        metavar="STEP",
        help="with --watch: end after the checkpoint of this step (default: of training.steps)",
    )
    return parser


def _settings_of(args: argparse.Namespace) -> EvaluationSettings:
    """The settings of the arguments; raises ConfigError."""
    if bool(args.model) == bool(args.watch):
        raise ConfigError(
            "give one of a model and --watch RUN.",
            fix="The model is a checkpoint, a run or a Hugging Face folder.",
        )
    lowest = {"limit": 0, "batch_size": 1, "threads": 0, "shots": 0, "every": 1, "until": 1}
    for name, low in lowest.items():
        if (value := getattr(args, name)) is not None and value < low:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {value}: must be at least {low}.")
    return EvaluationSettings(
        tuple(args.tasks), args.limit, args.shots, args.batch_size, args.dtype, args.allow_code
    )


def _check_out(path: Path) -> None:
    """Raise ConfigError unless a file can be written there."""
    with _out_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()


def _write_result(path: Path, result: EvaluationResult) -> None:
    with _out_errors(path):
        write_file_atomically(path, json.dumps(result.to_json(), indent=1).encode())


@contextmanager
def _out_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error.strerror or error})."
        ) from error
