"""Train a language model: torchrun --nproc_per_node N train.py --job.config_file run.toml

This page is the table of contents of a run; `python train.py --help` lists every setting.
"""

from __future__ import annotations

import gc

gc.disable()  # a quarter of the start would go into looking for garbage that there is not

import dataclasses
import signal
import sys
import time
from functools import partial

from titanlite.checkpoint import Checkpointer
from titanlite.config_reference import help_text
from titanlite.data import rank_slices
from titanlite.distributed.collectives import capture_user_error, raise_on_all_ranks, run_on_rank_0
from titanlite.distributed.mesh import build_mesh
from titanlite.distributed.process_group import (
    RankContext,
    choose_device,
    enable_expandable_segments,
    join_process_group,
    launched_rank_and_world_size,
    report_user_error,
)
from titanlite.distributed.time_limit import exit_process
from titanlite.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_RANK_LOST,
    EXIT_STOPPED,
    ConfigError,
    RankLostError,
    UserError,
)
from titanlite.files import write_whole_file
from titanlite.job import Job, JobConfig, open_data, read_job
from titanlite.kernels.backend import activate_flash_package, choose_kernel
from titanlite.log import configure_log, logger
from titanlite.metrics import (
    MetricSinks,
    build_meter,
    metrics_folder,
    no_sinks,
    open_profiler,
    open_sinks,
)
from titanlite.optim import OptimizerInBackward, build_optimizer, lr_factor
from titanlite.parallelize import build_sharded_model
from titanlite.parallelize.activation_checkpoint import plot_memory_budgets
from titanlite.parallelize.compile import prepare_compiler
from titanlite.planning import explain_out_of_memory
from titanlite.runtime import RunFolderLock, lock_run_folders
from titanlite.runtime.out_of_memory import MemoryUsage
from titanlite.runtime.stop import StopRequest, stop_reason_name
from titanlite.runtime.watchdog import HeartbeatWatchdog, exit_with_launcher
from titanlite.training import (
    Between,
    TrainState,
    build_engine,
    run,
    samples_to_validate,
    validate,
)

gc.freeze()  # what was imported is not looked at again
gc.enable()


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no reason for a traceback
        print(__doc__, *help_text(JobConfig), sep="\n")
        return EXIT_DONE
    began, (rank, ranks) = time.monotonic(), launched_rank_and_world_size()
    exit_with_launcher()
    enable_expandable_segments()
    try:
        job = read_job(argv, ranks)
        section = job.config.job
        plain = job.config.metrics.disable_color_printing
        configure_log(rank, colour=False if plain else None)
        if section.print_config and rank == 0:
            print(job.as_toml())
        if job.warning:
            logger.warning("%s", job.warning)
        if section.check:
            logger.info("every check passed for %s", job.degrees)
            return EXIT_DONE
        device, comm = choose_device(section.device), job.config.comm
        patience = comm.init_timeout_seconds
        with (
            join_process_group(device, comm, job.config.debug, job.folder) as session,
            HeartbeatWatchdog(
                session.rank,
                session.world_size,
                patience,
                job.folder,
                session.start_id,
                job.config.checkpoint.timeout_seconds,
            ) as watch,
            lock_run_folders(job.folder, job.other_folders) as hold,
            watch.attributing_errors(),  # before the end of the run is written down, which says who was lost
            explain_out_of_memory(job, device, lambda: watch.position) as held,
        ):
            if hold.stopped_in_this_launch():
                logger.info("stopped before in this launch; the same command resumes")
                return EXIT_STOPPED
            hold.code = train(job, session, hold, watch, held, began)
            return hold.code
    except UserError as error:
        return report_user_error(error)
    except RankLostError:
        return EXIT_RANK_LOST
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        print(f"rank {rank} of {ranks}:", file=sys.stderr, flush=True)  # ours to mend: a traceback
        raise


def train(
    job: Job,
    session: RankContext,
    hold: RunFolderLock,
    watch: HeartbeatWatchdog,
    held: MemoryUsage,
    began: float,
) -> int:
    """One run, from where its checkpoints are to its last step; returns the exit code."""
    config, training, device = job.config, job.config.training, session.device
    comm, limit = config.comm, config.job.time_limit_minutes
    stop = StopRequest(began + 60 * limit if limit else None)
    if config.checkpoint.enable and not config.checkpoint.load_only:
        leave = partial(hold.end, EXIT_INTERRUPTED, "Ctrl-C, twice")
        # Without saving, a signal just ends the run.
        stop.install_handlers(leave, session.rank)
    data, problem = capture_user_error(lambda: open_data(job))
    raise_on_all_ranks(
        problem
    )  # every rank opens its data by itself, and all learn of one that cannot
    stream, texts = data

    checkpointer = Checkpointer(
        job.checkpoints,
        config.checkpoint,
        facts=job.facts(stream),
        job=dataclasses.asdict(config),
        layout=str(job.degrees),
        files=stream.tokenizer.files if stream.tokenizer else {},
        fence=hold.check,
    )
    watch.watch_limit(lambda: checkpointer.limit)
    watch.set_phase(0, "load")
    found = checkpointer.find()
    watch.set_phase(0, "build")
    patience = config.job.max_crashes if checkpointer.saves else 0  # else nothing could come of it
    hold.begin(session.world_size, found.step if found else 0, patience)

    if config.compiles:
        prepare_compiler(device)
    if config.activation_checkpoint.visualize_memory_budget_pareto:
        plot_memory_budgets(job.folder / "memory_budget_pareto")
    mesh, compute = build_mesh(job.degrees, device.type), job.transforms.compute
    attention, sizes, in_parts = config.attention, job.attention_sizes, mesh.cp.size() > 1
    kernel = run_on_rank_0(
        lambda: choose_kernel(attention, sizes, compute, device, in_parts=in_parts)
    )
    activate_flash_package(kernel)
    transforms = dataclasses.replace(job.transforms, kernel=kernel)
    sharded = build_sharded_model(
        job.spec,
        job.sizes,
        mesh,
        config.parallelism,
        job.pipeline,
        transforms,
        device,
        seed=config.debug.seed,
    )
    model = held.model = sharded.model
    if config.model.print_after_conversion:
        logger.info("%s", model)
    engine = build_engine(
        sharded,
        mesh,
        config.parallelism,
        job.pipeline,
        device,
        local_batch=training.local_batch_size,
        end=stream.end if transforms.documents else None,
    )
    state = TrainState(model, build_optimizer(model, config.optimizer), job.loss_scale)
    held.optimizer = state.optimizer
    in_backward = config.optimizer.early_step_in_backward
    early = OptimizerInBackward(model, state.optimizer) if in_backward else None
    hold.step = lambda: state.step
    if found:
        watch.set_phase(0, "load")
        progress = checkpointer.load(
            found, model, state.optimizer, job.facts_to_hold(stream), finished_at=training.steps
        )
        if progress:
            state.restore(progress)
            checkpointer.set_aside_later_steps(state.step)
        watch.set_phase(state.step, "start")

    meter = build_meter(
        flops_per_token=job.spec.flops_per_token(job.sizes, training.seq_len),
        dtype=transforms.compute,
        devices=session.world_size,
        device=device,
    )
    logger.info("%s", job.summary(device, meter.peak_flops))
    sinks, problem = capture_user_error(
        lambda: open_records(job, session, state.step, checkpointer.saves)
    )
    raise_on_all_ranks(problem)
    if found:
        for reason in found.refused:
            sinks.event(state.step, "checkpoint_refused", reason=reason)
        sinks.event(state.step, "resumed", path=str(found.place), position=state.position)
    if state.step >= training.steps:
        logger.info("all %d steps are done; a larger training.steps goes on", training.steps)

    def losses() -> dict[str, float]:
        counts = {t: samples_to_validate(config.validation, t, job.global_batch) for t in texts}
        options = (
            config.validation.local_batch_size,
            mesh,
            device,
            partial(watch.set_phase, state.step),
        )
        return {t.name: validate(engine, t, n, *options) for t, n in counts.items()}

    slices = rank_slices(state.position, job.global_batch, mesh.batch_rank, mesh.batch.size())
    schedule, total = config.lr_scheduler, job.schedule_steps
    with sinks, open_profiler(config.profiling, job.folder, session.rank, state.step) as profiler:
        reason = run(
            state,
            engine,
            stream.prefetch(
                slices,
                pin=device.type == "cuda",
                timeout_seconds=config.data.read_timeout_seconds,
            ),
            config=training,
            global_batch=job.global_batch,
            lr_at=lambda step: config.optimizer.lr * lr_factor(step, total, schedule),
            mesh=mesh,
            device=device,
            between=Between(
                log_freq=config.metrics.log_freq,
                validate_freq=config.validation.freq if texts else 0,
                validate=losses,
                compiled=config.compiles,
                trouble=lambda: hold.lost,
            ),
            checkpointer=checkpointer,
            stop=stop,
            watch=watch,
            train_timeout_seconds=comm.train_timeout_seconds,
            meter=meter,
            sinks=sinks,
            profiler=profiler,
            early=early,
        )
        if reason:
            sinks.event(state.step, "stopped", reason=stop_reason_name(reason))
    return EXIT_STOPPED if reason else EXIT_DONE


def open_records(job: Job, session: RankContext, first_step: int, saves: bool) -> MetricSinks:
    """The metric sinks and config.toml of rank 0; raises ConfigError where they cannot be written."""
    if session.rank:
        return no_sinks()
    config = job.config
    try:
        folder = metrics_folder(job.folder, saves)
        sinks = open_sinks(
            config.metrics,
            folder,
            total_steps=config.training.steps,
            first_step=first_step,
            job=dataclasses.asdict(config),
        )
        write_whole_file(folder / "config.toml", job.as_toml().encode())
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder = {job.folder}: cannot write {error.filename or 'to it'}:"
            f" {error.strerror or error}.",
            fix="Free space there or allow writing, or use another job.dump_folder.",
            keys=("job.dump_folder",),
        ) from error
    return sinks


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
