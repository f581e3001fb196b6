"""Short runs of train.py on the devices, each compared with the same job on one CPU process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree

import torch

from benchmarks.gpu_check.outcome import (
    CheckFailed,
    CheckSkipped,
    Machine,
    Outcome,
    run_command,
)
from benchmarks.gpu_check.trace_overlap import ALL_GATHERS, COPIES, overlap_in_trace
from benchmarks.processes import ROOT, as_arguments
from titanlite.parallelize.float8 import find_gpu
from titanlite_lab.compare import compare_runs, verdict

MAX_RUN_SECONDS = 600
STEPS = 6
FP32 = {"training.mixed_precision_param": "float32"}
COMPILED = {"compile.enable": "true"}
DOCUMENTS = {"attention.mask": "document"}
FP32_TOLERANCE = 1e-4  # other kernels add in another order: 1e-6 at the first step, and it grows
BF16_TOLERANCE = 2e-2  # up to 5e-3 on a CPU
FLOAT8_TOLERANCE = 5e-2

JOB = {
    "model.flavor": "quickstart",
    "model.vocab_size": "258",
    "data.tokenizer": "bytes",
    "training.seq_len": "128",
    "model.n_layers": "2",
    "training.local_batch_size": "8",
    "training.global_batch_size": "8",
    "training.steps": str(STEPS),
    "optimizer.name": "SGD",  # proportional to the gradients: Adam would hide a wrong factor
    "optimizer.lr": "0.1",
    "lr_scheduler.warmup_steps": "2",
    "lr_scheduler.total_steps": str(STEPS),  # also where a run stops earlier, to be resumed
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": "1",
}
ADAMW = {"optimizer.name": "AdamW", "optimizer.lr": "1e-3"}
# The last two blocks are not offloaded, nor tensors below 1 MiB: here a block input has 2 MiB.
OFFLOADED = {"model.n_layers": "4", "training.seq_len": "512"}
# The same job on one process of the CPU, in fp32: reference -> its settings
REFERENCES: dict[str, Mapping[str, str]] = {
    "SGD": {},
    "AdamW": ADAMW,
    "document mask": DOCUMENTS,
    "four blocks": OFFLOADED,
}


@dataclass(frozen=True)
class Recipe:
    """A job on the devices that must have the losses and gradient norms of its reference."""

    name: str
    settings: Mapping[str, str]
    tolerance: float
    reference: str = "SGD"
    devices: int = 1
    needs_cuda: bool = False
    needs_float8: bool = False  # a GPU with Float8 matmuls
    metrics: tuple[str, ...] = field(default=("loss", "grad_norm"))


def float8(recipe: str, **more: str) -> dict[str, str]:
    """Settings of a Float8 job, in bf16 and compiled."""
    keys = {"recipe_name": recipe, **more}
    section = {f"quantize.linear.float8.{key}": value for key, value in keys.items()}
    return {"model.converters": '["quantize.linear.float8"]', **COMPILED, **section}


def one_device_recipes() -> list[Recipe]:
    """Every kind of kernel and memory option on one device."""
    loss_only = ("loss",)
    return [
        Recipe("fp32", FP32, FP32_TOLERANCE),
        Recipe("bf16", {}, BF16_TOLERANCE),
        Recipe("bf16 compiled", COMPILED, BF16_TOLERANCE),
        Recipe("bf16, document mask", DOCUMENTS, BF16_TOLERANCE, "document mask"),
        Recipe(
            "bf16, activation offload",
            {
                **OFFLOADED,
                "activation_checkpoint.mode": "full",
                "activation_checkpoint.offload": "true",
            },
            BF16_TOLERANCE,
            "four blocks",
        ),
        Recipe(
            "bf16, recomputation per operation",
            {
                "activation_checkpoint.mode": "selective",
                "activation_checkpoint.selective_ac_option": "op",
            },
            BF16_TOLERANCE,
        ),
        Recipe(
            "bf16, 8-bit AdamW offloaded to the host",
            {**ADAMW, "optimizer.state_dtype": "8bit", "optimizer.offload": "true"},
            BF16_TOLERANCE,
            "AdamW",
            needs_cuda=True,
            metrics=loss_only,
        ),
        Recipe(
            "Float8 tensorwise, 8-bit all-gather",
            float8(
                "tensorwise",
                enable_fsdp_float8_all_gather="true",
                precompute_float8_dynamic_scale_for_fsdp="true",
            ),
            FLOAT8_TOLERANCE,
            needs_cuda=True,
            needs_float8=True,
            metrics=loss_only,
        ),
        Recipe(
            "Float8 rowwise",
            float8("rowwise"),
            FLOAT8_TOLERANCE,
            needs_cuda=True,
            needs_float8=True,
            metrics=loss_only,
        ),
    ]


def layout_recipes(devices: int) -> list[Recipe]:
    """Every kind of parallelism over a power of two of `devices`, in fp32."""
    ranks = 1 << (devices.bit_length() - 1)
    prefix = "parallelism."
    layouts: list[tuple[int, dict[str, str]]] = [
        (ranks, {"data_parallel_shard_degree": str(ranks)}),
        (2, {"data_parallel_replicate_degree": "2", "data_parallel_shard_degree": "1"}),
        (2, {"tensor_parallel_degree": "2"}),
        (2, {"context_parallel_degree": "2"}),
        (2, {"context_parallel_degree": "2", "context_parallel_rotate_method": "alltoall"}),
        (2, {"pipeline_parallel_degree": "2"}),
        (4, {"tensor_parallel_degree": "2", "pipeline_parallel_degree": "2"}),
        (
            8,
            {
                "tensor_parallel_degree": "2",
                "pipeline_parallel_degree": "2",
                "data_parallel_shard_degree": "2",
            },
        ),
    ]
    return [
        Recipe(
            "fp32, " + ", ".join(f"{key} = {value}" for key, value in degrees.items()),
            {**FP32, **{prefix + key: value for key, value in degrees.items()}},
            FP32_TOLERANCE,
            devices=needed,
        )
        for needed, degrees in layouts
    ]


def check_recipe(recipe: Recipe) -> Callable[[Machine], Iterator[Outcome]]:
    """A check that a recipe has the losses of its reference."""

    def check(machine: Machine) -> Iterator[Outcome]:
        gpu = find_gpu(torch.device(machine.device_type))
        if recipe.needs_float8 and not (gpu and gpu.supports_float8):
            raise CheckSkipped(f"needs a GPU with Float8 matmuls, not {gpu or 'a CPU'}")
        start = weights_for_all_devices(machine, recipe.settings)
        out = train(machine, recipe.name, {**start, **recipe.settings}, recipe.devices)
        yield compare_with_reference(machine, recipe, out)

    return check


def compare_with_reference(machine: Machine, recipe: Recipe, out: Path) -> Outcome:
    """Compare the metrics of the run in `out` with the recipe's reference, which runs once."""
    name = f"reference {recipe.reference}"
    reference = machine.folder / name
    with machine.lock(name):
        if not reference.exists():
            train_reference(machine, recipe.reference)
    comparison = compare_runs(reference, out, recipe.tolerance)
    metrics = [metric for metric in comparison.metrics if metric.name in recipe.metrics]
    largest = {metric.name: float(metric.difference.max()) for metric in metrics}
    figures = ", ".join(f"{name} {difference:.1e}" for name, difference in largest.items())
    result = f"largest difference from the CPU in fp32: {figures}"
    if any(metric.first_index is not None for metric in metrics):
        problem = f"{result}; the limit is {recipe.tolerance:g}"
        raise CheckFailed(problem, verdict(comparison))
    return Outcome(recipe.name, "passed", f"{result} (limit {recipe.tolerance:g})")


def train_reference(machine: Machine, name: str) -> None:
    """Train the reference job `name` in fp32 on one process of the CPU."""
    start = weights_for_all_devices(machine, REFERENCES[name])
    train_on_cpu(machine, f"reference {name}", {**start, **FP32, **REFERENCES[name]})


def weights_for_all_devices(machine: Machine, settings: Mapping[str, str]) -> dict[str, str]:
    """Settings with which a run starts from the same weights on a GPU as on the CPU.

    Initial weights are drawn on the device, and a GPU draws other numbers from the same seed. So
    all runs with the same number of blocks load weights that the CPU trained for one step.
    """
    blocks = settings.get("model.n_layers", JOB["model.n_layers"])
    name = f"weights of {blocks} blocks"
    checkpoint = machine.folder / name / "checkpoint" / "step-1"
    with machine.lock(name):
        if not checkpoint.exists():
            one_step = {**FP32, "model.n_layers": blocks, "training.steps": "1"}
            train_on_cpu(machine, name, {**one_step, "checkpoint.enable": "true"})
    return {
        "checkpoint.enable": "true",
        "checkpoint.load_only": "true",
        "checkpoint.initial_load_path": str(checkpoint),
    }


def train_on_cpu(machine: Machine, name: str, settings: Mapping[str, str]) -> None:
    """Train on one process of the CPU; raises CheckFailed, and then leaves no folder behind."""
    try:
        train(replace(machine, devices=1, cuda=False), name, settings, 1)
    except CheckFailed as error:
        rmtree(machine.folder / name, ignore_errors=True)  # no other check uses it
        raise CheckFailed(f"the reference on the CPU failed: {error}", error.log) from None


def check_saving(machine: Machine) -> Iterator[Outcome]:
    """Save a checkpoint from pinned memory, resume from it, and end like an uninterrupted run."""
    recipe = Recipe("save with pinned memory, resume", FP32, FP32_TOLERANCE)
    settings = {
        **weights_for_all_devices(machine, {}),
        **FP32,
        "checkpoint.load_only": "false",
        "checkpoint.interval": "3",
        "checkpoint.async_mode": "async_with_pinned_mem",
    }
    devices = min(machine.devices, 2)
    train(machine, recipe.name, {**settings, "training.steps": "3"}, devices)
    out = train(machine, recipe.name, settings, 1)  # on another number of devices if there are two
    yield compare_with_reference(machine, recipe, out)


def check_overlap(machine: Machine) -> Iterator[Outcome]:
    """Weights are all-gathered, or activations copied, while matmuls run."""
    several = machine.devices > 1
    name = "all-gather" if several else "activation offload"
    out = train(machine, f"overlap of {name}", overlap_job(machine.devices), machine.devices)
    trace = out / "profile_traces" / "iteration_6" / "rank0_trace.json"
    overlap = overlap_in_trace(trace, ALL_GATHERS if several else COPIES)
    result = (
        f"{overlap.share:.0%} of {overlap.transfer_us / 1e3:.2f} ms of transfers ran beside"
        f" matmuls, which took {overlap.matmul_us / 1e3:.2f} ms of the step"
    )
    if not overlap.both_us:
        raise CheckFailed(result)
    yield Outcome(f"overlap of {name} and matmuls", "passed", result)


def overlap_job(devices: int) -> dict[str, str]:
    """Settings of the job whose trace shows overlap: with one device, it offloads activations."""
    return {
        **OFFLOADED,
        "model.dim": "2048",
        "model.n_heads": "16",
        "model.n_kv_heads": "8",
        "model.hidden_dim": "5632",
        "training.seq_len": "2048",
        "training.global_batch_size": str(4 * devices),
        "activation_checkpoint.offload": "false" if devices > 1 else "true",
        "profiling.enable_profiling": "true",
        "profiling.profile_freq": "6",
    }


# --- processes -----------------------------------------------------------------------------------


def train(machine: Machine, name: str, settings: Mapping[str, str], devices: int) -> Path:
    """Run train.py in its own processes; returns its job.dump_folder. Raises CheckFailed."""
    out = machine.folder / "".join(c if c.isalnum() or c in " -." else "_" for c in name)
    keys = {
        **JOB,
        "job.dump_folder": str(out),
        "job.device": machine.device_type,
        "data.sources": f'[{{ name = "text", path = "{prepare_text(machine)}/train" }}]',
        **settings,
    }
    batch, ranks = int(keys["training.global_batch_size"]), data_parallel_ranks(keys, devices)
    keys["training.local_batch_size"] = str(batch // ranks)
    launcher = [sys.executable] if devices == 1 else torchrun(devices)
    threads = max(1, (os.cpu_count() or 1) // devices // machine.runs_at_once)
    run_command(
        [*launcher, str(ROOT / "train.py"), *as_arguments(keys)],
        timeout=MAX_RUN_SECONDS,
        variables={"OMP_NUM_THREADS": str(threads)},
    )
    return out


def data_parallel_ranks(keys: Mapping[str, object], devices: int) -> int:
    """Ranks that read different samples."""
    for kind in ("tensor", "pipeline", "context"):
        devices //= int(str(keys.get(f"parallelism.{kind}_parallel_degree", 1)))
    return devices


def torchrun(processes: int) -> list[str]:
    """The command that starts processes on this machine, with no port that others can reach."""
    return ["bash", str(ROOT / "scripts" / "launch.sh"), str(processes)]


def prepare_text(machine: Machine) -> Path:
    """Prepare the package's own source text, as bytes, one document per file; once, if it works."""
    corpus, text = machine.folder / "corpus", machine.folder / "text.jsonl"
    with machine.lock("corpus"):
        if (corpus / "train").exists():  # a preparation that failed fails again, with its reason
            return corpus
        files = sorted((ROOT / "titanlite").rglob("*.py"))
        documents = (json.dumps({"text": path.read_text(encoding="utf-8")}) for path in files)
        text.write_text("\n".join(documents), encoding="utf-8")
        command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), str(text)]
        # 0: of so few documents, chance would decide whether any is for validation
        command += ["--tokenizer", "bytes", "--validation-share", "0", "--out", str(corpus)]
        run_command(command, timeout=MAX_RUN_SECONDS)
    return corpus
