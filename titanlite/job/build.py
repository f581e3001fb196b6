"""Build the components of a run from a job; each builder can be used alone.

`open_run` opens the data before the checkpoint, which is compared with them. The checkpoint is
found, and the start recorded, which detects a crash loop, before the model is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from titanlite.checkpoint import Checkpointer
from titanlite.data import SampleStream
from titanlite.distributed.collectives import AsyncMax, run_on_all_ranks, run_on_rank_0
from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.mesh import Mesh, build_mesh, connect_mesh
from titanlite.distributed.process_group import RankContext, choose_device, join_process_group
from titanlite.distributed.rendezvous import announce_ranks
from titanlite.errors import EXIT_INTERRUPTED, ConfigError
from titanlite.files import write_file_atomically
from titanlite.guard.judge import StepJudge
from titanlite.guard.rollback import SavedRollbacks
from titanlite.job.actions import add_meters, add_periodic_actions, build_guard
from titanlite.job.data import SavedLanes, build_batches, build_data, log_mixture
from titanlite.job.job import Job
from titanlite.job.start import (
    advise_on_memory,
    build_run_meter,
    load_start,
    record_start,
    report_start,
)
from titanlite.kernels.backend import activate_flash_package, choose_kernel
from titanlite.kernels.fla import try_fla_kernels
from titanlite.log import log_waiting, logger
from titanlite.meters.expert_load import ExpertLoad
from titanlite.meters.noise_scale import NoiseScale
from titanlite.metrics import MetricSinks, SinkContext, build_profilers, metrics_folder, open_sinks
from titanlite.optim import MatrixFacts, OptimizerInBackward, adaptive_clip, build_optimizer
from titanlite.parallelize import ParallelLayout, ShardedModel, build_parallel_modules
from titanlite.parallelize.compile import prepare_compiler
from titanlite.runtime import (
    HeartbeatWatchdog,
    MemoryUsage,
    RunFolderLock,
    StopRequest,
    explain_out_of_memory,
    lock_run_folders,
)
from titanlite.runtime.membership import Members, find_members
from titanlite.training.engine import Engine, build_engine
from titanlite.training.run import Run
from titanlite.training.state import Counters, SavedPart, TrainState
from titanlite.training.step import StepSettings
from titanlite.training.weight_average import PART, WeightAverage, average_of


@dataclass(frozen=True)
class RunServices:
    """Services that start before the components of a run and stop after them."""

    rank: RankContext
    watchdog: HeartbeatWatchdog
    folder_lock: RunFolderLock
    members: Members  # the hosts of this start, with those of spare ranks
    counters: Counters  # steps, samples and tokens of the run so far
    deadline: float | None  # stop before this time.monotonic(); None: no time limit
    memory_advice: list[str]  # lines for an out-of-memory error

    def explain_out_of_memory(
        self, model: nn.Module | None = None, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> AbstractContextManager[None]:
        """Replace an out-of-memory error of the block by a UserError with advice."""
        usage = MemoryUsage(self.rank.device, model, optimizers)
        return explain_out_of_memory(usage, lambda: self.watchdog.position_text, self.memory_advice)


@dataclass(frozen=True)
class RunParts:
    """What a run was built from, for `Extend`."""

    job: Job
    sharded: ShardedModel
    layout: ParallelLayout
    stream: SampleStream
    rank: RankContext


Extend = Callable[[Run, RunParts], Run]  # the run with what a command adds to it


def keep_run(run: Run, parts: RunParts) -> Run:
    """The `Extend` that adds nothing."""
    return run


@contextmanager
def open_services(job: Job, began: float, report: ErrorReport) -> Iterator[RunServices]:
    """Join the process group, start the watchdog and lock the run's folders for the block."""
    device, comm = choose_device(job.config.job.device), job.config.comm
    counters, limit = Counters(), job.config.job.time_limit_minutes
    deadline = began + 60 * limit if limit else None
    # locked too, local or remote: jobs with other dump_folders may have the same one
    shared = {"checkpoint.folder": job.checkpoint_folder} if job.config.checkpoint.saves else {}
    with (
        join_process_group(device, comm, job.config.debug, job.folder, report) as rank,
        HeartbeatWatchdog(
            rank.rank,
            rank.world_size,
            comm.init_timeout_seconds,
            job.folder,
            rank.start_id,
            disk_timeout_seconds=job.config.checkpoint.timeout_seconds,
            recorder=comm.flight_recorder(job.folder),
        ) as watchdog,
        lock_run_folders(job.folder, shared, lambda: counters.step) as lock,
        report.printing_errors(),  # before the lock and the watchdog end, which can block
        watchdog.attributing_errors(),  # inside the lock, so that the start log names the lost rank
    ):
        watchdog.set_lost_after(job.config.elastic.silent_limit)
        announce_ranks(rank.rank)
        advice = advise_on_memory(job.config, device.type == "cuda")
        max_losses = job.config.job.max_crashes if job.config.elastic.enable else 0
        members = find_members(job.folder, rank, began, max_losses)
        yield RunServices(rank, watchdog, lock, members, counters, deadline, advice)


@contextmanager
def open_run(job: Job, services: RunServices, extend: Extend = keep_run) -> Iterator[Run]:
    """Build all components of a run, at the step that it starts or resumes from."""
    with services.explain_out_of_memory(), ExitStack() as start:
        start.enter_context(log_waiting("opening the data, building and loading the model"))
        with _open_run(job, services, extend) as run:
            start.close()
            yield run


@contextmanager
def _open_run(job: Job, services: RunServices, extend: Extend) -> Iterator[Run]:
    rank, watchdog, lock = services.rank, services.watchdog, services.folder_lock
    stop_request = build_stop_request(job, services)
    stream, validation_sets = build_data(job, rank)
    checkpointer = build_checkpointer(job, stream, lock)
    watchdog.set_background_limit(lambda: checkpointer.save_time_limit)
    watchdog.set_phase(0, "load")
    found = checkpointer.find()
    watchdog.set_phase(0, "build")
    record_start(job, checkpointer, lock, services.members.hosts, found)
    mesh = build_mesh(job.degrees, rank.device.type)
    connect_mesh(mesh, rank.device, partial(watchdog.set_phase, 0))
    watchdog.set_phase(0, "build")
    layout = ParallelLayout(mesh, job.config.parallelism, job.pipeline)
    # Creates a process group. The optimizer follows, because it creates groups on some pipeline
    # stages only: torch 2.15 names a group of all ranks by the number of groups created before.
    max_over_ranks = AsyncMax()
    sharded = build_model(job, layout, rank)
    parts = RunParts(job, sharded, layout, stream, rank)
    engine = build_run_engine(parts)
    lanes = SavedLanes(stream, services.counters)
    state, in_backward = build_state(job, sharded, mesh, services.counters, {"lanes": lanes})
    watchdog.set_phase(0, "load")
    load_start(job, checkpointer, state, stream, found)
    watchdog.set_phase(state.step, "start")

    throughput = build_run_meter(job, rank)
    training = job.config.training
    run_on_rank_0(lambda: log_mixture(stream, job.batches, training.steps, state.counters))
    with ExitStack() as stack:
        # Entered first, so that the profilers still see the out-of-memory error, and write a
        # snapshot.
        stack.enter_context(services.explain_out_of_memory(state.model, state.optimizer))
        sinks = stack.enter_context(build_sinks(job, rank, state))
        report_start(job, state, found, sinks)
        profilers = build_profilers(job.config.profiling, job.folder, rank.rank, state.step)
        for profiler in profilers.values():
            stack.enter_context(profiler)
        run = Run(
            training=training,
            device=rank.device,
            state=state,
            engine=engine,
            open_batches=partial(build_batches, job, stream, state, mesh, engine),
            step_settings=build_step_settings(job, state, mesh, in_backward),
            checkpointer=checkpointer,
            throughput=throughput,
            sinks=sinks,
            watchdog=watchdog,
            stop_request=stop_request,
            max_over_ranks=max_over_ranks,
            lost_folder=lambda: lock.lost,
        )
        run = extend(run, parts)
        run = add_meters(job, run, sharded, layout, stream)
        run = add_periodic_actions(job, run, validation_sets, profilers, services.members)
        yield dataclasses.replace(run, guard=build_guard(job, run, stream, lock))


def build_stop_request(job: Job, services: RunServices) -> StopRequest:
    """The request to stop, set by signals and by the deadline.

    If the run saves no checkpoints, signals do not set it but end the process immediately.
    """
    stop_request = StopRequest(services.deadline)
    if job.config.checkpoint.saves:
        release = partial(services.folder_lock.release, EXIT_INTERRUPTED, "Ctrl-C, twice")
        stop_request.install_handlers(release, services.rank.rank)
    return stop_request


def build_checkpointer(job: Job, stream: SampleStream, lock: RunFolderLock) -> Checkpointer:
    return Checkpointer(
        job.checkpoint_folder,
        job.config.checkpoint,
        properties=job.properties(stream),
        job=dataclasses.asdict(job.config),
        layout=str(job.degrees),
        files=stream.tokenizer.files if stream.tokenizer else {},
        check_lease=lock.check,
    )


def build_model(job: Job, layout: ParallelLayout, rank: RankContext) -> ShardedModel:
    """The parallelized model with its initial weights."""
    config, device = job.config, rank.device
    if config.compiles:
        run_on_all_ranks(lambda: prepare_compiler(device))
    kernel = run_on_rank_0(
        lambda: choose_kernel(
            config.attention,
            job.attention_shape,
            job.transforms.compute_dtype,
            device,
            context_degree=layout.mesh.cp.size(),
        )
    )
    activate_flash_package(kernel)
    if config.attention.linear_backend == "fla" and hasattr(job.sizes, "linear_key_heads"):
        dtype, ranks = job.transforms.compute_dtype, job.degrees.tensor
        run_on_rank_0(lambda: try_fla_kernels(job.sizes, ranks, dtype, device))
    transforms = dataclasses.replace(job.transforms, attention_kernel=kernel)
    modules = build_parallel_modules(job.spec, job.sizes, layout, transforms)
    sharded = modules.materialize(device, config.debug.seed, job.widths)
    if config.model.print_after_conversion:
        logger.info("%s", sharded.model)
    return sharded


def build_run_engine(parts: RunParts) -> Engine:
    job, end = parts.job, parts.stream.document_end_id
    return build_engine(
        parts.sharded,
        parts.layout,
        parts.rank.device,
        local_batch=job.config.training.local_batch_size,
        document_end_id=end if job.transforms.document_mask else None,
    )


def build_state(
    job: Job,
    sharded: ShardedModel,
    mesh: Mesh,
    counters: Counters,
    data_parts: Mapping[str, SavedPart] | None = None,
) -> tuple[TrainState, OptimizerInBackward | None]:
    """The training state at step 0, and with early_step_in_backward the hooks that update it."""
    facts = MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)
    optimizer = build_optimizer(
        sharded.model, job.config.optimizer, facts, job.rate_schedule, job.widths
    )
    # Under CPU offload the parameters are in host memory, and so is the decision to update them.
    device = next(sharded.model.parameters()).device
    parts: dict[str, SavedPart] = {"rollbacks": SavedRollbacks(counters), **(data_parts or {})}
    if job.config.guard.nonfinite != "off":
        parts["guard"] = StepJudge(job.config.guard, device, mesh.tp)
        # what the guard saves is the state of its judge
    if job.config.weight_average.decay:
        parts[PART] = WeightAverage(sharded.model, job.config.weight_average, counters)
    if job.config.metrics.noise_scale_freq:
        parts["noise_scale"] = NoiseScale()
    if job.spec.experts(job.sizes) is not None:
        balancing = job.transforms.load_balancing
        parts["expert_load"] = ExpertLoad(sharded.model, job.spec, job.sizes, balancing, mesh)
    state = TrainState(sharded.model, optimizer, job.loss_scale, counters, parts)
    if not job.config.optimizer.early_step_in_backward:
        return state, None
    return state, OptimizerInBackward(sharded.model, optimizer)


def build_step_settings(
    job: Job, state: TrainState, mesh: Mesh, in_backward: OptimizerInBackward | None
) -> StepSettings:
    """The settings of every optimizer step, without the hooks of meters."""
    training, adaptive = job.config.training, None
    if training.clipping == "adaptive":
        adaptive = adaptive_clip(state.model.named_parameters(), training.adaptive_clip_factor)
    judge = state.parts.get("guard")
    accepts = judge.judge if isinstance(judge, StepJudge) else None
    average = average_of(state)
    hooks = (average,) if average else ()
    return StepSettings(mesh, training.clip_norm, in_backward, adaptive, judge=accepts, hooks=hooks)


def build_sinks(job: Job, rank: RankContext, state: TrainState) -> MetricSinks:
    """Open rank 0's metric sinks and write config.toml; an error is raised on all ranks."""
    past = state.parts["rollbacks"]
    assert isinstance(past, SavedRollbacks)
    rollbacks = len(past.history.tries)

    def open_all() -> MetricSinks:
        config = job.config
        try:
            folder = metrics_folder(job.folder, config.checkpoint.saves)
            context = SinkContext(
                config.metrics,
                folder,
                total_steps=config.training.steps,
                completed_steps=state.step,
                rollbacks=rollbacks,
                job=dataclasses.asdict(config),
            )
            sinks = open_sinks(context)
            write_file_atomically(folder / "config.toml", job.as_toml().encode())
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder = {job.folder}: cannot write {error.filename or 'to it'}:"
                f" {error.strerror or error}.",
                fix="Free space there or allow writing, or use another job.dump_folder.",
            ) from error
        return sinks

    return run_on_all_ranks(MetricSinks if rank.rank else open_all)
