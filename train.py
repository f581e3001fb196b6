"""Train a language model: torchrun --nproc_per_node N train.py --job.config_file run.toml

This page is the table of contents of a run; `python train.py --help` lists every setting.
"""

from __future__ import annotations

import dataclasses
import signal
import sys

from titanlite.checkpoint import Checkpointer
from titanlite.data import slices_of
from titanlite.distributed.collectives import agree, attempt
from titanlite.distributed.mesh import build_mesh
from titanlite.distributed.session import (
    Session,
    choose_device,
    join,
    launched_ranks,
    lost_rank,
    tell,
)
from titanlite.errors import EXIT_DONE, UserError
from titanlite.job import Job, JobConfig, open_data, read_job
from titanlite.log import configure_log, logger
from titanlite.observe import open_meter, open_profiler, open_sinks, silent_sinks
from titanlite.optim import build_optimizer, lr_share
from titanlite.parallelize import DTYPES, build_spread_model
from titanlite.reference import help_text
from titanlite.training import (
    Between,
    TrainState,
    build_engine,
    run,
    samples_to_validate,
    validate,
)


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no reason for a traceback
        print(__doc__, *help_text(JobConfig), sep="\n")
        return EXIT_DONE
    rank, ranks = launched_ranks()
    try:
        job = read_job(argv, ranks)
        section = job.config.job
        plain = job.config.metrics.disable_color_printing
        configure_log(rank, colour=False if plain else None)
        if section.print_config and rank == 0:
            print(job.as_toml())
        if section.check:
            logger.info("every check passed for %s", job.degrees)
            return EXIT_DONE
        device = choose_device(section.device)
        with join(device, job.config.comm, job.config.debug, job.folder) as session:
            train(job, session)
    except UserError as error:
        return tell(error)
    except Exception as error:
        return lost_rank(error)
    return EXIT_DONE


def train(job: Job, session: Session) -> None:
    config, training, device = job.config, job.config.training, session.device
    data, problem = attempt(lambda: open_data(job))
    agree(problem)  # every rank opens its data by itself, and all learn of one that cannot
    stream, texts = data

    mesh = build_mesh(job.degrees, device.type)
    compute = DTYPES[training.mixed_precision_param]
    spread = build_spread_model(
        job.family,
        job.shape,
        mesh,
        config.parallelism,
        job.pipeline,
        config.activation_checkpoint,
        device,
        seed=config.debug.seed,
        compute=compute,
        reduce=DTYPES[training.mixed_precision_reduce],
        offload=training.enable_cpu_offload,
    )
    model = spread.model
    if config.model.print_after_conversion:
        logger.info("%s", model)
    engine = build_engine(
        spread,
        mesh,
        config.parallelism,
        job.pipeline,
        device,
        local_batch=training.local_batch_size,
    )
    state = TrainState(model, build_optimizer(model, config.optimizer))

    checkpointer = Checkpointer(job.folder / config.checkpoint.folder, config.checkpoint)
    found = checkpointer.find()
    if found:
        saved = checkpointer.load(found, model, state.optimizer, job.facts_to_hold())
        if saved:
            state.restore(saved.progress)

    meter = open_meter(
        flops_per_token=job.family.flops_per_token(job.shape, training.seq_len),
        dtype=compute,
        devices=session.ranks,
        device=device,
    )
    sinks = silent_sinks()
    if session.rank == 0:
        sinks = open_sinks(
            config.metrics,
            job.folder,
            total_steps=training.steps,
            first_step=state.step,
            job=dataclasses.asdict(config),
        )
        (job.folder / "config.toml").write_text(job.as_toml(), encoding="utf-8")
    logger.info("%s", job.summary(device, meter.peak_flops))
    if found:
        sinks.event(state.step, "resumed", path=str(found), position=state.position)
    if state.step >= training.steps:
        logger.info("all %d steps are done; a larger training.steps goes on", training.steps)

    def losses() -> dict[str, float]:
        rows = config.validation.local_batch_size
        counts = {t: samples_to_validate(config.validation, t, job.global_batch) for t in texts}
        return {t.name: validate(engine, t, n, rows, mesh, device) for t, n in counts.items()}

    def save() -> str:
        place = checkpointer.save(
            state.step,
            model,
            state.optimizer,
            progress=state.progress(),
            facts=job.facts(),
            job=dataclasses.asdict(config),
            layout=str(job.degrees),
        )
        return str(place)

    slices = slices_of(state.position, job.global_batch, mesh.batch_rank, mesh.batch.size())
    schedule, total = config.lr_scheduler, job.schedule_steps
    with sinks, open_profiler(config.profiling, job.folder, session.rank, state.step) as profiler:
        run(
            state,
            engine,
            stream.prefetch(slices),
            config=training,
            global_batch=job.global_batch,
            lr_at=lambda step: config.optimizer.lr * lr_share(step, total, schedule),
            mesh=mesh,
            device=device,
            train_timeout_seconds=config.comm.train_timeout_seconds,
            between=Between(
                log_freq=config.metrics.log_freq,
                validate_freq=config.validation.freq if texts else 0,
                validate=losses,
                save_due=checkpointer.due,
                save=save,
            ),
            meter=meter,
            sinks=sinks,
            profiler=profiler,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
