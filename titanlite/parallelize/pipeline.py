"""Pipeline parallelism: this rank's stage modules, and torch's schedule over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,  # private, as is the next (torch 2.11 to 2.15)
    _PipelineScheduleRuntime,  # the only class that runs a schedule from a file
    get_schedule_class,
)
from torch.profiler import record_function

from titanlite.kernels.documents import DocumentIndex
from titanlite.models import ModelSizes, ModelSpec, TokenEmbedding
from titanlite.models.mtp import EMBEDDING_COPY
from titanlite.models.router import find_routers
from titanlite.parallelize.fsdp import GradientSums
from titanlite.parallelize.pipeline_plan import PipelinePlan
from titanlite.parallelize.schedule import format_action, format_trace_name
from titanlite.parallelize.tied import RankModel


def build_stage_modules(
    spec: ModelSpec, sizes: ModelSizes, plan: PipelinePlan, rank: int
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """(one module with all layers of a pipeline rank, {stage: its model}), on the meta device.

    Both contain the same submodules, with the names of the full model, for checkpoints.
    """
    with torch.device("meta"):
        model = spec.build(sizes)
        if len(plan.stages) == 1:
            return model, {0: model}
        stage_modules = {stage: spec.build(sizes) for stage in plan.stages_of(rank)}
    for stage, stage_module in stage_modules.items():
        _remove_other_modules(stage_module, plan.stages[stage], spec.blocks_path)
        if stage < len(plan.stages) - 1:
            stage_module.register_forward_hook(_make_sendable)
        elif spec.stage_copies(sizes):
            with torch.device("meta"):
                stage_module.add_module(EMBEDDING_COPY, TokenEmbedding(sizes.vocab_size, sizes.dim))
            model.add_module(EMBEDDING_COPY, nn.Module())  # `set_submodule` replaces it
    names = [name for stage in stage_modules for name in plan.stages[stage]]
    _remove_other_modules(model, names, spec.blocks_path)
    for stage, stage_module in stage_modules.items():
        for name in plan.stages[stage]:
            model.set_submodule(name, stage_module.get_submodule(name))
    tied, copies = spec.tied_parameters(sizes), spec.stage_copies(sizes)
    return RankModel(model, tied, copies) if tied or copies else model, stage_modules


def _make_sendable(stage_module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """Forward hook: return a plain tensor that is not a view.

    Tensor parallelism may end in a view, which torch's stage cannot detach in place, or in an
    asynchronous collective tensor that is not complete yet.
    """
    return output.clone() if output._is_view() or type(output) is not Tensor else output


def _remove_other_modules(model: nn.Module, names: list[str], block_path: str) -> None:
    """Remove the blocks that are not in `names`; set other modules not in `names` to None."""
    blocks = model.get_submodule(block_path)
    assert isinstance(blocks, nn.ModuleDict)
    for key in [key for key in blocks if f"{block_path}.{key}" not in names]:
        del blocks[key]
    for name, _ in list(model.named_children()):
        if name not in (block_path, *names):
            setattr(model, name, None)


_missing = {  # undocumented (torch 2.13), so importing this file fails if torch renames one
    *("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"),
    *("perform_reduce_grad", "get_local_bwd_output", "set_local_bwd_input"),
} - set(dir(PipelineStage))
assert not _missing, f"torch {torch.__version__}: PipelineStage has no {', '.join(_missing)}"


class TrainStage(PipelineStage):
    """Torch's pipeline stage, with profiler ranges and gradients summed in the reduce dtype.

    A range covers the computation of one action, without waiting for other ranks.
    """

    activity = "pipeline"  # prefix of the names of profiler ranges
    _reduces_gradients = _splits_backward = True
    _documents: Sequence[DocumentIndex] = ()
    _sums: GradientSums

    def prepare_run(
        self, sums: GradientSums, reduces: bool, splits: bool, documents: Sequence[DocumentIndex]
    ) -> None:
        """Set what the next run of the schedule does.

        `reduces`: gradients across ranks, or it only accumulates them. `splits`: input and weight
        gradients are computed in two actions if the schedule has two, or both in the first one.
        `documents`: the index of the documents in each micro-batch; empty: without a mask.
        """
        self._reduces_gradients, self._splits_backward = reduces, splits
        self._sums, self._documents = sums, documents

    def count_only(self, counted: Sequence[tuple[int, int] | None]) -> None:
        """`Router.count_only` in each micro-batch of the next run; empty: count all tokens."""
        self._counted, self._routers = counted, find_routers(self.submod) if counted else []

    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, *others, **options):
        if self._documents:  # not an argument of the run: torch splits only tensors
            kwargs = {**(kwargs or {}), "documents": self._documents[fwd_chunk_id]}
        for router in self._routers:
            router.count_only(self._counted[fwd_chunk_id])
        with self._profiler_range("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *others, **options)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        whole = full_backward or not self._splits_backward
        with self._profiler_range("backward" if whole else "input", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, whole, last_backward)
        self._sums.add_from(self.submod)

    def backward_weight_one_chunk(self, bwd_chunk_id, last_backward=False):
        if not self._splits_backward:
            return
        with self._profiler_range("weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._sums.add_from(self.submod)

    def perform_reduce_grad(self, grad_scale_factor):
        if self._reduces_gradients:
            super().perform_reduce_grad(grad_scale_factor)

    # torch 2.15 splits perform_reduce_grad into the next two, which 2.13 does not have.

    def start_gradient_reduction(self):
        if self._reduces_gradients:
            super().start_gradient_reduction()  # type: ignore[misc]

    def wait_for_gradient_reduction(self, grad_scale_factor):
        if self._reduces_gradients:
            super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc]

    def _profiler_range(self, kind: str, microbatch: int) -> record_function:
        name = format_trace_name(self.activity, kind, self.stage_index, microbatch)
        return record_function(name)


class EvalStage(TrainStage):
    """A stage that only runs forward.

    In torch's V-shaped schedules (2.13), the two stages of a rank would pass gradients, too.
    """

    activity = "evaluation"

    def get_local_bwd_output(self, mb_index):
        return (None,)

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        pass


class RankSchedule(NamedTuple):
    """Torch's schedule over the stages of this rank."""

    schedule: PipelineScheduleSingle | PipelineScheduleMulti
    stages: Sequence[TrainStage]


def build_rank_schedule(
    stage_class: type[TrainStage],
    stage_modules: Mapping[int, nn.Module],
    plan: PipelinePlan,
    pp: DeviceMesh,
    device: torch.device,
    hidden: Tensor,
    loss_function: Callable[[Tensor, Tensor], Tensor],
) -> RankSchedule:
    """Build torch's schedule over this rank's stages.

    `hidden` [micro-batch, tokens, dim] on meta is what a stage sends to the next one. To infer
    shapes, torch would run the model once more (2.13), and reuse buffers of an old shape.
    """
    tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
    loss = torch.empty((), dtype=torch.float32, device="meta")
    last = len(plan.stages) - 1
    stages = [
        stage_class(
            stage_module,
            stage,
            len(plan.stages),
            device,
            input_args=hidden if stage else tokens,
            output_args=loss if stage == last else hidden,  # torch 2.11 checks both
            group=pp.get_group(),
        )
        for stage, stage_module in stage_modules.items()
    ]
    options: dict[str, Any] = {
        "n_microbatches": plan.n_microbatches,
        "loss_fn": loss_function,
        "scale_grads": False,
    }
    if plan.csv is not None:
        by_file = _PipelineScheduleRuntime(stages, **options)
        # Not by torch's own CSV reader, which counts an empty line as a rank.
        order = {
            rank: [_Action.from_str(format_action(action)) for action in actions]
            for rank, actions in enumerate(plan.order())
        }
        by_file._prepare_schedule_with_comms(order)  # type: ignore[arg-type]  # invariant lists
        return RankSchedule(by_file, stages)
    schedule_class: Any = get_schedule_class(plan.schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    return RankSchedule(schedule_class(stages[0] if single else stages, **options), stages)
