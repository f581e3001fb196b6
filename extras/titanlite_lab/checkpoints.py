"""The newest checkpoint of a run, and checkpoints made from a Hugging Face folder or others."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint import CheckpointManifest, list_steps, read_checkpoint_manifest
from titanlite.checkpoint.huggingface import (
    PUBLISHED_FILE,
    TOKENIZER_FILE,
    HuggingFaceFolder,
    open_hugging_face,
    read_published_facts,
)
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    MANIFEST_FILE,
    check_hashes,
    software_versions,
    write_checkpoint_manifest,
)
from titanlite.checkpoint.saved_model import describe_saved_model
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.checkpoint.tensor_writer import CollectiveSave, write_small_files, write_tensors
from titanlite.data import Tokenizer, open_tokenizer
from titanlite.data.open_tokenizer import TOKENIZER_FILES
from titanlite.errors import CheckpointError, DataError
from titanlite.log import logger
from titanlite.models import ModelConfig
from titanlite.storage import StorageFolder

KEPT_FILES = {PUBLISHED_FILE, *TOKENIZER_FILES}  # beside the tensors of a checkpoint


def find_newest_checkpoint(folder: StorageFolder) -> StorageFolder:
    """`folder` itself if it is a checkpoint; else the newest valid checkpoint of that run.

    A run is given as its job.dump_folder, if checkpoint.folder is the default, or as the folder
    with its checkpoints.

    Damaged checkpoints are skipped with a warning, unfinished ones without a warning. Raises
    CheckpointError if none is valid.
    """
    if folder.name.startswith("step-") or MANIFEST_FILE in folder.sizes():
        return folder
    for parent in (folder, folder / "checkpoint"):
        for step in reversed(list_steps(parent).steps):
            try:
                read_checkpoint_manifest(parent / f"step-{step}")
            except CheckpointError as error:
                logger.warning("skipped: %s", error)
            else:
                return parent / f"step-{step}"
    raise CheckpointError(
        f"{folder}: is not a checkpoint, and contains no valid one.",
        fix="Give a run (its job.dump_folder, or the folder that checkpoint.folder names), or the"
        " folder of one step, such as"
        " outputs/checkpoint/step-100. Convert a Hugging Face folder first, by"
        " titanlite checkpoint from-hf.",
    )


def from_hugging_face(folder: StorageFolder, out: StorageFolder) -> CheckpointManifest:
    """Write the weights of a Hugging Face folder as a model-only checkpoint in fp32.

    It is for `checkpoint.initial_load_path` and for generating text; a tokenizer.json is copied.
    Raises CheckpointError.
    """
    check_empty(out)
    source, started = open_hugging_face(folder), time.monotonic()
    tokenizer = _open_tokenizer_if_valid(folder)
    properties: dict[str, Any] = {"model": dataclasses.asdict(source.sizes)}
    if tokenizer:
        properties |= {"data.tokenizer": tokenizer.fingerprint, "data.bos": tokenizer.adds_bos}
    manifests, facts = [], read_published_facts(folder)

    def commit(files, tensors) -> None:
        manifest = CheckpointManifest(
            step=0,
            progress={},
            facts=properties,
            job=job_of_folder(source, tokenizer),
            layout="one process",
            files=files
            | write_small_files(out, {**(tokenizer.files if tokenizer else {}), **facts}),
            tensors=tensors,
            versions=software_versions(),
            seconds=time.monotonic() - started,
        )
        manifests.append(manifest)
        write_checkpoint_manifest(out, manifest)

    shapes = {
        name: torch.empty(location.shape, dtype=torch.float32, device="meta")
        for name, location in source.tensors.items()
    }
    write_tensors(
        out,
        {"model": shapes},
        CollectiveSave(),
        commit,
        load=lambda name: source.read(name.removeprefix("model.")).float(),
    )
    return manifests[0]


def average_checkpoints(sources: Sequence[StorageFolder], out: StorageFolder) -> str:
    """Write a model-only checkpoint: the mean of the weights of several, or the average in one.

    With one checkpoint, of a run with [weight_average], its average. The mean is computed in fp64
    and stored in fp32, one tensor at a time; job, tokenizer and step are those of the last
    checkpoint. Returns what was averaged. Raises CheckpointError, also if the models differ.
    """
    check_empty(out)
    started = time.monotonic()
    saved = [(folder, read_checkpoint_manifest(folder)) for folder in sources]
    models = [describe_saved_model(*pair) for pair in saved]
    last, manifest = saved[-1]
    part = "average" if len(saved) == 1 else "model"
    for folder, model in zip(sources, models, strict=True):
        if model != models[-1]:
            raise CheckpointError(f"{folder}: has another model than {last}.")
    if not manifest.has(part):
        raise CheckpointError(
            f"{last}: has no average of the weights.",
            fix="Give several checkpoints, or train with weight_average.decay.",
        )
    small = [name for name in manifest.files if name in KEPT_FILES]
    check_hashes(last, manifest, small)
    names = {n.removeprefix("model.") for n in manifest.tensors if n.startswith("model.")}
    _check_averaged(saved, part, names)
    shapes = {name: list(manifest.tensors[f"model.{name}"].shape) for name in sorted(names)}

    def load(name: str) -> Tensor:
        name = name.removeprefix("model.")
        total = torch.zeros(shapes[name], dtype=torch.float64)
        for folder, of_folder in saved:
            dtype = DTYPE_OF_NAME[of_folder.tensors[f"{part}.{name}"].dtype]
            tensor = torch.empty(shapes[name], dtype=dtype)
            read_tensors(folder, {part: {name: tensor}}, no_dist=True)
            total += tensor
        return (total / len(saved)).float()

    def commit(files, tensors) -> None:
        kept = {name: last.read(name) for name in small}
        averaged = dataclasses.replace(
            manifest,
            progress={},
            files=files | write_small_files(out, kept),
            tensors=tensors,
            versions=software_versions(),
            seconds=time.monotonic() - started,
            lease=0,
        )
        write_checkpoint_manifest(out, averaged)

    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    write_tensors(out, {"model": meta}, CollectiveSave(), commit, load=load)
    several = f"the mean of the weights of {len(saved)} checkpoints"
    return f"the average in {last}" if part == "average" else several


def check_empty(out: StorageFolder) -> None:
    """Raise CheckpointError if a new folder exists."""
    if out.sizes() or out.folders():
        raise CheckpointError(
            f"{out}: already exists and is not empty.", fix="Remove it, or give another folder."
        )


def _check_averaged(
    saved: Sequence[tuple[StorageFolder, CheckpointManifest]], part: str, names: Iterable[str]
) -> None:
    """Raise CheckpointError unless each checkpoint has all tensors, in the shapes of the last."""
    model = saved[-1][1].tensors
    for folder, manifest in saved:
        for name in names:
            record = manifest.tensors.get(f"{part}.{name}")
            if record is None or record.shape != model[f"model.{name}"].shape:
                raise CheckpointError(f"{folder}: {part}.{name} is missing or has another shape.")


def job_of_folder(source: HuggingFaceFolder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The settings of the model, all of whose sizes are set, and the tokenizer's name."""
    flavor = next(iter(source.spec.flavors))
    settings = {"name": source.spec.name, "flavor": flavor, **dataclasses.asdict(source.sizes)}
    if not settings.get("head_dim"):  # dim / n_heads: as in the first flavor of each family
        settings.pop("head_dim", None)
    return {
        "model": dataclasses.asdict(ModelConfig.schema_for(source.spec.name)(**settings)),
        "data": {"tokenizer": tokenizer and tokenizer.name},
    }


def _open_tokenizer_if_valid(folder: StorageFolder) -> Tokenizer | None:
    """The tokenizer.json of a local folder; None without one, or, with a warning, if not valid."""
    if TOKENIZER_FILE not in folder.sizes():
        return None
    try:
        return open_tokenizer(folder.path_of(TOKENIZER_FILE))
    except DataError as error:
        logger.warning("%s: its tokenizer is not copied: %s", folder, error)
        return None
