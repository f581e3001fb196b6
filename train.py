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

from titanlite.checkpoint import Checkpointer, Hold, hold_folders
from titanlite.data import slices_of
from titanlite.distributed.collectives import agree, attempt, on_rank_0
from titanlite.distributed.limits import leave_with
from titanlite.distributed.mesh import build_mesh
from titanlite.distributed.session import (
    Session,
    choose_device,
    grow_segments,
    join,
    launched_ranks,
    tell,
)
from titanlite.distributed.stop import StopRequest, words_for
from titanlite.distributed.watch import Watch, die_with_launcher
from titanlite.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_STOPPED,
    ConfigError,
    RankLost,
    UserError,
)
from titanlite.files import write_whole_file
from titanlite.job import Job, JobConfig, open_data, read_job
from titanlite.log import configure_log, logger
from titanlite.observe import (
    Held,
    Sinks,
    open_meter,
    open_profiler,
    open_sinks,
    records_folder,
    silent_sinks,
)
from titanlite.optim import EarlySteps, build_optimizer, lr_share
from titanlite.parallelize import build_spread_model
from titanlite.parallelize.activation import draw_budgets
from titanlite.parallelize.attention import activate, choose_kernel
from titanlite.parallelize.compile import prepare_compiler
from titanlite.planning import explain_out_of_memory
from titanlite.reference import help_text
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
    began, (rank, ranks) = time.monotonic(), launched_ranks()
    die_with_launcher()
    grow_segments()
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
            join(device, comm, job.config.debug, job.folder) as session,
            Watch(
                session.rank,
                session.ranks,
                patience,
                job.folder,
                session.start,
                job.config.checkpoint.timeout_seconds,
            ) as watch,
            hold_folders(job.folder, job.other_folders) as hold,
            watch.blaming(),  # before the end of the run is written down, which says who was lost
            explain_out_of_memory(job, device, lambda: watch.place) as held,
        ):
            if hold.stopped_in_this_launch():
                logger.info("stopped before in this launch; the same command resumes")
                return EXIT_STOPPED
            hold.code = train(job, session, hold, watch, held, began)
            return hold.code
    except UserError as error:
        return tell(error)
    except RankLost:
        return EXIT_LOST
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        print(f"rank {rank} of {ranks}:", file=sys.stderr, flush=True)  # ours to mend: a traceback
        raise


def train(job: Job, session: Session, hold: Hold, watch: Watch, held: Held, began: float) -> int:
    """One run, from where its checkpoints are to its last step; returns the exit code."""
    config, training, device = job.config, job.config.training, session.device
    comm, limit = config.comm, config.job.time_limit_minutes
    stop = StopRequest(began + 60 * limit if limit else None)
    if config.checkpoint.enable and not config.checkpoint.load_only:
        leave = partial(hold.end, EXIT_INTERRUPTED, "Ctrl-C, twice")
        stop.listen(leave, session.rank)  # else a signal ends the run: there is nothing to save
    data, problem = attempt(lambda: open_data(job))
    agree(problem)  # every rank opens its data by itself, and all learn of one that cannot
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
    watch.follow(lambda: checkpointer.limit)
    watch.now(0, "load")
    found = checkpointer.find()
    watch.now(0, "build")
    patience = config.job.max_crashes if checkpointer.saves else 0  # else nothing could come of it
    hold.begin(session.ranks, found.step if found else 0, patience)

    if config.compiles:
        prepare_compiler(device)
    if config.activation_checkpoint.visualize_memory_budget_pareto:
        draw_budgets(job.folder / "memory_budget_pareto")
    mesh, compute = build_mesh(job.degrees, device.type), job.passes.compute
    attention, sizes, in_parts = config.attention, job.attention_sizes, mesh.cp.size() > 1
    kernel = on_rank_0(lambda: choose_kernel(attention, sizes, compute, device, in_parts=in_parts))
    activate(kernel)
    passes = dataclasses.replace(job.passes, kernel=kernel)
    spread = build_spread_model(
        job.family,
        job.shape,
        mesh,
        config.parallelism,
        job.pipeline,
        passes,
        device,
        seed=config.debug.seed,
    )
    model = held.model = spread.model
    if config.model.print_after_conversion:
        logger.info("%s", model)
    engine = build_engine(
        spread,
        mesh,
        config.parallelism,
        job.pipeline,
        device,
        local_batch=training.local_batch_size,
        end=stream.end if passes.documents else None,
    )
    state = TrainState(model, build_optimizer(model, config.optimizer), job.loss_scale)
    held.optimizer = state.optimizer
    in_backward = config.optimizer.early_step_in_backward
    early = EarlySteps(model, state.optimizer) if in_backward else None
    hold.step = lambda: state.step
    if found:
        watch.now(0, "load")
        progress = checkpointer.load(
            found, model, state.optimizer, job.facts_to_hold(stream), finished_at=training.steps
        )
        if progress:
            state.restore(progress)
            checkpointer.turn_back(state.step)
        watch.now(state.step, "start")

    meter = open_meter(
        flops_per_token=job.family.flops_per_token(job.shape, training.seq_len),
        dtype=passes.compute,
        devices=session.ranks,
        device=device,
    )
    logger.info("%s", job.summary(device, meter.peak_flops))
    sinks, problem = attempt(lambda: open_records(job, session, state.step, checkpointer.saves))
    agree(problem)
    if found:
        for reason in found.refused:
            sinks.event(state.step, "checkpoint_refused", reason=reason)
        sinks.event(state.step, "resumed", path=str(found.place), position=state.position)
    if state.step >= training.steps:
        logger.info("all %d steps are done; a larger training.steps goes on", training.steps)

    def losses() -> dict[str, float]:
        counts = {t: samples_to_validate(config.validation, t, job.global_batch) for t in texts}
        options = (config.validation.local_batch_size, mesh, device, partial(watch.now, state.step))
        return {t.name: validate(engine, t, n, *options) for t, n in counts.items()}

    slices = slices_of(state.position, job.global_batch, mesh.batch_rank, mesh.batch.size())
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
            lr_at=lambda step: config.optimizer.lr * lr_share(step, total, schedule),
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
            sinks.event(state.step, "stopped", reason=words_for(reason))
    return EXIT_STOPPED if reason else EXIT_DONE


def open_records(job: Job, session: Session, first_step: int, saves: bool) -> Sinks:
    """The metric sinks and config.toml of rank 0; raises ConfigError where they cannot be written."""
    if session.rank:
        return silent_sinks()
    config = job.config
    try:
        folder = records_folder(job.folder, saves)
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
    leave_with(main(sys.argv[1:]))
