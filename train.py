"""Train a language model: torchrun --nproc_per_node N train.py --job.config_file run.toml

This page is the table of contents of a run; `python train.py --help` lists every setting.
"""

from __future__ import annotations

import dataclasses
import sys

from titanlite.checkpoint import Checkpointer
from titanlite.data import open_stream, open_tokenizer, open_validation
from titanlite.distributed.collectives import agree, attempt
from titanlite.distributed.mesh import build_mesh
from titanlite.distributed.session import Session, choose_device, join, launched_ranks, tell
from titanlite.errors import EXIT_DONE, UserError
from titanlite.job import Job, JobConfig, read_job
from titanlite.log import configure_log, logger
from titanlite.observe import open_meter, open_profiler, open_sinks, silent_sinks
from titanlite.optim import build_optimizer, lr_share
from titanlite.parallelize import DTYPES, build_spread_model, loss_context
from titanlite.settings import help_text
from titanlite.training import Between, Spmd, TrainState, run, validate


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(__doc__, *help_text(JobConfig), sep="\n")
        return EXIT_DONE
    rank, ranks = launched_ranks()
    try:
        job = read_job(argv, ranks)
        config = job.config
        configure_log(rank, ranks, False if config.metrics.disable_color_printing else None)
        if rank == 0 and config.job.print_config:
            print(job.as_toml())
        if config.job.check:
            logger.info("every check passed: %s", job.degrees)
            return EXIT_DONE
        device = choose_device(config.job.device)
        with join(device, config.comm, config.debug, job.folder) as session:
            train(job, session)
    except UserError as error:
        return tell(error)
    return EXIT_DONE


def train(job: Job, session: Session) -> None:
    config, device = job.config, session.device
    training = config.training
    (stream, texts), problem = attempt(lambda: open_data(job))
    agree(problem)  # every rank opens its data by itself, and all learn of one that cannot

    mesh = build_mesh(job.degrees, device.type)
    model = build_spread_model(
        job.family,
        job.shape,
        mesh,
        config.parallelism,
        config.activation_checkpoint,
        device,
        seed=config.debug.seed,
        compute=DTYPES[training.mixed_precision_param],
        reduce=DTYPES[training.mixed_precision_reduce],
        offload=training.enable_cpu_offload,
    )
    if config.model.print_after_conversion:
        logger.info("%s", model)
    engine = Spmd(
        model,
        loss_context(mesh, config.parallelism),
        microbatch=training.local_batch_size,
        reduce_every_microbatch=config.parallelism.fsdp_gradient_reduction == "every_microbatch",
    )
    state = TrainState(model, build_optimizer(model, config.optimizer))

    checkpointer = Checkpointer(job.folder / config.checkpoint.folder, config.checkpoint, session.rank)
    found = checkpointer.find()
    saved = found and checkpointer.load(found, model, state.optimizer, job.facts())
    if saved:
        state.restore(saved.progress)

    sinks, meter = open_observers(job, session, state.step)
    describe(job, session, state, found)
    if found:
        sinks.event(state.step, "resumed", path=str(found), layout=str(job.degrees))

    def slices():
        """Which samples this rank reads: its part of one global batch after the other."""
        position = state.position
        while True:
            yield position + mesh.batch_rank * job.rows, job.rows
            position += job.global_batch

    def validation_losses() -> dict[str, float]:
        most, rows = config.validation.steps, config.validation.local_batch_size
        limit = float("inf") if most == -1 else most * job.global_batch
        return {
            text.name: validate(engine, text, int(min(limit, text.samples)), rows, mesh, device)
            for text in texts
        }

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

    def lr_at(step: int) -> float:
        return config.optimizer.lr * lr_share(step, job.schedule_steps, config.lr_scheduler)

    with open_profiler(config.profiling, job.folder, session.rank) as profiler:
        run(
            state,
            engine,
            stream.prefetch(slices()),
            config=training,
            global_batch=job.global_batch,
            lr_at=lr_at,
            mesh=mesh,
            device=device,
            train_timeout_seconds=config.comm.train_timeout_seconds,
            between=Between(
                log_freq=config.metrics.log_freq,
                validate_freq=config.validation.freq if texts else 0,
                validate=validation_losses,
                save_due=checkpointer.due,
                save=save,
            ),
            meter=meter,
            sinks=sinks,
            profiler=profiler,
        )
    sinks.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
