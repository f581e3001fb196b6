"""Open a model, load the tasks, and run them with lm-eval."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from titanlite.checkpoint import read_saved_model
from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.errors import CheckpointError, ConfigError, DataError, UserError
from titanlite.storage import StorageFolder, is_url
from titanlite_lab.checkpoints import find_newest_checkpoint
from titanlite_lab.evaluation.results import EvaluationResult, scores_of_tasks, weights_hash
from titanlite_lab.generate import load_model

TASK_SET = Path(__file__).parent / "task_set"  # tasks that need no network
TAG = "python"  # lm-eval's tag for all of them


@dataclass(frozen=True)
class EvaluationSettings:
    """What changes the results of an evaluation."""

    tasks: tuple[str, ...]  # names of tasks, groups or tags of lm-eval, or paths of YAML files
    limit: int = 0  # documents of each task; 0: all
    shots: int | None = None  # examples in the prompt, but 0 where the task sets 0; None: its own
    batch_size: int = 8  # texts in one forward pass
    dtype: str = "float32"  # of the weights and the computation
    allow_code: bool = False  # of the YAML files of tasks


def shipped_tasks() -> list[str]:
    """Names of the tasks that are part of titanlite."""
    return sorted(path.stem for path in TASK_SET.glob("*.yaml"))


def require_lm_eval() -> None:
    """Raise ConfigError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "evaluation needs lm-eval, which is not installed.",
            fix="pip install 'titanlite[eval]'",
        )


def load_tasks(names: Sequence[str], allow_code: bool = False) -> Any:
    """The tasks of lm-eval with these names; raises ConfigError for unknown ones, or DataError.

    The YAML file of a task can name functions, which lm-eval imports; it needs `allow_code`.
    """
    files = [name for name in names if name.endswith((".yaml", ".yml")) or Path(name).is_file()]
    if files and not allow_code:
        raise ConfigError(
            f"tasks {', '.join(files)}: a YAML file can run code, which is not allowed.",
            fix="If you trust it: python -m titanlite_lab evaluate --allow-code. A run takes"
            " names of tasks only.",
        )
    require_lm_eval()
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    is_ours = all(name in (*shipped_tasks(), TAG) or Path(name).is_file() for name in names)
    # Finding lm-eval's own tasks reads 14,000 files, which takes seconds.
    manager = TaskManager(include_path=str(TASK_SET), include_defaults=not is_ours)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known and not Path(name).is_file()]:
        raise ConfigError(
            f"unknown tasks: {', '.join(unknown)}.",
            fix=f"Use {', '.join(shipped_tasks())}, or {TAG} for all of these; a task of lm-eval"
            " (lm-eval ls tasks); or the path of a task's YAML file.",
        )
    try:
        return manager.load(list(names))
    except Exception as error:  # of lm-eval, of a task's own code, or of downloading its data
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DataError(
            f"tasks {', '.join(names)}: cannot be loaded ({reason}).",
            fix="Most of lm-eval's tasks download their data. Those of titanlite do not:"
            f" {', '.join(shipped_tasks())}.",
        ) from error


def evaluate_model(
    model: str, settings: EvaluationSettings, device: torch.device, tokenizer: str | None = None
) -> EvaluationResult:
    """Evaluate a checkpoint, the newest one of a run, or a Hugging Face folder.

    `tokenizer`: path of its file, for a checkpoint without a copy of it. Raises UserError.
    """
    require_lm_eval()
    from lm_eval.evaluator import evaluate

    began = time.monotonic()
    if is_hugging_face(model):
        lm, step, weights = _open_export(model, settings, device), None, ""
    else:
        folder = find_newest_checkpoint(StorageFolder(model))
        lm, step, weights = _open_checkpoint(folder, settings, device, tokenizer)
        model = str(folder)
    tasks = load_tasks(settings.tasks, settings.allow_code)
    for task in tasks["tasks"].values():
        if settings.shots is not None and task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=settings.shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)  # lm-eval's default
    raw = evaluate(lm=lm, task_dict=tasks, limit=settings.limit or None, bootstrap_iters=0)
    return EvaluationResult(
        model=model,
        step=step,
        weights=weights,
        tasks=scores_of_tasks(raw),
        settings={**asdict(settings), "max_length": lm.max_length},
        versions={name: _version(name) for name in ("titanlite", "torch", "lm_eval")},
        seconds=time.monotonic() - began,
    )


def is_hugging_face(path: str) -> bool:
    """Whether a path is a local folder with a model of transformers."""
    folder = Path(path)
    if is_url(path) or (folder / MANIFEST_FILE).exists():
        return False
    return (folder / "config.json").exists()


def _open_checkpoint(
    folder: StorageFolder,
    settings: EvaluationSettings,
    device: torch.device,
    tokenizer: str | None,
) -> tuple[Any, int, str]:
    """(the model for lm-eval, step, hash of the weights) of a checkpoint."""
    from titanlite_lab.evaluation.checkpoint_lm import CheckpointLM

    saved = read_saved_model(folder, tokenizer)
    if saved.tokenizer is None:
        raise CheckpointError(
            f"{folder}: was trained on token ids without data.tokenizer.",
            fix="Name the tokenizer that made the ids: --tokenizer PATH.",
        )
    model = load_model(saved, device, getattr(torch, settings.dtype))
    lm = CheckpointLM(saved, model, settings.batch_size)
    return lm, saved.manifest.step, weights_hash(saved.manifest)


def _open_export(folder: str, settings: EvaluationSettings, device: torch.device) -> Any:
    """A Hugging Face folder as the model "hf" of lm-eval."""
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as missing:
        raise ConfigError(
            f"{folder}: a Hugging Face folder needs transformers and accelerate ({missing}).",
            fix="pip install 'titanlite[eval]'",
        ) from missing
    try:
        return HFLM(
            pretrained=folder,
            device=str(device),
            dtype=settings.dtype,
            batch_size=settings.batch_size,
        )
    except UserError:
        raise
    except Exception as error:  # transformers raises many classes
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(
            f"{folder}: transformers cannot load it ({reason}).",
            fix="Give a folder that titanlite checkpoint to-hf wrote.",
        ) from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
