"""The memory of a job: the estimate of its workload, with the exact parameters and states."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from titanlite.job import Job
from titanlite.models import first_match
from titanlite.optim import MatrixFacts
from titanlite.parallelize.expert import hidden_dims_of_experts
from titanlite.parallelize.tensor import TENSOR_PARALLEL_ROLES
from titanlite_planner.job_workload import all_parameter_shapes, first_blocks, workload_of
from titanlite_planner.memory.estimate import estimate_memory
from titanlite_planner.memory.model_parts import ModelParts, ParameterShape, own_shard
from titanlite_planner.memory.optimizer_state import (
    optimizer_state_bytes,
    owner_flops,
    whole_matrix_bytes,
)
from titanlite_planner.memory.rank import MemoryEstimate
from titanlite_planner.stages import StageParts
from titanlite_planner.traffic import CollectiveBytes, traffic

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
    spec, model = job.spec, first_blocks(job)
    last_block = len(list(model.get_submodule(spec.blocks_path).children())) - 1
    blocks = {f"{spec.blocks_path}.{n}." for n in (0, last_block)}
    hidden_dims = hidden_dims_of_experts(model)
    modules: dict[str, list[ParameterShape]] = {}
    for name, parameter in model.named_parameters():
        prefix = next((p for p in blocks if name.startswith(p)), "")
        if not prefix and name.startswith(f"{spec.blocks_path}."):
            continue  # a block like another
        described = _describe_parameter(job, name, parameter.shape, hidden_dims.get(name))
        described = dataclasses.replace(described, name=name.removeprefix(prefix))
        modules.setdefault(prefix or name.partition(".")[0], []).append(described)
    embeddings = list(itertools.takewhile(lambda name: name not in blocks, modules))
    others = {*blocks, *embeddings, spec.output_path}
    tied = {name for pair in spec.tied_parameters(job.sizes) for name in pair}
    return ModelParts(
        tuple(parameter for name in embeddings for parameter in modules[name]),
        tuple(modules[f"{spec.blocks_path}.{last_block}."]),
        tuple(p for name, found in modules.items() if name not in others for p in found),
        tuple(modules.get(spec.output_path, ())),
        dense_block=tuple(modules[f"{spec.blocks_path}.0."]),
        tied=tuple(p for name in embeddings for p in modules[name] if p.name in tied),
    )


def _describe_parameter(
    job: Job, name: str, shape: torch.Size, hidden_dim: int | None
) -> ParameterShape:
    """One parameter; `hidden_dim` is that of experts, which the TP plan does not have."""
    role = first_match(job.spec.tp_plan, name.rpartition(".")[0])
    entry = TENSOR_PARALLEL_ROLES[role] if role else None
    optimizer = job.config.optimizer.replace(offload=False)
    facts = MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)
    dtype = job.transforms.param_dtype
    state = optimizer_state_bytes([(name, shape)], optimizer, dtype, facts)
    sharded_dim = entry.sharded_dim if entry else hidden_dim
    if sharded_dim is not None and sharded_dim >= len(shape):
        sharded_dim = None  # the bias of a row-wise linear layer: every rank has it
    parameter = ParameterShape(
        name,
        tuple(shape),
        sharded_dim,
        job.sizes.head_width if entry and entry.whole_heads else 1,
        expert=hidden_dim is not None and len(shape) == 3,
        state_bytes=state / shape.numel(),
        owner_flops=owner_flops(name, shape, optimizer, facts),
    )
    if optimizer.of_parameter(name).name == "Adafactor" and not parameter.expert:
        own = _own_shape(parameter, job)  # state of its rows and columns
        state = optimizer_state_bytes([(name, own)], optimizer, dtype, facts)
        parameter = dataclasses.replace(parameter, own_state_bytes=state)
    return parameter


def _own_shape(parameter: ParameterShape, job: Job) -> torch.Size:
    """The shape of the first rank's shard, which is the largest."""
    degrees = job.degrees
    ranks = degrees.shard * degrees.context
    return torch.Size(own_shard(parameter.tensor_shard(degrees.tensor), ranks))


def _step_temporaries(job: Job) -> tuple[float, float]:
    """What the optimizer's step allocates and frees: bytes, and multiples of the largest shard."""
    facts = MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)
    matrices = whole_matrix_bytes(all_parameter_shapes(job), job.config.optimizer, facts)
    return matrices, TEMPORARIES.get(job.config.optimizer.name, 0)


def stages_of_job(job: Job) -> tuple[StageParts, ...]:
    """What each pipeline stage of a job has."""
    prefix, first, stages = f"{job.spec.blocks_path}.", 0, []
    names_in_order = itertools.chain.from_iterable(job.pipeline.stages)
    embeddings = set(itertools.takewhile(lambda name: not name.startswith(prefix), names_in_order))
    output = job.spec.output_path
    for number, names in enumerate(job.pipeline.stages):
        blocks = sum(name.startswith(prefix) for name in names)
        ends = {name for name in names if not name.startswith(prefix)}
        norm = bool(ends - embeddings - {output})
        embedding = bool(ends & embeddings)
        stages.append(StageParts(number, first, blocks, embedding, norm, output in ends))
        first += blocks
    return tuple(stages)
