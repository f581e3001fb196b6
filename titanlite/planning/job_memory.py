"""The memory of a job: the estimate of its workload, with the exact parameters and states."""

from __future__ import annotations

import dataclasses

import torch

from titanlite.job import Job
from titanlite.models import first_match
from titanlite.optim import (
    MatrixFacts,
    optimizer_state_bytes,
    settings_of,
    whole_matrix_bytes,
)
from titanlite.parallelize.tensor import TENSOR_PARALLEL_ROLES
from titanlite.planning.job_workload import workload_of
from titanlite.planning.memory import estimate_memory
from titanlite.planning.model_parts import ModelParts, ParameterShape, own_shard
from titanlite.planning.rank_memory import MemoryEstimate
from titanlite.planning.stages import StageParts
from titanlite.planning.traffic import CollectiveBytes, traffic

# Temporaries of one update, in multiples of the largest shard of a parameter; a fused optimizer has
# none. Counted with a dry run.
TEMPORARIES = {"Lion": 4}


def estimate_job_memory(job: Job) -> MemoryEstimate:
    """The memory of every pipeline rank of a job."""
    return estimate_memory(
        workload_of(job),
        parts_of_job(job),
        stages_of_job(job),
        on_cpu=job.config.job.device == "cpu",
        step_temporaries=_step_temporaries(job),
    )


def job_traffic(job: Job) -> tuple[tuple[CollectiveBytes, ...], ...]:
    """The collectives of every pipeline rank of a job."""
    return traffic(workload_of(job), parts_of_job(job), stages_of_job(job))


def parts_of_job(job: Job) -> ModelParts:
    """The parameters of a job's model, with the state of each parameter's optimizer."""
    spec, prefix = job.spec, f"{job.spec.blocks_path}.0."
    optimizer = dataclasses.replace(job.config.optimizer, offload=False)
    facts = MatrixFacts(spec, job.sizes, job.transforms.compute_dtype)
    modules: dict[str, list[ParameterShape]] = {"block": []}
    for name, shape in _shapes(job):
        role = first_match(spec.tp_plan, name.rpartition(".")[0])
        entry = TENSOR_PARALLEL_ROLES[role] if role else None
        dtype = job.transforms.param_dtype
        state = optimizer_state_bytes([(name, shape)], optimizer, dtype, facts)
        module = "block" if name.startswith(prefix) else name.partition(".")[0]
        parameter = ParameterShape(
            name.removeprefix(prefix),
            tuple(shape),
            entry.sharded_dim if entry else None,
            job.sizes.head_width if entry and entry.whole_heads else 1,
            state_bytes=state / shape.numel(),
        )
        if settings_of(name, optimizer)[0].name == "Adafactor":  # rows and columns of the shard
            own = _own_shape(parameter, job)
            state = optimizer_state_bytes([(name, own)], optimizer, dtype, facts)
            parameter = dataclasses.replace(parameter, own_state_bytes=state)
        modules.setdefault(module, []).append(parameter)
    names = list(modules)
    ends = [name for name in names if name != "block"]
    first, last = ends[0], spec.output_path
    norms = [parameter for name in ends[1:] if name != last for parameter in modules[name]]
    return ModelParts(
        tuple(modules[first]),
        tuple(modules["block"]),
        tuple(norms),
        tuple(modules.get(last, ())),
        tied=bool(spec.tied_parameters(job.sizes)),
    )


def _own_shape(parameter: ParameterShape, job: Job) -> torch.Size:
    """The shape of the first rank's shard, which is the largest."""
    degrees = job.degrees
    ranks = degrees.shard * degrees.context
    return torch.Size(own_shard(parameter.tensor_shard(degrees.tensor), ranks))


def _shapes(job: Job) -> list[tuple[str, torch.Size]]:
    """(name, shape) of each parameter outside the blocks and of the first block."""
    with torch.device("meta"):
        model = job.spec.build(dataclasses.replace(job.sizes, n_layers=1))
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


def _step_temporaries(job: Job) -> tuple[float, float]:
    """What the optimizer's step allocates and frees: bytes, and multiples of the largest shard."""
    facts = MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)
    matrices = whole_matrix_bytes(_all_shapes(job, _shapes(job)), job.config.optimizer, facts)
    return matrices, TEMPORARIES.get(job.config.optimizer.name, 0)


def _all_shapes(job: Job, shapes: list[tuple[str, torch.Size]]) -> list[tuple[str, torch.Size]]:
    """The parameters of all blocks, from those of the first."""
    path = job.spec.blocks_path
    more = [
        (name.replace(f"{path}.0.", f"{path}.{number}."), shape)
        for number in range(1, job.sizes.n_layers)
        for name, shape in shapes
        if name.startswith(f"{path}.0.")
    ]
    return [*shapes, *more]


def stages_of_job(job: Job) -> tuple[StageParts, ...]:
    """What each pipeline stage of a job has."""
    prefix, first, stages = f"{job.spec.blocks_path}.", 0, []
    output, embedding = job.spec.output_path, job.pipeline.stages[0][0]
    for number, names in enumerate(job.pipeline.stages):
        blocks = sum(name.startswith(prefix) for name in names)
        ends = {name for name in names if not name.startswith(prefix)}
        norm = bool(ends - {embedding, output})
        stages.append(StageParts(number, first, blocks, embedding in ends, norm, output in ends))
        first += blocks
    return tuple(stages)
