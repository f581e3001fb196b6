"""Build the components of a run from a job; each builder can be used alone.

`open_run` calls them in order. It finds the checkpoint to resume from before it builds anything
expensive, so that a crash loop is detected as early as possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint import Checkpointer, FoundCheckpoint
from titanlite.data import TEXT, BatchDump, SampleStream, ValidationSet, rank_slices
from titanlite.distributed.collectives import (
    AsyncMax,
    capture_user_error,
    gather_from_all_ranks,
    raise_on_all_ranks,
    run_on_rank_0,
)
from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.mesh import Mesh, build_mesh
from titanlite.distributed.process_group import (
    RankContext,
    choose_device,
    join_process_group,
    set_collective_timeouts,
)
from titanlite.distributed.rendezvous import announce_ranks
from titanlite.errors import EXIT_INTERRUPTED, CheckpointError, ConfigError
from titanlite.files import write_file_atomically
from titanlite.job.config import JobConfig, changed_settings
from titanlite.job.data import open_job_stream, open_job_tokenizer, open_job_validation
from titanlite.job.evaluation import build_evaluation
from titanlite.job.job import Job
from titanlite.job.meters import add_meters
from titanlite.job.mixture import check_stream_length, log_mixture
from titanlite.job.streaming import TokenizingAdvice, gather_data_progress
from titanlite.kernels.backend import activate_flash_package, choose_kernel
from titanlite.log import log_waiting, logger
from titanlite.metrics import (
    MetricSinks,
    Profiler,
    ThroughputMeter,
    build_meter,
    build_profilers,
    measure_matmul_flops,
    metrics_folder,
    no_sinks,
    open_sinks,
)
from titanlite.optim import (
    MatrixFacts,
    NoiseScale,
    OptimizerInBackward,
    adaptive_clip,
    build_optimizer,
)
from titanlite.parallelize import ParallelLayout, ShardedModel, build_sharded_model
from titanlite.parallelize.activation_checkpoint import plot_memory_budgets
from titanlite.parallelize.compile import describe_compilation, prepare_compiler
from titanlite.runtime import (
    HeartbeatWatchdog,
    MemoryUsage,
    RunFolderLock,
    StopRequest,
    explain_out_of_memory,
    lock_run_folders,
)
from titanlite.training import (
    Batch,
    CheckpointRollback,
    Counters,
    Engine,
    ExpertLoad,
    PeriodicAction,
    Run,
    StepJudge,
    StepSettings,
    TrainState,
    ValidationResult,
    build_engine,
    periodic,
    validate,
    validation_samples,
)


@dataclass(frozen=True)
class RunServices:
    """Services that start before the components of a run and stop after them."""

    rank: RankContext
    watchdog: HeartbeatWatchdog
    folder_lock: RunFolderLock
    counters: Counters  # steps, samples and tokens of the run so far
    deadline: float | None  # stop before this time.monotonic(); None: no time limit
    memory_advice: list[str]  # lines for an out-of-memory error

    def explain_out_of_memory(
        self, model: nn.Module | None = None, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> AbstractContextManager[None]:
        """Replace an out-of-memory error of the block by a UserError with advice."""
        usage = MemoryUsage(self.rank.device, model, optimizers)
        return explain_out_of_memory(usage, lambda: self.watchdog.position, self.memory_advice)


@contextmanager
def open_services(job: Job, began: float, report: ErrorReport) -> Iterator[RunServices]:
    """Join the process group, start the watchdog and lock the run's folders for the block."""
    device, comm = choose_device(job.config.job.device), job.config.comm
    counters, limit = Counters(), job.config.job.time_limit_minutes
    deadline = began + 60 * limit if limit else None
    with (
        join_process_group(device, comm, job.config.debug, job.folder, report) as rank,
        HeartbeatWatchdog(
            rank.rank,
            rank.world_size,
            comm.init_timeout_seconds,
            job.folder,
            rank.start_id,
            job.config.checkpoint.timeout_seconds,
            comm.flight_recorder(job.folder),
        ) as watchdog,
        lock_run_folders(job.folder, job.other_folders, lambda: counters.step) as lock,
        report.printing_errors(),  # before the lock and the watchdog end, which can block
        watchdog.attributing_errors(),  # inside the lock, so that the start log names the lost rank
    ):
        announce_ranks(rank.rank)
        advice = advise_on_memory(job.config, device.type == "cuda")
        yield RunServices(rank, watchdog, lock, counters, deadline, advice)


def advise_on_memory(config: JobConfig, on_gpu: bool) -> list[str]:
    """Lines for an out-of-memory error: settings that need less memory and are not in use."""
    training, recompute = config.training, config.activation_checkpoint
    optimizer, chunk = config.optimizer, config.loss.chunk_tokens
    half = training.local_batch_size // 2
    settings = [
        (half > 0, f"training.local_batch_size = {half} with the same training.global_batch_size"),
        (recompute.mode != "full", 'activation_checkpoint.mode = "full"'),
        (chunk == 0 or chunk > 1024, "loss.chunk_tokens = 1024"),
        (on_gpu and not recompute.offload, "activation_checkpoint.offload = true"),
        (on_gpu and not optimizer.offload, "optimizer.offload = true"),
        (True, "more ranks, for FSDP or tensor parallelism"),
    ]
    command = "python -m titanlite_planner memory --job.config_file RUN.toml --job.check_ranks N"
    return [
        "  settings that need less memory:",
        *(f"    {text}" for helps, text in settings if helps),
        f"  how much each saves: {command}",
    ]


@contextmanager
def open_run(job: Job, services: RunServices) -> Iterator[Run]:
    """Build all components of a run, at the step that it starts or resumes from."""
    with services.explain_out_of_memory(), ExitStack() as start:
        start.enter_context(log_waiting("opening the data, building and loading the model"))
        with _open_run(job, services) as run:
            start.close()
            yield run


@contextmanager
def _open_run(job: Job, services: RunServices) -> Iterator[Run]:
    rank, watchdog, lock = services.rank, services.watchdog, services.folder_lock
    stop_request = build_stop_request(job, services)
    stream, validation_sets = build_data(job, rank)
    checkpointer = build_checkpointer(job, stream, lock)
    watchdog.watch_limit(lambda: checkpointer.limit)
    watchdog.set_phase(0, "load")
    found = checkpointer.find()
    watchdog.set_phase(0, "build")
    # A run that never saves always starts from the same step, so repeated starts from one step do
    # not mean that it is in a crash loop.
    max_crashes = job.config.job.max_crashes if checkpointer.saves else 0
    lock.record_start(rank.world_size, found.step if found else 0, max_crashes)

    mesh = build_mesh(job.degrees, rank.device.type)
    # Before the optimizer, which creates process groups on some pipeline stages only: torch 2.15
    # names a group of all ranks by the number of groups that the rank has created before.
    max_over_ranks = AsyncMax()
    model = build_model(job, mesh, rank)
    engine = build_run_engine(job, model, mesh, stream, rank)
    state, in_backward = build_state(job, model, mesh, services.counters)
    if found:
        watchdog.set_phase(0, "load")
        restore(job, checkpointer, state, stream, found)
        watchdog.set_phase(state.step, "start")

    meter = build_run_meter(job, rank)
    if rank.rank == 0:
        log_mixture(stream, job.batches, job.config.training.steps, state.counters)
    with ExitStack() as stack:
        # Entered first, so that the profilers still see the out-of-memory error, and write a
        # snapshot.
        stack.enter_context(services.explain_out_of_memory(state.model, state.optimizer))
        sinks = stack.enter_context(build_sinks(job, rank, state, checkpointer.saves))
        report_start(job, state, found, sinks)
        profilers = build_profilers(job.config.profiling, job.folder, rank.rank, state.step)
        for profiler in profilers.values():
            stack.enter_context(profiler)
        run = Run(
            config=job.config.training,
            device=rank.device,
            state=state,
            engine=engine,
            open_batches=partial(build_batches, job, stream, state, mesh, engine),
            peak_lr=job.config.optimizer.lr,
            step_settings=build_step_settings(job, model.model, mesh, in_backward),
            actions=(),
            checkpointer=checkpointer,
            meter=meter,
            sinks=sinks,
            watchdog=watchdog,
            stop_request=stop_request,
            dump_batch=build_batch_dump(job, stream, rank),
            compiles_layers=job.config.compile.compiles("model"),
            max_over_ranks=max_over_ranks,
            lost_folder=lambda: lock.lost,
            rollback=build_rollback(job, services, state, stream, checkpointer, sinks),
        )
        actions = build_periodic_actions(job, run, validation_sets, profilers, stream)
        yield add_meters(job, dataclasses.replace(run, actions=actions), stream)


def build_stop_request(job: Job, services: RunServices) -> StopRequest:
    """The request to stop, set by signals and by the deadline.

    If the run saves no checkpoints, signals do not set it but end the process immediately.
    """
    stop_request = StopRequest(services.deadline)
    if job.config.checkpoint.saves:
        release = partial(services.folder_lock.release, EXIT_INTERRUPTED, "Ctrl-C, twice")
        stop_request.install_handlers(release, services.rank.rank)
    return stop_request


def build_data(job: Job, rank: RankContext) -> tuple[SampleStream, list[ValidationSet]]:
    """The training data and the validation sets; a DataError of one rank is raised on all ranks."""

    def open_all() -> tuple[SampleStream, list[ValidationSet]]:
        tokenizer, vocab_size = open_job_tokenizer(job.config), job.sizes.vocab_size
        verify_slice = (rank.rank, rank.world_size)
        stream = open_job_stream(job.config, vocab_size, tokenizer, verify_slice)
        assert stream is not None, "the config check rejects empty data.sources"
        check_stream_length(stream, job.batches, job.config.training.steps)
        return stream, open_job_validation(job.config, vocab_size, tokenizer, verify_slice)

    opened, problem = capture_user_error(open_all)
    raise_on_all_ranks(problem)
    assert opened is not None
    return opened


def build_checkpointer(job: Job, stream: SampleStream, lock: RunFolderLock) -> Checkpointer:
    """The checkpointer of the run's checkpoint folder."""
    return Checkpointer(
        job.checkpoint_folder,
        job.config.checkpoint,
        properties=job.properties(stream),
        job=dataclasses.asdict(job.config),
        layout=str(job.degrees),
        files=stream.tokenizer.files if stream.tokenizer else {},
        check_lease=lock.check,
    )


def build_model(job: Job, mesh: Mesh, rank: RankContext) -> ShardedModel:
    """The parallelized model with its initial weights."""
    config, device = job.config, rank.device
    if config.compiles:
        _, problem = capture_user_error(lambda: prepare_compiler(device))
        raise_on_all_ranks(problem)
    if config.activation_checkpoint.visualize_memory_budget_pareto:
        plot_memory_budgets(job.folder / "memory_budget_pareto")
    kernel = run_on_rank_0(
        lambda: choose_kernel(
            config.attention,
            job.attention_shape,
            job.transforms.compute_dtype,
            device,
            context_parallel=mesh.cp.size() > 1,
        )
    )
    activate_flash_package(kernel)
    model = build_sharded_model(
        job.spec,
        job.sizes,
        ParallelLayout(mesh, config.parallelism, job.pipeline),
        dataclasses.replace(job.transforms, attention_kernel=kernel),
        device,
        seed=config.debug.seed,
        widths=job.widths,
    )
    if config.model.print_after_conversion:
        logger.info("%s", model.model)
    return model


def build_run_engine(
    job: Job, model: ShardedModel, mesh: Mesh, stream: SampleStream, rank: RankContext
) -> Engine:
    """The engine that runs forward and backward of the model."""
    return build_engine(
        model,
        ParallelLayout(mesh, job.config.parallelism, job.pipeline),
        rank.device,
        local_batch=job.config.training.local_batch_size,
        by_source=job.measures_sources,
        document_end_id=stream.end if job.transforms.document_mask else None,
    )


def build_state(
    job: Job, model: ShardedModel, mesh: Mesh, counters: Counters
) -> tuple[TrainState, OptimizerInBackward | None]:
    """The training state at step 0, and with early_step_in_backward the hooks that update it."""
    facts = MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)
    optimizer = build_optimizer(
        model.model, job.config.optimizer, facts, job.rate_schedule, job.widths
    )
    # Under CPU offload the parameters are in host memory, and so is the decision to update them.
    device = next(model.model.parameters()).device
    judge = StepJudge(job.config.guard, device, mesh.tp) if job.config.guard.enabled else None
    noise_scale = NoiseScale() if job.config.metrics.noise_scale_freq else None
    load = None
    if job.spec.experts(job.sizes) is not None:
        balancing = job.transforms.load_balancing
        load = ExpertLoad(model.model, job.spec, job.sizes, balancing, mesh)
    state = TrainState(model.model, optimizer, job.loss_scale, counters, judge, noise_scale, load)
    if not job.config.optimizer.early_step_in_backward:
        return state, None
    return state, OptimizerInBackward(model.model, optimizer)


def build_step_settings(
    job: Job, model: nn.Module, mesh: Mesh, in_backward: OptimizerInBackward | None
) -> StepSettings:
    """The settings of every optimizer step."""
    training, adaptive = job.config.training, None
    if training.clipping == "adaptive":
        adaptive = adaptive_clip(
            model.named_parameters(),
            training.adaptive_clip_factor,
            training.adaptive_clip_eps,
            training.adaptive_clip_exclude,
        )
    return StepSettings(mesh, training.clip_norm, in_backward, adaptive)


def restore(
    job: Job,
    checkpointer: Checkpointer,
    state: TrainState,
    stream: SampleStream,
    found: FoundCheckpoint,
    *,
    completely: bool = False,
) -> None:
    """Load a checkpoint into the training state, and set aside later checkpoints of the run.

    `completely`: ignore checkpoint.exclude_from_loading, which applies to starts only.
    """
    progress = checkpointer.load(
        found,
        state.model,
        state.optimizer,
        job.properties_to_check(stream),
        finished_at=job.config.training.steps,
        completely=completely,
    )
    if progress:  # None if only the weights of another run were loaded
        restore_progress(state, progress, found)
        stream.restore_lanes(progress.get("lanes", {}))
        checkpointer.set_aside_later_steps(state.step)


def restore_progress(state: TrainState, progress: dict[str, Any], found: FoundCheckpoint) -> None:
    """Restore the progress of a checkpoint, which may be damaged or crafted."""
    try:
        state.restore(progress)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"{found.folder}: its progress is not valid ({e!r:.200}).",
            fix="Use an earlier checkpoint (checkpoint.load_step).",
        ).mark_on_all_ranks() from None


def build_rollback(
    job: Job,
    services: RunServices,
    state: TrainState,
    stream: SampleStream,
    checkpointer: Checkpointer,
    sinks: MetricSinks,
) -> CheckpointRollback:
    """What rolls the run back to an earlier checkpoint."""
    load = partial(restore, job, checkpointer, state, stream, completely=True)
    lock, watchdog = services.folder_lock, services.watchdog
    return CheckpointRollback(
        job.config.guard.rollback, state, checkpointer, sinks, watchdog, lock, load
    )


def build_run_meter(job: Job, rank: RankContext) -> ThroughputMeter:
    """The throughput meter; logs the job's summary, which shows the peak that it found."""
    meter = build_meter(
        flops_per_token=job.flops_per_token,
        dtype=job.transforms.compute_dtype,
        devices=rank.world_size,
        device=rank.device,
    )
    logger.info("%s", job.summary(rank.device, meter.peak_flops))
    if rank.device.type == "cpu":
        check_compute_dtypes(job.config.training.mixed_precision_param)
        warn_if_dtype_is_slow(job, meter, rank)
    return meter


def build_sinks(job: Job, rank: RankContext, state: TrainState, saves: bool) -> MetricSinks:
    """Open rank 0's metric sinks and write config.toml; an error is raised on all ranks."""

    def open_all() -> MetricSinks:
        config = job.config
        try:
            folder = metrics_folder(job.folder, saves)
            sinks = open_sinks(
                config.metrics,
                folder,
                total_steps=config.training.steps,
                completed_steps=state.step,
                rollbacks=len(state.counters.rollbacks.tries),
                job=dataclasses.asdict(config),
            )
            if texts := [(s.name, s.path) for s in config.data.sources if s.format == TEXT]:
                advice = TokenizingAdvice(texts, str(config.data.tokenizer))
                sinks = MetricSinks([*sinks.sinks, advice])
            write_file_atomically(folder / "config.toml", job.as_toml().encode())
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder = {job.folder}: cannot write {error.filename or 'to it'}:"
                f" {error.strerror or error}.",
                fix="Free space there or allow writing, or use another job.dump_folder.",
                keys=("job.dump_folder",),
            ) from error
        return sinks

    sinks, problem = capture_user_error(no_sinks if rank.rank else open_all)
    raise_on_all_ranks(problem)
    assert sinks is not None
    return sinks


def report_start(
    job: Job, state: TrainState, found: FoundCheckpoint | None, sinks: MetricSinks
) -> None:
    """Write events for the checkpoint that the run resumes from and those that were refused."""
    if found:
        for reason in found.refused:
            sinks.event(state.step, "checkpoint_refused", reason=reason)
        event = "loaded" if found.initial else "resumed"
        sinks.event(state.step, event, path=str(found.folder), position=state.position)
        initial = found.initial and job.config.checkpoint.initial_load_model_only
        saved = found.manifest.job if found.manifest and not initial else {}
        if changes := changed_settings(saved, job.config):
            text = ", ".join(f"{k} {old!r:.80} -> {new!r:.80}" for k, (old, new) in changes.items())
            logger.info("changed since the checkpoint: %s", text)
            sinks.event(state.step, "settings_changed", changes=changes)
    steps = job.config.training.steps
    if state.step >= steps:
        logger.info("all %d steps are done; set a larger training.steps to continue", steps)


def check_compute_dtypes(own: str) -> None:
    """Refuse ranks whose "auto" chose different compute dtypes; call it on all ranks together."""
    dtypes = gather_from_all_ranks(own)
    if other := next((rank for rank, dtype in enumerate(dtypes) if dtype != dtypes[0]), 0):
        raise ConfigError(
            f'training.mixed_precision_param = "auto": rank 0 computes in {dtypes[0]} and rank'
            f" {other} in {dtypes[other]}, because only one of their CPUs has bfloat16 units.",
            fix='Set it to "bfloat16" or "float32".',
        ).mark_on_all_ranks()


def warn_if_dtype_is_slow(job: Job, meter: ThroughputMeter, rank: RankContext) -> None:
    """Log a warning if this CPU computes faster in float32 than in the compute dtype.

    Call it on all ranks at the same time, because they share the CPU during training, too.
    """
    dtype = job.config.training.mixed_precision_param
    if dtype == "float32" or meter.peak_flops is None:
        return
    fp32 = measure_matmul_flops(torch.float32, rank.device)
    if fp32 > meter.peak_flops:
        logger.warning(
            'training.mixed_precision_param = "%s" is slower than "float32" on this CPU: %.3g'
            " against %.3g TFLOP/s in a matmul. To compute in float32:"
            " --training.mixed_precision_param float32",
            dtype,
            meter.peak_flops / 1e12,
            fp32 / 1e12,
        )


def build_batches(
    job: Job, stream: SampleStream, state: TrainState, mesh: Mesh, engine: Engine
) -> Iterator[Batch]:
    """Prefetch this rank's batches for every step from `state.position` on, into pinned memory if
    the model is on a GPU."""
    pin, by_source = mesh.batch.device_type == "cuda", job.measures_sources

    def prepare(inputs: Tensor, labels: Tensor, sources: Tensor) -> Batch:
        batch = engine.prepare(inputs, labels)
        if by_source:
            batch = batch.with_sources(sources, len(stream.names))
        return batch.pin_memory() if pin else batch

    batches, windows = job.batches.batches_from(state.counters.tokens), state.counters.windows
    slices = rank_slices(state.position, batches, mesh.batch_rank, mesh.batch.size(), windows)
    timeout = job.config.data.read_timeout_seconds
    return stream.prefetch(slices, timeout_seconds=timeout, prepare=prepare)


def build_batch_dump(
    job: Job, stream: SampleStream, rank: RankContext
) -> Callable[[int, int, int], str]:
    """A function that writes the global batch of a step to a file, on rank 0."""
    if rank.rank:
        return lambda step, position, samples: ""
    return BatchDump(job.folder / "guard", stream).write


def build_periodic_actions(
    job: Job,
    run: Run,
    validation_sets: list[ValidationSet],
    profilers: Mapping[str, Profiler],
    stream: SampleStream,
) -> tuple[PeriodicAction, ...]:
    """The actions after a step, in this order. Add a periodic action here."""
    config, state, sinks = job.config, run.state, run.sinks

    def set_timeouts(name: str) -> None:
        seconds = getattr(config.comm, name)
        set_collective_timeouts(seconds, excluded=run.checkpointer.group)
        run.watchdog.set_timeout(seconds, f"comm.{name}")

    validated = False

    def validate_all(step: int) -> dict[str, ValidationResult]:
        nonlocal validated
        first, validated, results = not validated, True, {}
        if first:  # compiles graphs of its own
            set_timeouts("init_timeout_seconds")
        for data in validation_sets:
            results[data.name] = validate(
                run.engine,
                data,
                validation_samples(config.validation, data, job.global_batch),
                config.validation.local_batch_size,
                run.step_settings.mesh,
                run.device,
                partial(run.watchdog.set_phase, step),
            )
        if first:
            set_timeouts("train_timeout_seconds")
        return results

    def finish_start() -> None:
        """Shorten the timeouts after the first step, which compiles and allocates."""
        if config.compiles:
            logger.info("%s", describe_compilation())
        set_timeouts("train_timeout_seconds")

    validation = periodic.run_validation(
        validate_all, sinks, config.validation.freq, run.config.steps
    )
    return (
        periodic.log_skipped_steps(state, sinks),
        periodic.log_metrics(state, run.meter, sinks, config.metrics.log_freq),
        periodic.report_finished_save(run.checkpointer, sinks),
        periodic.save_checkpoints(
            state, run.checkpointer, sinks, partial(gather_data_progress, stream, state)
        ),
        *([validation] if validation_sets else []),  # after the save, which it may delay
        *build_evaluation(job, run),
        periodic.collect_garbage(config.training.gc_freq),
        periodic.after_first_step(finish_start),
        *(periodic.step_profiler(name, profiler) for name, profiler in profilers.items()),
    )
