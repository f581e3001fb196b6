"""Dry run: one step of every kind of rank, by the real code on fake tensors, without the cluster.

The process group, the mesh, parallelize, the schedule and the optimizer are those of train.py; only
the values of tensors and the other ranks are missing.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup  # private
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from titanlite import parallelize as parallelize_package
from titanlite.distributed.collectives import registered_parameters
from titanlite.distributed.mesh import DIMENSIONS, ExpertMesh, build_mesh, coordinates_of
from titanlite.errors import ConfigError
from titanlite.job import Job
from titanlite.job.build import build_state, build_step_settings
from titanlite.models import OutputLayer
from titanlite.parallelize import ParallelLayout, build_parallel_modules, token_exchange
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine, build_engine
from titanlite.training.state import Counters, TrainState
from titanlite.training.step import StepHook, StepSettings, compute_gradients, finish_step
from titanlite_planner.dry_run.fake_ranks import fake_compute, fake_rank, replaced_attributes
from titanlite_planner.dry_run.step_recorder import CollectiveKind, CollectiveTotal, StepRecorder
from titanlite_planner.forked import run_in_processes
from titanlite_planner.job_workload import recomputation_of
from titanlite_planner.memory.activations import is_recomputed
from titanlite_planner.stages import describe_stage

CPU = torch.device("cpu")
MAX_PROCESSES = 4  # each has 0.3 GB or more


@dataclass(frozen=True)
class RestingBytes:
    """Bytes of a rank's storages that outlive a step, and of the gradients at its end."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True)
class RankStep:
    """What one step of a kind of rank needs."""

    pipeline_rank: int  # the rank that was run
    same_kind: tuple[int, ...]  # pipeline ranks with equal modules, which need no more memory
    modules: str
    resting: RestingBytes
    peak_bytes: int
    peak_phase: str
    alive_at_peak: dict[str, int]
    flops: int
    collectives: dict[CollectiveKind, CollectiveTotal]
    seconds: float  # that the dry run took


def check_dry_run(job: Job) -> Iterator[ConfigError]:
    """Reject settings whose memory fake tensors cannot show."""
    config = job.config
    for key, value, reason in (
        (
            "training.enable_cpu_offload",
            config.training.enable_cpu_offload,
            "fake tensors have no host memory of their own",
        ),
        (
            "optimizer.offload",
            config.optimizer.offload,
            "fake tensors have no host memory of their own",
        ),
        (
            "activation_checkpoint.offload",
            config.activation_checkpoint.offload,
            "fake tensors have no host memory of their own",
        ),
        (
            "activation_checkpoint.mode",
            config.activation_checkpoint.mode == "memory_budget",
            "what is stored is decided by the compiler, which a dry run does not call",
        ),
        (
            "quantize.linear.float8.recipe_name",
            bool(config.float8.recipe_name),
            "the tensors of torchao need values",
        ),
        (
            "quantize.grouped_mm.float8",
            config.float8.experts is not None,
            "torch knows no shapes of its matmuls",
        ),
    ):
        if value:
            yield ConfigError(
                f"dry run: {key} cannot be traced: {reason}.", fix=f"Remove {key} for the dry run."
            )


def dry_run(job: Job) -> Iterator[RankStep]:
    """Run one step of each kind of rank; the job has passed `check_dry_run`.

    A kind is the ranks with equal modules, which are recomputed equally. Of the pipeline ranks of a
    kind, the one with the most micro-batches in flight is run. In the other dimensions of the mesh
    it has coordinate 0, which has the largest shards. Under a document mask, each sequence is one
    document: fake tokens have no ends.
    """
    kinds = _kinds(job)
    runs = [partial(_RankRun(job, rank).run, same_kind) for rank, same_kind in kinds]
    yield from run_in_processes(runs, min(MAX_PROCESSES, os.cpu_count() or 1))


def _kinds(job: Job) -> list[tuple[int, tuple[int, ...]]]:
    """(pipeline rank to run, all pipeline ranks of its kind)."""
    plan, prefix = job.pipeline, f"{job.spec.blocks_path}."
    of_block, stored = job.spec.counts(job.sizes).blocks, recomputation_of(job)
    mode, every = stored["recompute"], stored.get("recompute_every", 1)

    def of_module(name: str) -> Any:
        """What a module has in common with equal ones."""
        if not name.startswith(prefix):
            return name
        block = int(name.removeprefix(prefix))
        return of_block[block], is_recomputed(mode, every, block)

    kinds: dict[Any, list[int]] = {}
    for rank in range(plan.ranks):
        modules = tuple(
            frozenset(Counter(map(of_module, plan.stages[stage])).items())
            for stage in plan.stages_of(rank)
        )
        kinds.setdefault(modules, []).append(rank)
    in_flight = forwards_in_flight(job)
    return [(max(k, key=lambda rank: in_flight[rank]), tuple(k)) for k in kinds.values()]


def forwards_in_flight(job: Job) -> list[int]:
    """The most forward passes that each pipeline rank has whose backward is still to come."""
    most = []
    for actions in job.pipeline.order():
        alive = peak = 0
        for action in actions:
            alive += {"forward": 1, "backward": -1, "weight": -1}.get(action.kind, 0)
            peak = max(peak, alive)
        most.append(peak)
    return most


class _RankRun:
    """One rank, from its process group to the end of a step."""

    def __init__(self, job: Job, pipeline_rank: int):
        compile_off = dataclasses.replace(job.config.compile, enable=False)
        optimizer = job.config.optimizer
        if optimizer.state_dtype in ("8bit", "4bit"):  # whose kernels are compiled
            optimizer = optimizer.replace(implementation="for-loop")
        attention = dataclasses.replace(job.config.attention, mask="causal")
        config = dataclasses.replace(
            job.config, compile=compile_off, optimizer=optimizer, attention=attention
        )
        self._job = dataclasses.replace(job, config=config)
        self._pipeline_rank = pipeline_rank
        self._expert_groups: dict[str, str] = {}  # name of a process group -> dimension

    def run(self, same_kind: tuple[int, ...]) -> RankStep:
        """Build the rank and take a step."""
        began, job = time.perf_counter(), self._job
        degrees = job.degrees
        rank = self._pipeline_rank * (degrees.ranks // degrees.pipeline)
        recorder = StepRecorder(self._dimension_of)
        like_cuda = job.config.job.device != "cpu"
        with fake_rank(rank, degrees.ranks), _counting(recorder):
            mesh = build_mesh(degrees, "cpu")
            self._name_expert_groups(mesh.experts)
            layout = ParallelLayout(mesh, job.config.parallelism, job.pipeline)
            modules = build_parallel_modules(job.spec, job.sizes, layout, job.transforms)
            with fake_compute(recorder.observe, like_cuda):
                model = modules.materialize(CPU, seed=0)
                batch = job.config.training.local_batch_size
                engine = build_engine(model, layout, CPU, local_batch=batch)
                state, in_backward = build_state(job, model, mesh, Counters())
                settings = build_step_settings(job, state, mesh, in_backward)
                hooks = [part for part in state.parts.values() if isinstance(part, StepHook)]
                settings = dataclasses.replace(settings, hooks=tuple(hooks))
                _allocate_state(state, recorder)
                resting = self._step(engine, state, settings, recorder)
        return RankStep(
            self._pipeline_rank,
            same_kind,
            "; ".join(
                describe_stage(job.pipeline.stages[stage])
                for stage in job.pipeline.stages_of(self._pipeline_rank)
            ),
            resting,
            recorder.peak_bytes,
            recorder.peak_phase,
            {label: size for label, size in recorder.alive_at_peak.items() if size},
            sum(recorder.flops.values()),
            recorder.collectives,
            time.perf_counter() - began,
        )

    def _step(
        self, engine: Engine, state: TrainState, settings: StepSettings, recorder: StepRecorder
    ) -> RestingBytes:
        tokens = torch.zeros(
            (self._job.rank_batch, self._job.config.training.seq_len), dtype=torch.int64
        )
        batch = Batch(tokens, torch.zeros_like(tokens))
        recorder.restart()
        set_phase = recorder.set_phase
        result = compute_gradients(state, engine, batch, settings=settings, set_phase=set_phase)
        resting = resting_bytes(state.model, state.optimizer)
        finish_step(state, result, settings)
        return resting

    def _name_expert_groups(self, mesh: ExpertMesh) -> None:
        """Tell the groups of the experts from others, some of which have the same ranks."""
        if mesh.exchange is not None:
            for submesh in (mesh.exchange, mesh.fsdp):
                for name, group in zip(
                    submesh.mesh_dim_names or (), submesh.get_all_groups(), strict=True
                ):
                    self._expert_groups[group.group_name] = name if group.size() > 1 else ""

    def _dimension_of(self, group: dist.ProcessGroup, collective: str) -> str:
        """The dimensions of the mesh in which the ranks of a group differ; "" for one rank.

        Torch has one group for two dimensions with the same ranks. Tokens are sent to experts by
        all-to-all.
        """
        of_experts = self._expert_groups.get(group.group_name)
        if of_experts is not None and (of_experts != "expert" or collective == "all-to-all"):
            return of_experts
        ranks = dist.get_process_group_ranks(group)
        coordinates = [coordinates_of(rank, self._job.degrees) for rank in ranks]
        varying = [d.name for d in DIMENSIONS if len({place[d.name] for place in coordinates}) > 1]
        return " x ".join(varying)


def _allocate_state(state: TrainState, recorder: StepRecorder) -> None:
    """Take an optimizer step with zero gradients, after which its state exists."""
    for parameter in (p for p in state.model.parameters() if p.requires_grad):
        parameter.grad = torch.zeros_like(parameter)
    with recorder.labelled("optimizer state"):
        state.optimizer.step()
    state.optimizer.zero_grad()


def resting_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> RestingBytes:
    """Bytes of the storages of a rank's parameters, gradients and optimizer states.

    FSDP pads uneven shards, so a storage may be larger than the tensor in it.
    """
    parameters = registered_parameters(model)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = [value for state in states for value in state.values()]
    return RestingBytes(
        _storage_bytes(parameters),
        _storage_bytes(p.grad for p in parameters if p.grad is not None),
        _storage_bytes(m for m in moments if isinstance(m, Tensor) and m.dim() > 0),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def even_row_numbers(rows: int, *counts: Tensor) -> list[list[int]]:
    """As many rows to and from every rank: the counts have no values."""
    ranks = len(counts[0])
    return [[rows // ranks] * (ranks - 1) + [rows - rows // ranks * (ranks - 1)] for _ in counts]


@contextmanager
def _counting(recorder: StepRecorder) -> Iterator[None]:
    """Show the recorder what no operator shows: resized storages, and what allocations are for."""
    resize = torch.UntypedStorage.resize_

    def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resize(storage, size)
        return result

    def labelled(owner: type, name: str, label: str) -> tuple[type, str, Any]:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            with recorder.labelled(label):
                return original(*args, **options)

        return owner, name, call

    gathered, reduced, received = "gathered parameters", "gradient reduction", "pipeline receives"
    with replaced_attributes(
        [
            (torch.UntypedStorage, "resize_", counted_resize),
            (parallelize_package, "init_weights", lambda *args: None),  # nobody reads the values
            (token_exchange, "read_row_numbers", even_row_numbers),
            labelled(FSDPParamGroup, "unshard", gathered),
            labelled(FSDPParamGroup, "wait_for_unshard", gathered),
            labelled(FSDPParamGroup, "post_backward", reduced),
            labelled(PipelineStage, "_prepare_forward_infra", received),
            labelled(PipelineStage, "_prepare_backward_infra", received),
            labelled(OutputLayer, "forward", "logits and loss"),
        ]
    ):
        yield
