"""Write the present weights of a run as a Hugging Face folder, in the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.checkpoint import model_and_optimizer_state
from titanlite.checkpoint.huggingface_export import ModelToExport, write_hugging_face
from titanlite.checkpoint.saved_model import buffer_names, parameter_shapes
from titanlite.distributed.collectives import (
    all_reduce_sum,
    broadcast_from_rank_0,
    capture_user_error,
    raise_on_all_ranks,
)
from titanlite.errors import CheckpointError, UserError
from titanlite.job import RunParts
from titanlite.storage import StorageFolder
from titanlite.training.run import Run


def write_weights(folder: StorageFolder, run: Run, parts: RunParts) -> None:
    """Write the present weights as a new Hugging Face folder, from rank 0; a collective."""
    job, device, dtype = parts.job, run.device, parts.sharded.compute_dtype
    shapes, buffers = parameter_shapes(job.spec, job.sizes), buffer_names(job.spec, job.sizes)
    state, pp = model_and_optimizer_state(parts.sharded.model)["model"], parts.layout.mesh.pp

    problem: UserError | None = None
    if unknown := sorted(state.keys() - shapes.keys()):
        problem = CheckpointError(f"{folder}: has no place for weights like {unknown[0]}.")
    raise_on_all_ranks(problem)

    def gather(name: str) -> Tensor:
        kept = torch.float32 if name in buffers else dtype
        if (weight := state.get(name)) is None:  # of another pipeline rank
            full = torch.zeros(shapes[name], dtype=kept, device=device)
        else:
            weight = weight.detach().to(device, kept)
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return full if pp.size() == 1 else all_reduce_sum(pp, full.clone())

    def load(names: Sequence[str]) -> dict[str, Tensor]:
        broadcast_from_rank_0(list(names))
        return {name: gather(name).cpu() for name in names}

    problem = None
    if parts.rank.rank == 0:
        seq_len = job.config.training.seq_len
        model = ModelToExport(job.spec, job.sizes, load, seq_len, parts.stream.tokenizer)
        _, problem = capture_user_error(lambda: write_hugging_face(folder, model, dtype=dtype))
        broadcast_from_rank_0(None)
    else:
        while names := broadcast_from_rank_0(None):
            for name in names:
                gather(name)
    raise_on_all_ranks(problem)
