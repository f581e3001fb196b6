"""The guard of a run: replay a violating step on all ranks, and do what its history decides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from titanlite.distributed.collectives import run_on_rank_0
from titanlite.distributed.rank_tree import RankTree
from titanlite.errors import CheckpointError, TrainingDiverged
from titanlite.guard.culprit import (
    Culprit,
    CulpritSearch,
    OutputCall,
    find_strongest,
    recording_outputs,
)
from titanlite.guard.judge import PendingStep, PendingSteps, StepJudge
from titanlite.guard.policy import History, StepVerdict, ViolationReason
from titanlite.guard.rollback import CheckpointRollback, Trouble
from titanlite.log import pluralize
from titanlite.optim import shard_norms
from titanlite.training.batch import Batch
from titanlite.training.run import Run, StepGuard
from titanlite.training.state import HostState
from titanlite.training.step import StepResult, compute_gradients, finish_step


@dataclass(frozen=True)
class Violation:
    """A violating step and where it comes from; the same on all ranks."""

    step: int  # counted from 1
    reason: ViolationReason
    loss: float
    grad_norm: float
    limits: list[float]  # loss and gradient norm above which a step is a spike, or NaN
    culprit: Culprit

    @property
    def fields(self) -> dict[str, Any]:
        """For an event: where the violation comes from."""
        return {
            "reason": self.reason.value,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "loss_limit": self.limits[0],
            "grad_norm_limit": self.limits[1],
            **dataclasses.asdict(self.culprit),
        }

    @property
    def values(self) -> str:
        """What was measured; the same in every layout and on every host."""
        values = f"loss {self.loss:g}, gradient norm {self.grad_norm:g}"
        is_spike = self.reason is ViolationReason.SPIKE
        return f"{values} (limits {self.limits[0]:g}, {self.limits[1]:g})" if is_spike else values

    def __str__(self) -> str:
        where = f"; {self.culprit}" if str(self.culprit) else ""
        return f"{self.reason.value} at step {self.step}: {self.values}{where}"


class Guard(StepGuard):
    """Replays violating steps, and accepts or skips them, rolls the run back, or ends it."""

    def __init__(
        self,
        run: Run,
        judge: StepJudge | None,
        rollback: CheckpointRollback,
        dump_batch: Callable[[int, int, int], str],
        compiles_layers: bool,
    ):
        """`judge`: None if no step is judged; parameters are checked all the same.

        `dump_batch`: (step, first position, samples) -> path of a new file with the global batch,
        or "" where none is written, as on ranks other than 0.
        """
        self._run, self._optional_judge, self._rollback = run, judge, rollback
        self._dump_batch, self._inside_layers = dump_batch, not compiles_layers
        self._tree, self._pending = RankTree(), PendingSteps()
        names = [name for name, _ in run.state.model.named_parameters()]
        self._search = CulpritSearch(names, run.step_settings.mesh.pp.get_local_rank())

    @property
    def _judge(self) -> StepJudge:
        assert self._optional_judge is not None, "without a judge, no step is rejected"
        return self._optional_judge

    def add(self, step: int, before: HostState, result: StepResult) -> None:
        self._pending.add(step, before, result)

    def poll(self) -> bool:
        return self._pending.poll()

    def has_rejected(self) -> bool:
        return bool(self._tree.max([self._pending.wait()])[0])

    def check_parameters(self, step: int, result: StepResult) -> bool:
        """See `StepGuard.check_parameters`; ends the run unless the policy is to roll back.

        An update can overflow though its gradient is finite.
        """
        parameters = self._run.state.model.parameters()
        # a quantised weight, which has no norm, does not change
        checked = [p if p.requires_grad else torch.zeros(1, device=p.device) for p in parameters]
        norms = torch.stack(shard_norms(checked))
        own = self._search.nonfinite_parameter(norms)
        if not self._tree.max([own.strength > (0,)])[0]:
            return False
        _, culprit, _ = find_strongest(own)
        values, no_limits = (float(result.loss), float(result.grad_norm)), [math.nan, math.nan]
        violation = Violation(step, ViolationReason.NONFINITE, *values, no_limits, culprit)
        if self._optional_judge is None or self._judge.config.nonfinite != "rollback":
            self._give_up(violation)
        self._roll_back(violation, self._run.state.position - result.samples, result.samples)
        return True

    def settle(self, first_batch: Callable[[], Batch]) -> StepResult | None:
        """See `StepGuard.settle`; raises TrainingDiverged if the guard gives up."""
        first = self._undo_rejected()
        if self._run.step_settings.optimizer_in_backward is None:
            return self._replay(first, first_batch())
        # It has updated the parameters, so it cannot be replayed.
        reason = self._agreed_reason(first.result) or ViolationReason.NONFINITE
        violation = self._describe(first.step, first.result, reason, [])
        path = self._dump_batch(first.step, first.position, first.result.samples)
        if self._judge.config.nonfinite != "rollback":
            self._give_up(violation, batch=path)
        event = StepVerdict.ROLL_BACK.value
        self._run.sinks.event(first.step, event, **violation.fields, batch=path)
        self._roll_back(violation, first.position, first.result.samples)
        return None

    def _undo_rejected(self) -> PendingStep:
        """Take back the first rejected step and those after it; not what backward has updated."""
        run = self._run
        first, judged = self._pending.take_rejected()
        step = first.step if first else 0
        latest, earliest = self._tree.max([step, -step])
        if first is None or latest != -earliest:  # some rank has updated parameters, another not
            raise TrainingDiverged(
                f"the ranks disagree on the first violating step: one found step {latest}, another"
                f" {-earliest or 'none'}. This is a hardware fault.",
                fix="The same command resumes from the newest checkpoint, if there is one.",
            ).mark_on_all_ranks()
        run.watchdog.set_phase(first.step, "replay")
        if run.step_settings.optimizer_in_backward is None:
            run.state.optimizer.uncount_steps(judged)
        run.state.restore_host_state(first.before)
        self._judge.resume()
        return first

    def _replay(self, first: PendingStep, batch: Batch) -> StepResult | None:
        """Replay a step that was undone, and accept it, skip it or roll back, as in `settle`."""
        run = self._run
        with recording_outputs(run.state.model, self._inside_layers) as calls:
            result = compute_gradients(
                run.state,
                run.engine,
                batch.to(run.device),
                settings=run.step_settings,
                set_phase=partial(run.watchdog.set_phase, first.step),
            )
        verdict, violation = self._decide(first, result, calls)
        if violation and verdict is StepVerdict.ROLL_BACK:
            self._roll_back(violation, first.position, first.result.samples)
            return None
        if verdict is StepVerdict.ACCEPT:
            if not result.overflowed:  # otherwise finish_step applies no update
                accept = self._judge.accept(result.loss, result.grad_norm)
                result = dataclasses.replace(result, accept=accept)
        else:
            run.state.restore_host_state(first.before)  # generators, which the replay has advanced
            result = dataclasses.replace(result, rejected=True)
        finish_step(run.state, result, run.step_settings)
        return result

    def _decide(
        self, first: PendingStep, replayed: StepResult, calls: list[OutputCall]
    ) -> tuple[StepVerdict, Violation | None]:
        """Compare a step with its replay, decide, report; raises TrainingDiverged to give up.

        Returns what to do, and the violation, or None if the replay is none.
        """
        judge, reason = self._judge, self._agreed_reason(replayed)
        differs, faulty, _ = find_strongest(self._search.other_bits(first.result, replayed))
        if not differs and not reason:  # only on a GPU, where a difference of 1 % is tolerated
            reason = self._agreed_reason(first.result) or ViolationReason.NONFINITE
        host = faulty.host if differs else None
        verdict = judge.history.decide(first.step, reason, host, judge.config)
        if differs:
            self._report_fault(first, replayed, faulty, judge.history)
        if not reason:
            return verdict, None
        violation = self._describe(first.step, replayed, reason, calls)
        path = self._dump_batch(first.step, first.position, first.result.samples)
        if verdict is StepVerdict.GIVE_UP:
            self._give_up(violation, judge.history.in_a_row, path)
        self._run.sinks.event(first.step, verdict.value, **violation.fields, batch=path)
        return verdict, violation

    def _roll_back(self, violation: Violation, position: int, samples: int) -> None:
        """Continue from an earlier checkpoint; the step consumed `samples` from `position` on."""
        reason = f"{violation.reason.value}, {violation.values}"
        self._rollback.roll_back(Trouble(violation.step, position, samples, reason))

    def _describe(
        self, step: int, result: StepResult, reason: ViolationReason, calls: list[OutputCall]
    ) -> Violation:
        """The violation of a step, from the evidence of all ranks."""
        limits = self._judge.limits()
        if reason is ViolationReason.SPIKE:
            evidence = self._search.spike(result, is_loss=float(result.loss) > limits[0])
        else:
            evidence = self._search.nonfinite(result, calls)
        own = (float(result.loss), float(result.grad_norm))
        _, culprit, (loss, grad_norm) = find_strongest(evidence, own)
        return Violation(step, reason, loss, grad_norm, limits, culprit)

    def _agreed_reason(self, result: StepResult) -> ViolationReason | None:
        """Why any rank finds that a step is a violation; None if no rank does."""
        reasons = (None, ViolationReason.SPIKE, ViolationReason.NONFINITE)
        own = self._judge.violation(result.loss, result.grad_norm)
        return reasons[self._tree.max([0 if result.overflowed else reasons.index(own)])[0]]

    def _report_fault(
        self, first: PendingStep, replayed: StepResult, faulty: Culprit, history: History
    ) -> None:
        """Write an event, and end the run if the same host had too many faults."""
        faults = history.hardware_faults[faulty.host]
        values = {"loss": float(first.result.loss), "grad_norm": float(first.result.grad_norm)}
        values |= {
            "replayed_loss": float(replayed.loss),
            "replayed_norm": float(replayed.grad_norm),
        }
        fields = {**values, **dataclasses.asdict(faulty), "faults": faults}
        self._run.sinks.event(first.step, "hardware_fault", **fields)
        if faults < self._judge.config.max_hardware_faults:
            return
        self._run.finish_save(first.step)
        raise TrainingDiverged(
            f"{pluralize(faults, 'hardware fault')} of {faulty.host or 'an unknown host'}: at step"
            f" {first.step}, {str(faulty) or 'the reduction over ranks'} had other bits in the"
            " replay.",
            fix="Run the same command on other machines; it resumes from a checkpoint, if any.",
        ).mark_on_all_ranks()

    def _give_up(self, violation: Violation, in_a_row: int = 1, batch: str = "") -> NoReturn:
        """Finish the save in flight, which is of an earlier step, and raise TrainingDiverged."""
        run = self._run
        run.finish_save(violation.step)
        resume = "starts from step 0: there is no checkpoint"
        try:
            steps = run_on_rank_0(run.checkpointer.steps, run.checkpointer.group)
        except CheckpointError as error:  # must not hide why the run ends
            steps, resume = [], f"resumes from the newest checkpoint, which is unknown ({error})"
        saved = f"step-{steps[-1]}" if steps else None
        fields = {**violation.fields, "violations": in_a_row, "checkpoint": saved, "batch": batch}
        run.sinks.event(violation.step, StepVerdict.GIVE_UP.value, **fields)
        rows = f", the last of {in_a_row} violations in a row" if in_a_row > 1 else ""
        resume = f"resumes from {saved}" if saved else resume
        raise TrainingDiverged(
            f"training diverged: {violation}{rows}.",
            fix=f"No state was saved since that step. The same command {resume}. If it diverges"
            " again: use a lower optimizer.lr, more lr_scheduler.warmup_steps, or bfloat16 instead"
            " of float16 in training.mixed_precision_param; or look at the samples of that step.",
        ).mark_on_all_ranks()
