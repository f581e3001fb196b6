"""What a run does beside its steps: meters, the guard, periodic actions."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from functools import partial

from titanlite.data import SampleStream, ValidationSet
from titanlite.distributed.collectives import gather_from_all_ranks
from titanlite.distributed.process_group import set_collective_timeouts
from titanlite.guard.handler import Guard
from titanlite.guard.judge import StepJudge
from titanlite.guard.rollback import CheckpointRollback, SavedRollbacks
from titanlite.job.data import build_batch_dump
from titanlite.job.job import Job
from titanlite.job.start import restore
from titanlite.log import logger
from titanlite.meters import METERS
from titanlite.meters.metered_run import MeteredRun
from titanlite.metrics import MetricSinks, Profiler
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.parallelize.compile import describe_compilation
from titanlite.runtime import RunFolderLock
from titanlite.runtime.membership import Members
from titanlite.training import periodic
from titanlite.training.hessian import hessian_hooks
from titanlite.training.memory_actions import memory_checkpoints
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.run import Run
from titanlite.training.state import TrainState
from titanlite.training.validation import (
    ValidationResults,
    run_validation,
    validate,
    validation_samples,
)
from titanlite.training.weight_average import average_of

ACTIONS: dict[str, Callable[[Job, Run], periodic.PeriodicAction]] = {}
# name -> builder of an action that runs before checkpoints are saved; a new one is one line here


def add_meters(
    job: Job, run: Run, sharded: ShardedModel, layout: ParallelLayout, stream: SampleStream
) -> Run:
    """The run with the hooks and actions of titanlite/meters, which come first, and of Sophia."""
    config = job.config
    metered = MeteredRun(
        run,
        config.metrics,
        config.replica_check,
        config.straggler,
        job.spec,
        job.sizes,
        sharded,
        layout,
        stream,
    )
    meters = [meter for build in METERS if (meter := build(metered))]
    hooks = [meter.hook for meter in meters if meter.hook]
    hooks += hessian_hooks(run.engine, run.state, config.debug.seed)
    settings = run.step_settings
    # the average comes last, as the load of experts changes their biases after an update
    settings = dataclasses.replace(settings, hooks=(*hooks, *settings.hooks))
    actions = (*run.actions, *(meter.action for meter in meters))
    return dataclasses.replace(run, step_settings=settings, actions=actions)


def build_guard(job: Job, run: Run, stream: SampleStream, lock: RunFolderLock) -> Guard:
    """What handles the steps of a run that the judge rejects."""
    parts = run.state.parts
    judge, past = parts.get("guard"), parts["rollbacks"]
    assert judge is None or isinstance(judge, StepJudge)
    assert isinstance(past, SavedRollbacks)
    load = partial(restore, job, run.checkpointer, run.state, stream, completely=True)
    rollback = CheckpointRollback(job.config.guard, past, run, lock, load)
    dump = build_batch_dump(job, stream)
    return Guard(run, judge, rollback, dump, job.config.compile.compiles("model"))


def add_periodic_actions(
    job: Job,
    run: Run,
    validation_sets: list[ValidationSet],
    profilers: Mapping[str, Profiler],
    members: Members,
) -> Run:
    """The run with its actions after a step, in this order."""
    config, state, sinks = job.config, run.state, run.sinks
    average, measure = average_of(state), partial(validate_sets, job, run, validation_sets)

    def set_timeouts(name: str) -> None:
        seconds = getattr(config.comm, name)
        set_collective_timeouts(seconds, excluded=run.checkpointer.groups)
        run.watchdog.set_timeout(seconds, f"comm.{name}")

    validated, began, opened = False, state.step, time.monotonic()

    def validate_all(step: int) -> ValidationResults:
        nonlocal validated
        first, validated = not validated, True
        if first:  # compiles graphs of its own
            set_timeouts("init_timeout_seconds")
        results = measure("validation", step)
        if average is not None and config.weight_average.validate:
            with average.in_use():
                results |= measure("validation_average", step)
        if first and step > began:  # else the first step, which compiles, is still to come
            set_timeouts("train_timeout_seconds")
        return results

    def finish_start() -> None:
        """Shorten the timeouts after the first step, which compiles and allocates."""
        if config.compiles:
            logger.info("%s", describe_compilation())
        set_timeouts("train_timeout_seconds")
        if config.elastic.enable and (fields := members.describe_return(began, opened)):
            layout = {"ranks": job.degrees.ranks, "layout": str(job.degrees)}
            # of the step it continued from: stays if the run comes back to it once more
            sinks.event(began, "returned", **layout, **fields)

    validation = run_validation(validate_all, sinks, config.validation.freq, run.training.steps)
    actions = (
        log_overflows(state, sinks),
        periodic.log_metrics(state, run.throughput, sinks, config.metrics.log_freq),
        *(build(job, run) for build in ACTIONS.values()),
        periodic.report_finished_save(run.checkpointer, sinks),
        periodic.save_checkpoints(state, run.checkpointer, sinks),
        *memory_checkpoints(state, run.checkpointer, sinks),
        # after the save, so that a kill during the validation loses no step
        *([validation] if validation_sets else []),
        periodic.collect_garbage(config.training.gc_freq),
        periodic.after_first_step(finish_start),
        *(periodic.step_profiler(name, profiler) for name, profiler in profilers.items()),
    )
    return dataclasses.replace(run, actions=(*run.actions, *actions))


def log_overflows(state: TrainState, sinks: MetricSinks) -> PeriodicAction:
    """Write an event for each step that was skipped because float16 gradients overflowed."""
    names = [name for name, _ in state.model.named_parameters()]

    def write(info: StepInfo) -> None:
        assert state.loss_scale is not None
        norms = zip(names, info.result.own_norms.tolist(), strict=True)
        own = next((name for name, norm in norms if not math.isfinite(norm)), None)
        parameters = gather_from_all_ranks(own)
        rank = next((rank for rank, name in enumerate(parameters) if name), None)
        fields = {"reason": "gradients overflow float16", "loss_scale": state.loss_scale.value}
        fields |= {"rank": rank, "parameter": "" if rank is None else parameters[rank]}
        sinks.event(info.step, "step_skipped", **fields)

    def is_due(info: StepInfo) -> bool:
        return info.result.overflowed

    return PeriodicAction("log", is_due, write, needs_accepted=True)


def validate_sets(
    job: Job, run: Run, validation_sets: list[ValidationSet], event: str, step: int
) -> ValidationResults:
    """Measure each validation set with the present weights; `event` says which weights they are."""
    config = job.config.validation
    return {
        (event, data.name): validate(
            run.engine,
            data,
            validation_samples(config, data, job.global_batch),
            config.local_batch_size,
            run.step_settings.mesh,
            run.device,
            partial(run.watchdog.set_phase, step),
        )
        for data in validation_sets
    }
