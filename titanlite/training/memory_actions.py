"""Periodic actions: checkpoints in the memory of hosts, every checkpoint.memory_interval steps."""

from __future__ import annotations

from titanlite.checkpoint import Checkpointer
from titanlite.metrics import MetricSinks
from titanlite.training.periodic import PeriodicAction, StepInfo, request_save
from titanlite.training.state import TrainState


def memory_checkpoints(
    state: TrainState, checkpointer: Checkpointer, sinks: MetricSinks
) -> tuple[PeriodicAction, ...]:
    """Report the last save, then save if that is due; no actions if there are none in memory."""
    memory = checkpointer.memory
    if memory is None:
        return ()

    def report(info: StepInfo) -> None:
        if info.ends_run:  # the disk has this step
            memory.remove()
        elif saved := memory.take_result():
            fields = {"seconds": saved.seconds, "blocked_seconds": saved.blocked_seconds}
            fields |= {"bytes": memory.bytes, "sent_bytes": memory.sent_bytes}
            if saved.problem:
                sinks.event(saved.step, "memory_checkpoint_failed", reason=saved.problem)
            else:
                sinks.event(saved.step, "memory_checkpoint_saved", **fields)

    def has_ended(info: StepInfo) -> bool:
        return info.ends_run or not info.is_saving_in_memory

    def save(info: StepInfo) -> None:
        if info.is_saving_in_memory:
            sinks.event(info.step, "memory_checkpoint_failed", reason=memory.reason)
        else:
            checkpointer.save_in_memory(request_save(info.step, state, sinks))

    def is_due(info: StepInfo) -> bool:
        return checkpointer.due_in_memory(info.step, info.ends_run)

    saves = PeriodicAction("save", is_due, save, needs_finite=True)
    return PeriodicAction("save", has_ended, report), saves
