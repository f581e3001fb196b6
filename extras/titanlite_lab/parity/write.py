"""Write a parity bundle: what the plain model computes, and how far rounding moves it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from titanlite.checkpoint.huggingface_export import ModelToExport, write_hugging_face
from titanlite.errors import ConfigError, DataError, UserError
from titanlite.job import Job
from titanlite.models import ModelSpec
from titanlite.models.config_json import EXPERT_INDEX, join_parts
from titanlite.models.sizes import prediction_layers
from titanlite.storage import StorageFolder
from titanlite_lab.parity.bundle import (
    BATCHES_FOLDER,
    FACTS_FILE,
    FORMAT,
    SUMMARIES_FILE,
    TOLERANCES_FILE,
    WEIGHTS_FOLDER,
    BundleFacts,
    GradientSummary,
    StepScalars,
    StepTolerances,
    gradient_error,
    gradients_folder,
    relative_error,
    size_of,
    summarize,
    write_json,
    write_scalars,
)
from titanlite_lab.parity.readme import bundle_readme
from titanlite_lab.parity.reference import (
    REFERENCE,
    REPETITIONS,
    ParitySettings,
    StepTrace,
    TokenBatch,
    build_initial_model,
    read_batches,
    run_steps,
)

MULTIPLE = 10.0  # of the largest deviation
FLOOR, SCALAR_FLOOR = 1e-5, 2e-6  # least tolerance of a tensor, and of the loss and the norm:
# transformers and torchtitan differ by up to 1.6e-6 and 3.5e-7 from models of width 32
MAX_TOLERANCE = 2e-3  # of a loss or gradient: a larger one would hide a factor of 1.01 or less
FULL_BYTES = 2_000_000_000  # gradients of all steps that are written in full
MAX_LISTED = 4


def write_bundle(job: Job, settings: ParitySettings, out: Path, full_bytes: int) -> BundleFacts:
    """Write a new folder; the facts of the bundle are its last file.

    `full_bytes`: if the gradients of all steps have more, only summaries are written. Raises
    UserError if the folder exists, if the family cannot be exported, or if rounding decides so much
    that the tolerances would prove nothing.
    """
    if out.exists():
        raise ConfigError(f"--out {out}: exists.", fix="Name a new folder.")
    if layers := prediction_layers(job.sizes):
        raise ConfigError(
            f"model.mtp_layers = {layers}: a bundle has the loss of the model itself only.",
            fix="Set model.mtp_layers = 0.",
        )
    batches, data = read_batches(job, settings)
    for step, batch in enumerate(batches, 1):
        if not (batch.labels >= 0).any():
            raise DataError(f"step {step}: the batch has no label to train on.", "Use other data.")
    try:
        return _write_files(job, settings, out, full_bytes, batches, data)
    except UserError:
        shutil.rmtree(out, ignore_errors=True)
        raise


def _write_files(
    job: Job,
    settings: ParitySettings,
    out: Path,
    full_bytes: int,
    batches: list[TokenBatch],
    data: str,
) -> BundleFacts:
    models = [build_initial_model(job, how.perturb) for how in (REFERENCE, *REPETITIONS)]
    _write_weights(job, models[0], out / WEIGHTS_FOLDER)
    _write_batches(batches, out / BATCHES_FOLDER)
    parameters = sum(parameter.numel() for parameter in models[0].parameters())
    is_full = 4 * parameters * settings.steps <= full_bytes
    order = _run_and_write(job.spec, models, batches, settings.learning_rate, out, is_full)
    facts = BundleFacts(
        family=job.spec.name,
        steps=settings.steps,
        sequences=settings.sequences,
        seq_len=job.config.training.seq_len,
        learning_rate=settings.learning_rate,
        seed=job.config.debug.seed,
        data=data,
        parameters=parameters,
        gradients_are_full=is_full,
        order=order,
    )
    (out / "README.md").write_text(
        bundle_readme(facts, MULTIPLE, FLOOR, SCALAR_FLOOR), encoding="utf-8"
    )
    (out / "run.toml").write_text(job.as_toml(), encoding="utf-8")
    write_json(out / FACTS_FILE, {"format": FORMAT, **asdict(facts)})
    return facts


def published_tensors(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by titanlite's parameter names as Hugging Face stores parameters of these names."""
    mapping = spec.hugging_face
    published: dict[str, Tensor] = {}
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(mapping.name_of(name), []).append(name)
    for stored, names in groups.items():
        if mapping.is_stacked(names[0]):
            rows = enumerate(tensors[names[0]])
            published |= {stored.replace(EXPERT_INDEX, str(row)): tensor for row, tensor in rows}
        else:
            parts = [mapping.part_of(name) for name in names]
            published[stored] = join_parts(parts, [tensors[name] for name in names])
    return {name: tensor.contiguous() for name, tensor in published.items()}


def _write_weights(job: Job, model: nn.Module, folder: Path) -> None:
    state = model.state_dict()
    exported = ModelToExport(
        job.spec,
        job.sizes,
        load=lambda names: {name: state[name] for name in names},
        seq_len=job.config.training.seq_len,
        tokenizer=None,
    )
    write_hugging_face(StorageFolder(folder), exported)


def _write_batches(batches: list[TokenBatch], folder: Path) -> None:
    folder.mkdir(parents=True)
    for step, batch in enumerate(batches, 1):
        save_file(dict(vars(batch)), folder / f"step-{step}.safetensors")


def _run_and_write(
    spec: ModelSpec,
    models: list[nn.Module],
    batches: list[TokenBatch],
    learning_rate: float,
    out: Path,
    is_full: bool,
) -> list[str]:
    """Run the reference and its repetitions step by step; returns the order of the gradients."""
    scalars: list[StepScalars] = []
    tolerances: list[StepTolerances] = []
    summaries: dict[str, dict[str, dict]] = {}
    runs = [
        run_steps(model, batches, learning_rate, how)
        for model, how in zip(models, (REFERENCE, *REPETITIONS), strict=True)
    ]
    order: list[str] = []
    for trace in runs[0]:
        gradients = published_tensors(spec, trace.gradients)
        expected: Mapping[str, Tensor | GradientSummary] = gradients
        if is_full:
            folder = gradients_folder(out, trace.step)
            folder.mkdir(parents=True)
            save_file(gradients, folder / "model.safetensors")
        else:
            expected = summarized = {name: summarize(g) for name, g in gradients.items()}
            summaries[str(trace.step)] = {name: asdict(s) for name, s in summarized.items()}
        scalars.append(_scalars_of(spec, trace))
        deviations = [_deviation(spec, next(run), expected, scalars[-1]) for run in runs[1:]]
        tolerances.append(_tolerances_of(deviations))
        order = order or _published_order(spec, trace)
    if not is_full:
        write_json(out / SUMMARIES_FILE, summaries)
    write_scalars(out, scalars)
    write_json(out / TOLERANCES_FILE, {"steps": [asdict(step) for step in tolerances]})
    return order


def _scalars_of(spec: ModelSpec, trace: StepTrace) -> StepScalars:
    updates = published_tensors(spec, trace.updates)
    norms = {
        name: torch.linalg.vector_norm(update, dtype=torch.float64).item()
        for name, update in updates.items()
    }
    return StepScalars(trace.step, trace.loss, trace.grad_norm, norms)


def _deviation(
    spec: ModelSpec,
    repeated: StepTrace,
    expected: Mapping[str, Tensor | GradientSummary],
    scalars: StepScalars,
) -> StepTolerances:
    """The errors of a repetition of a step, measured as an answer's errors are."""
    own, actual = _scalars_of(spec, repeated), published_tensors(spec, repeated.gradients)
    largest = max(map(size_of, expected.values()))
    largest_update = max(scalars.update_norms.values())
    return StepTolerances(
        repeated.step,
        relative_error(own.loss, scalars.loss),
        relative_error(own.grad_norm, scalars.grad_norm),
        {
            name: relative_error(own.update_norms[name], norm, largest_update)
            for name, norm in scalars.update_norms.items()
        },
        {name: gradient_error(actual[name], e, largest) for name, e in expected.items()},
    )


def _tolerances_of(deviations: list[StepTolerances]) -> StepTolerances:
    """The tolerances that follow from the deviations of all repetitions; raises ConfigError."""
    first = deviations[0]

    def worst(values: list[float], floor: float = FLOOR) -> float:
        return max(floor, MULTIPLE * max(values))

    step = StepTolerances(
        first.step,
        worst([d.loss for d in deviations], SCALAR_FLOOR),
        worst([d.grad_norm for d in deviations], SCALAR_FLOOR),
        {name: worst([d.update_norms[name] for d in deviations]) for name in first.update_norms},
        {name: worst([d.gradients[name] for d in deviations]) for name in first.gradients},
    )
    loose = {"loss": step.loss, **step.gradients}
    loose = {name: tolerance for name, tolerance in loose.items() if tolerance > MAX_TOLERANCE}
    if loose:
        shown = [f"{name} {value / MULTIPLE:.1e}" for name, value in loose.items()][:MAX_LISTED]
        more = f" and {len(loose) - MAX_LISTED} more" if len(loose) > MAX_LISTED else ""
        by = zip(REPETITIONS, deviations, strict=True)
        causes = [
            how.name
            for how, d in by
            if MULTIPLE * max(d.loss, *d.gradients.values()) > MAX_TOLERANCE
        ]
        raise ConfigError(
            f"step {step.step}: rounding changes {', '.join(shown)}{more}, relative"
            f" ({'; '.join(causes)}). The limit is {MAX_TOLERANCE / MULTIPLE:g}: larger tolerances"
            " would hide bugs.",
            fix="Use fewer --steps, a smaller --lr, or, if a router selects other experts because"
            " scores are nearly equal, another --debug.seed.",
        )
    return step


def _published_order(spec: ModelSpec, trace: StepTrace) -> list[str]:
    """Hugging Face's names in the order of `trace.order`."""
    shapes = {name: trace.gradients[name].shape for name in trace.order}
    stored = spec.hugging_face.stored_as(shapes).values()
    return list(dict.fromkeys(name for names in stored for name in names))
