"""Speed of train.py against a bare loop, transformers' Trainer, and itself compiled."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from benchmarks.cases.case_context import CaseContext
from benchmarks.gpu_plans import FAMILY, share_of_peak
from benchmarks.processes import Task, TrainResult, alternate, run, train
from benchmarks.table_rows import NotMeasured, Row, row

TASK = Task()


def case_trainer(context: CaseContext) -> Iterator[Row]:
    """train.py, a bare loop and (with --peer) transformers' Trainer: one process, all cores."""
    for dtype in ("float32", "bfloat16"):
        yield from _compare_loops(context, dataclasses.replace(TASK, dtype=dtype))


def case_trainer_gpu(context: CaseContext) -> Iterator[Row]:
    """The same on one GPU, eager: 1B, 8 sequences of 2,048, fp32 parameters and optimizer state."""
    if not torch.cuda.is_available():
        raise NotMeasured("no CUDA device")
    task = Task("1B", seq_len=2048, batch=8, device="cuda", steps=20, skipped=6)
    yield from _compare_loops(context, task)


def _compare_loops(context: CaseContext, task: Task) -> Iterator[Row]:
    arguments = (json.dumps(dataclasses.asdict(task)), str(context.corpus))

    def loop(module: str, *options: str) -> float:
        return task.speed(json.loads(run(["-m", module, *arguments, *options]).splitlines()[-1]))

    contenders = {
        "train": lambda: train(task, context.corpus),
        "bare": lambda: loop("benchmarks.baseline_loop", "trim"),
        "no_trim": lambda: loop("benchmarks.baseline_loop", "no-trim"),
    }
    missing = [name for name in ("transformers", "accelerate") if not _is_installed(name)]
    if context.peer and not missing:
        contenders["peer"] = lambda: loop("benchmarks.hf_trainer")
    results = alternate(context.rounds, **contenders)
    train_results, bare, no_trim = results["train"], results["bare"], results["no_trim"]
    speeds = [run.speed for run in train_results]

    dtype, cast = task.dtype, " by autocast" if task.dtype == "bfloat16" else ""
    yield row(f"train.py, {dtype}", "tokens/s", speeds)
    yield row(f"bare loop, {dtype}{cast}", "tokens/s", bare)
    yield row(f"train.py / bare loop, {dtype}", "ratio", _ratios(speeds, bare), ">= 0.97")
    name = f"train.py / bare loop without malloc trimming, {dtype}"
    yield row(name, "ratio", _ratios(speeds, no_trim), ">= 0.97")
    yield row(f"bare loop, malloc trimming off / on, {dtype}", "ratio", _ratios(no_trim, bare))
    yield from _peer_rows(context, speeds, results.get("peer"), missing, dtype)
    yield from _train_rows(task, train_results)


def _peer_rows(context, speeds, peer, missing, dtype) -> Iterator[Row]:
    """Rows for transformers' Trainer, if it was requested."""
    ratio = f"train.py / transformers' Trainer, {dtype}"
    if peer:
        yield row(f"transformers' Trainer, {dtype}", "tokens/s", peer)
        yield row(ratio, "ratio", _ratios(speeds, peer), ">= 1.1")
    elif context.peer:
        reason = f"{' and '.join(missing)} not installed: pip install -e '.[hf]'"
        yield Row(ratio, "ratio", target=">= 1.1", missed=reason)


def _train_rows(task: Task, results: list[TrainResult]) -> Iterator[Row]:
    """Further rows for train.py: its share of the device's peak, data waits and peak memory."""
    sizes, dtype = FAMILY.flavors[task.flavor], task.dtype
    peaks = [run.peak_flops for run in results]
    name = f"matmul peak (measured on a CPU, published for a GPU), {dtype}"
    yield row(name, "TFLOP/s", [peak / 1e12 for peak in peaks])
    for attention in ("causal", "full"):
        full = {"full_attention": attention == "full"}
        shares = [
            share_of_peak(r.speed, sizes, task.seq_len, r.peak_flops, **full) for r in results
        ]
        yield row(f"share of that peak, {attention} attention, {dtype}", "share", shares)
    yield row(f"waiting for data, {dtype}", "share", [run.data_share for run in results], "< 0.01")
    yield row(f"peak memory, {dtype}", "GiB", [run.peak_memory_gib for run in results])


def case_fsdp(context: CaseContext) -> Iterator[Row]:
    """FSDP over 2 processes against one process, with the same total number of threads."""
    results = alternate(
        context.rounds,
        two=lambda: train(TASK, context.corpus, processes=2).speed,
        one=lambda: train(TASK, context.corpus).speed,
    )
    yield row("FSDP 2, bfloat16", "tokens/s", results["two"])
    yield row("one process, bfloat16", "tokens/s", results["one"])
    yield row("FSDP 2 / one process", "ratio", _ratios(results["two"], results["one"]))


def case_guard(context: CaseContext) -> Iterator[Row]:
    """The guard, and everything that watches a run, against a run without; two replicas.

    The mean step counts, because what happens every 50 steps is rarely in the median step.
    """
    task = dataclasses.replace(TASK, batch=8, steps=106, skipped=6)
    watched = {
        "guard__spike": "rollback",
        "checkpoint__enable": "true",  # where a roll-back starts; there is no save in these steps
        "checkpoint__interval": "1000",
        "replica_check__freq": "50",
        "straggler__freq": "50",
        "metrics__layer_norms_freq": "50",
        "metrics__noise_scale_freq": "100",
    }
    policies = {
        "off": {"guard__nonfinite": "off"},
        "nonfinite": {},
        "spikes": {"guard__spike": "skip"},
        "everything": watched,
    }

    def speed(options: dict[str, str]) -> float:
        replicas = {"parallelism__data_parallel_replicate_degree": 2}
        replicas["parallelism__data_parallel_shard_degree"] = 1
        return train(task, context.corpus, processes=2, **replicas, **options).mean_speed

    results = alternate(
        context.rounds, **{name: partial(speed, options) for name, options in policies.items()}
    )
    yield row("without a guard, 2 replicas, 8 sequences", "tokens/s", results["off"])
    yield row(
        "non-finite check / without",
        "ratio",
        _ratios(results["nonfinite"], results["off"]),
        ">= 0.99",
    )
    yield row("and spikes / without", "ratio", _ratios(results["spikes"], results["off"]))
    name = "spikes, replica check, stragglers, layer norms, noise scale / without"
    yield row(name, "ratio", _ratios(results["everything"], results["off"]), ">= 0.97")


def case_compile(context: CaseContext) -> Iterator[Row]:
    """Compiled against eager: speed, and time to the first step with an empty and a warm cache."""

    def compiled() -> tuple[TrainResult, TrainResult]:
        with tempfile.TemporaryDirectory() as cache:
            options = {"cache": cache, "compile__enable": "true"}
            return train(TASK, context.corpus, **options), train(TASK, context.corpus, **options)

    eager_run = partial(train, TASK, context.corpus)
    results = alternate(context.rounds, eager=eager_run, compiled=compiled)
    eager = results["eager"]
    cold, warm = zip(*results["compiled"], strict=True)
    speeds = [median([a.speed, b.speed]) for a, b in results["compiled"]]
    yield row("compiled, bfloat16", "tokens/s", speeds)
    yield row("eager, bfloat16", "tokens/s", [run.speed for run in eager])
    yield row("compiled / eager", "ratio", _ratios(speeds, [run.speed for run in eager]))
    yield row("recompilations", "per run", [run.recompilations for run in cold], "0")
    for name, runs in (("eager", eager), ("compiled, cold", cold), ("compiled, warm", warm)):
        seconds = [run.first_step_seconds for run in runs]
        yield row(f"time to the first step, {name}", "s", seconds)
    for cache, runs in (("an empty", cold), ("a warm", warm)):
        pairs = zip(runs, eager, strict=True)
        delays = [one.first_step_seconds - other.first_step_seconds for one, other in pairs]
        yield row(f"compilation with {cache} cache: delay of the first step", "s", delays)


def _ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Ratios per round, so that slow drift of the machine cancels."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
