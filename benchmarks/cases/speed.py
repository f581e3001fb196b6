"""Speed of train.py against a bare loop, transformers' Trainer, and itself compiled."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from statistics import median

import torch

from benchmarks.cases.case_context import CaseContext
from benchmarks.processes import Task, TrainResult, alternate, run, train
from benchmarks.roofline import FAMILY, share_of_peak
from benchmarks.table_rows import NotMeasured, Row, row

TASK = Task()


def case_trainer(context: CaseContext) -> Iterator[Row]:
    """train.py, a bare loop and (--peer) transformers' Trainer, one process, all cores."""
    for dtype in ("float32", "bfloat16"):
        yield from _compare_loops(context, dataclasses.replace(TASK, dtype=dtype))


def case_trainer_gpu(context: CaseContext) -> Iterator[Row]:
    """The same on one GPU, eager: 1B, 8 sequences of 2,048, fp32 parameters and optimizer state."""
    if not torch.cuda.is_available():
        raise NotMeasured("no CUDA device")
    task = Task("1B", seq_len=2048, batch=8, device="cuda", steps=20, skipped=6)
    yield from _compare_loops(context, task)


def _compare_loops(context: CaseContext, task: Task) -> Iterator[Row]:
    words = (json.dumps(dataclasses.asdict(task)), str(context.corpus))

    def loop(module: str, *options: str) -> float:
        return task.speed(json.loads(run(["-m", module, *words, *options]).splitlines()[-1]))

    contenders = {
        "ours": lambda: train(task, context.corpus),
        "bare": lambda: loop("benchmarks.baseline_loop", "trim"),
        "kept": lambda: loop("benchmarks.baseline_loop", "no-trim"),
    }
    missing = [name for name in ("transformers", "accelerate") if not _installed(name)]
    if context.peer and not missing:
        contenders["peer"] = lambda: loop("benchmarks.hf_trainer")
    found = alternate(context.rounds, **contenders)
    ours, bare, kept = found["ours"], found["bare"], found["kept"]
    speeds = [run.speed for run in ours]

    dtype, cast = task.dtype, " by autocast" if task.dtype == "bfloat16" else ""
    yield row(f"train.py, {dtype}", "tokens/s", speeds)
    yield row(f"bare loop, {dtype}{cast}", "tokens/s", bare)
    yield row(f"train.py / bare loop, {dtype}", "ratio", _ratios(speeds, bare), ">= 0.97")
    keeping = f"train.py / bare loop without malloc trimming, {dtype}"
    yield row(keeping, "ratio", _ratios(speeds, kept), ">= 0.97")
    yield row(f"bare loop, malloc trimming off / on, {dtype}", "ratio", _ratios(kept, bare))
    yield from _peer(context, speeds, found.get("peer"), missing, dtype)
    yield from _shares(task, ours)


def _peer(context, speeds, peer, missing, dtype) -> Iterator[Row]:
    ratio = f"train.py / transformers' Trainer, {dtype}"
    if peer:
        yield row(f"transformers' Trainer, {dtype}", "tokens/s", peer)
        yield row(ratio, "ratio", _ratios(speeds, peer), ">= 1.1")
    elif context.peer:
        why = f"{' and '.join(missing)} not installed: pip install -e '.[hf]'"
        yield Row(ratio, "ratio", target=">= 1.1", missed=why)


def _shares(task: Task, ours: list[TrainResult]) -> Iterator[Row]:
    """Share of the device's peak that train.py reaches, and where its time goes."""
    sizes, dtype = FAMILY.flavors[task.flavor], task.dtype
    peaks = [run.peak_flops for run in ours]
    name = f"matmul peak (measured on a CPU, published for a GPU), {dtype}"
    yield row(name, "TFLOP/s", [peak / 1e12 for peak in peaks])
    for words in ("causal", "full"):
        full = {"full_attention": words == "full"}
        shares = [share_of_peak(r.speed, sizes, task.seq_len, r.peak_flops, **full) for r in ours]
        yield row(f"share of that peak, {words} attention, {dtype}", "share", shares)
    yield row(f"waiting for data, {dtype}", "share", [run.data_share for run in ours], "< 0.01")
    yield row(f"peak memory, {dtype}", "GiB", [run.peak_memory_gib for run in ours])


def case_fsdp(context: CaseContext) -> Iterator[Row]:
    """FSDP over 2 processes against one process, with the same total number of threads."""
    found = alternate(
        context.rounds,
        two=lambda: train(TASK, context.corpus, processes=2).speed,
        one=lambda: train(TASK, context.corpus).speed,
    )
    yield row("FSDP 2, bfloat16", "tokens/s", found["two"])
    yield row("one process, bfloat16", "tokens/s", found["one"])
    yield row("FSDP 2 / one process", "ratio", _ratios(found["two"], found["one"]))


def case_compile(context: CaseContext) -> Iterator[Row]:
    """Compiled against eager: speed, and time to the first step with an empty and a warm cache."""

    def compiled() -> tuple[TrainResult, TrainResult]:
        with tempfile.TemporaryDirectory() as cache:
            options = {"cache": cache, "compile__enable": "true"}
            return train(TASK, context.corpus, **options), train(TASK, context.corpus, **options)

    found = alternate(context.rounds, eager=lambda: train(TASK, context.corpus), compiled=compiled)
    eager = found["eager"]
    cold, warm = zip(*found["compiled"], strict=True)
    fast = [median([a.speed, b.speed]) for a, b in found["compiled"]]
    yield row("compiled, bfloat16", "tokens/s", fast)
    yield row("eager, bfloat16", "tokens/s", [run.speed for run in eager])
    yield row("compiled / eager", "ratio", _ratios(fast, [run.speed for run in eager]))
    yield row("recompilations", "per run", [run.recompilations for run in cold], "0")
    for words, runs in (("eager", eager), ("compiled, cold", cold), ("compiled, warm", warm)):
        yield row(f"to the first step, {words}", "s", [run.first_step_seconds for run in runs])
    for words, runs in (("an empty", cold), ("a warm", warm)):
        pairs = zip(runs, eager, strict=True)
        more = [one.first_step_seconds - other.first_step_seconds for one, other in pairs]
        yield row(f"compiling, with {words} cache: first step later by", "s", more)


def _ratios(above: list[float], below: list[float]) -> list[float]:
    """Ratios per round, so that slow drift of the machine cancels."""
    return [a / b for a, b in zip(above, below, strict=True)]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
