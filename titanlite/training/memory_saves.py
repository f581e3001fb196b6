"""Periodic actions: checkpoints in the memory of hosts, every checkpoint.memory_interval steps."""

from __future__ import annotations

from titanlite.checkpoint import MEMORY_BROKEN, MEMORY_WRITING, Checkpointer
from titanlite.metrics import MetricSinks
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.state import TrainState
from titanlite.training.weight_average import average_of


def save_in_memory(
    state: TrainState, checkpointer: Checkpointer, sinks: MetricSinks
) -> tuple[PeriodicAction, ...]:
    """Report what was saved in memory, then save if that is due; nothing if it is off."""
    memory = checkpointer.memory
    if memory is None:
        return ()

    def report(info: StepInfo) -> None:
        if info.ends_run:  # the disk has this step
            memory.remove()
        elif saved := memory.take_result():
            problem = saved.problem or (saved.error and f"{saved.error}; no more are saved")
            fields = {"seconds": saved.seconds, "blocked_seconds": saved.blocked_seconds}
            fields |= {"bytes": memory.bytes, "sent_bytes": memory.sent_bytes}
            if problem:
                sinks.event(saved.step, "memory_checkpoint_failed", reason=problem)
            else:
                sinks.event(saved.step, "memory_checkpoint_saved", **fields)

    def is_done(info: StepInfo) -> bool:
        return info.ends_run or info.memory_state != MEMORY_WRITING

    def save(info: StepInfo) -> None:
        if info.memory_state == MEMORY_WRITING:
            reason = "the one before is still being written"
            sinks.event(info.step, "memory_checkpoint_skipped", reason=reason)
            return
        average = average_of(state)
        checkpointer.save_in_memory(
            info.step,
            state.model,
            state.optimizer,
            progress=state.progress(),
            average=average.current() if average else None,
            before_commit=sinks.sync,  # so metrics up to this step reach the disk first
        )

    def is_due(info: StepInfo) -> bool:
        is_broken = info.memory_state == MEMORY_BROKEN
        return not is_broken and checkpointer.due_in_memory(info.step, info.ends_run)

    return (
        PeriodicAction("save", is_done, report),
        PeriodicAction("save", is_due, save, needs_finite=True),
    )
