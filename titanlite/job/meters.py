"""Add the meters and checks that a job enables to a run: each is a periodic action."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from titanlite.data import SampleStream
from titanlite.job.job import Job
from titanlite.training import (
    LayerNorms,
    NoiseScaleEngine,
    PeriodicAction,
    ReplicaCheck,
    Run,
    SelfTest,
    StragglerMeter,
    check_replicas,
    measure_noise_scale,
    periodic,
    record_expert_load,
    record_layer_norms,
    record_source_losses,
    report_stragglers,
)


def add_meters(job: Job, run: Run, stream: SampleStream) -> Run:
    """The run with the meters of the job; they run before its other actions, such as saving."""
    noise_freq = job.config.metrics.noise_scale_freq
    actions = list(_build_actions(job, run))
    if job.measures_sources:
        freq = job.config.metrics.source_loss_freq
        actions.append(record_source_losses(run.state, stream.shares, run.sinks, freq))
    if noise_freq:
        engine = NoiseScaleEngine(run.engine, run.state, run.step_settings.mesh)
        actions.append(measure_noise_scale(engine, run.state, run.sinks, noise_freq))
        run = dataclasses.replace(run, engine=engine)
    return dataclasses.replace(run, actions=(*actions, *run.actions))


def _build_actions(job: Job, run: Run) -> Iterator[PeriodicAction]:
    config, state, sinks, mesh = job.config, run.state, run.sinks, run.step_settings.mesh
    if freq := config.metrics.layer_norms_freq:
        norms = LayerNorms(state.model, mesh, list_layers(job), lambda name: layer_of(job, name))
        yield record_layer_norms(state, norms, sinks, freq)
    if load := state.expert_load:
        yield record_expert_load(load, sinks, config.metrics.log_freq)
    if config.replica_check.freq and job.degrees.ranks > 1:
        saves = run.checkpointer
        yield check_replicas(
            ReplicaCheck(state, mesh),
            config.replica_check,
            sinks,
            is_saving=lambda info: saves.due(info.step, info.ends_run),
            finish_save=lambda: periodic.report_save(saves.wait(), saves, sinks),
        )
    if (freq := config.straggler.freq) and job.degrees.ranks > 1:
        self_test = SelfTest(job.transforms.compute_dtype, run.device)
        meter = StragglerMeter(job.degrees, self_test, config.straggler.threshold, state.step)
        run.meter.add_timers(meter.timers)
        yield report_stragglers(meter, sinks, freq)


def list_layers(job: Job) -> list[str]:
    """The layers of the whole model in order: its blocks, and the modules around them."""
    with torch.device("meta"):
        model = job.spec.build(job.sizes)
    return list(dict.fromkeys(layer_of(job, name) for name, _ in model.named_parameters()))


def layer_of(job: Job, parameter: str) -> str:
    """The layer of a parameter by its name: a block (layers.3) or another module (output)."""
    blocks = job.spec.blocks_path
    if parameter.startswith(f"{blocks}."):
        block, _, _ = parameter.removeprefix(f"{blocks}.").partition(".")
        return f"{blocks}.{block}"
    return parameter.partition(".")[0]
