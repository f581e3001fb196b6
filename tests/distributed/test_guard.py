"""Under every layout a violation is skipped once, on all ranks, and its source is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.distributed.guarded import (
    RECIPE,
    Fault,
    GuardedRecord,
    GuardedRun,
    run_guarded,
)
from tests.distributed.oracle import Layout, Recipe
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_float8 import SIZES, TENSORWISE
from titanlite.guard.policy import GuardConfig

HEALTHY = 17  # steps before the first fault: the window must have 16 values
SKIP = GuardConfig(spike="skip", max_violations=2, max_hardware_faults=100)


BLOCK, NORM = "layers.0.feed_forward.w1", "norm"
# An RMSNorm turns 1e30 inside a block into zeros, which neither the loss nor a gradient shows.
ACTIVATIONS = {math.nan: BLOCK, math.inf: BLOCK, 1e30: NORM}


ALL = tuple(
    (kind, v) for v in (math.nan, math.inf, 1e30) for kind in ("gradient", "activation", "loss")
)
EACH = (("gradient", 1e30), ("activation", math.nan), ("loss", math.inf))  # kind and value
OTHERS = (("gradient", math.inf), ("activation", 1e30), ("loss", math.nan))


def faults_on(first_rank: int, last_rank: int, values) -> tuple[Fault, ...]:
    """One of each (kind, value), with a healthy step between two; block 0 is on `first_rank`."""
    faults = []
    for kind, value in values:
        name = ACTIVATIONS[value] if kind == "activation" else BLOCK
        rank = last_rank if kind == "loss" or name == NORM else first_rank
        faults.append(Fault(0, kind, value, rank, name=name))
    return tuple(replace(fault, position=HEALTHY + 2 * n) for n, fault in enumerate(faults))


def case_of(layout: Layout, first_rank: int = 1, values=ALL, **options) -> GuardedRun:
    faults = faults_on(first_rank, layout.degrees.ranks - 1, values)
    steps = HEALTHY + 2 * len(faults) + 1
    return GuardedRun(layout, guard=SKIP, faults=faults, steps=steps, **options)


def check_skipped(case: GuardedRun, ranks: list[GuardedRecord]) -> None:
    """Each fault is skipped once and named, and changed no bit on any rank."""
    skipped = [event for event in ranks[0].events if event["event"] == "step_skipped"]
    assert [event["step"] for event in skipped] == [fault.position + 1 for fault in case.faults]
    for record in ranks:
        assert not record.error
        assert record.position == case.steps * case.recipe.batch
        for fault in case.faults:
            before, *others = [
                (everything, on_device)
                for step, everything, on_device in record.digests
                if step in (fault.position, fault.position + 1)
            ]
            assert all(on_device == before[1] for _, on_device in others), fault
            if case.dtype != torch.float16 or fault.kind != "gradient":  # the loss scale shrinks
                assert others[-1] == before, fault
    for fault, event in zip(case.faults, skipped, strict=True):
        assert event["rank"] == fault.rank, (fault, event)
        if fault.kind == "gradient":
            assert event["parameter"] == f"{fault.name}.weight"
        if case.dtype == torch.float16 and fault.kind == "gradient":
            continue
        assert event["kind"] == fault.kind, (fault, event)
        if fault.kind == "activation":
            assert event["module"] == fault.name


def test_one_process_skips_and_names_each_fault():
    case = case_of(Layout(), first_rank=0)
    (record,) = run_on_ranks(run_guarded, 1, case)
    check_skipped(case, [record])


LAYOUTS = {
    "FSDP 2": case_of(Layout(shard=2)),
    "TP 2": case_of(Layout(tensor=2), values=EACH),
    "PP 2": case_of(Layout(pipeline=2), first_rank=0, values=OTHERS),
    "fp16": case_of(Layout(shard=2), values=OTHERS, dtype=torch.float16),
    "Float8": case_of(
        Layout(shard=2),
        values=EACH,
        float8=TENSORWISE,
        recipe=Recipe("AdamW", max_norm=1.0, sizes=SIZES, batch=4, seq_len=32, lr=1e-3),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_skip_and_name_each_fault(name):
    case = LAYOUTS[name]
    check_skipped(case, run_on_ranks(run_guarded, 2, case))


# --- hardware faults -----------------------------------------------------------------------------

FLIPPED = 2.0**120  # about what the highest exponent bit makes of a gradient
HARDWARE = {
    "FSDP 2": (Layout(shard=2), "gradient", 1),
    "PP 2": (Layout(pipeline=2), "gradient", 0),
    "CP 2, loss": (Layout(context=2), "loss", 1),
}


def run_with_and_without(case: GuardedRun) -> tuple[GuardedRecord, GuardedRecord]:
    """The same run with its faults, and undisturbed."""
    return run_guarded(case), run_guarded(replace(case, faults=()))


@pytest.mark.parametrize("name", HARDWARE)
def test_a_fault_that_is_gone_in_the_replay_changes_nothing(name):
    layout, kind, rank = HARDWARE[name]
    # The second hits a step that had been started before the first was known, and is taken back.
    faults = [Fault(at, kind, FLIPPED, rank, once=True, name=BLOCK) for at in (17, 18, 20, 22)]
    case = GuardedRun(layout, guard=SKIP, faults=tuple(faults), steps=24)
    ranks = run_on_ranks(run_with_and_without, 2, case)
    for disturbed, undisturbed in ranks:
        assert not disturbed.error
        assert disturbed.final == undisturbed.final
    events = ranks[0][0].events
    assert [(e["event"], e["step"], e["rank"]) for e in events] == [
        ("hardware_fault", step, rank) for step in (18, 21, 23)
    ]
    assert [event["faults"] for event in events] == [1, 2, 3]
    assert all(event["host"] for event in events)


def test_repeated_faults_of_a_host_end_the_run():
    faults = tuple(Fault(at, "gradient", FLIPPED, 1, once=True, name=BLOCK) for at in (2, 4, 6))
    guard = GuardConfig(max_hardware_faults=2)  # without a policy for spikes: the norm overflows
    case = GuardedRun(Layout(shard=2), guard=guard, faults=faults, steps=8)
    for record in run_on_ranks(run_guarded, 2, case):
        assert record.error.startswith("3: 2 hardware faults of "), record.error
        assert "rank 1" in record.error and "step 5" in record.error


# --- policies and the loop -----------------------------------------------------------------------

BAD = Fault(2, "gradient", math.nan, 0, name=BLOCK)


def check_policies() -> dict[str, GuardedRecord]:
    """Several runs of one process, by name."""
    on = GuardConfig()
    spiked = (Fault(17, "loss", 50.0, 0),)
    cases = {
        "clean": GuardedRun(),
        "guarded": GuardedRun(guard=on),
        "skipped": GuardedRun(guard=on, faults=(BAD,), steps=4),
        "without its batch": GuardedRun(steps=3, skipped=(2,)),
        "acting at every step": GuardedRun(guard=on, faults=(BAD,), steps=4, action_freq=1),
        "in a row": GuardedRun(
            guard=GuardConfig(max_violations=3),
            faults=tuple(replace(BAD, position=at) for at in (1, 3, 4, 5)),
            steps=9,
        ),
        "last step": GuardedRun(guard=on, faults=(replace(BAD, position=3),), steps=4),
        "not skipped": GuardedRun(steps=18),
        "warned": GuardedRun(guard=GuardConfig(spike="warn"), faults=spiked, steps=18),
        "ignored": GuardedRun(guard=on, faults=spiked, steps=18),
        "SGD": GuardedRun(
            guard=on, faults=(BAD,), steps=4, recipe=replace(RECIPE, optimizer="SGD")
        ),
        "SGD without its batch": GuardedRun(
            steps=3, skipped=(2,), recipe=replace(RECIPE, optimizer="SGD")
        ),
        "8bit": GuardedRun(
            guard=on, faults=(BAD,), steps=4, recipe=replace(RECIPE, state_dtype="8bit")
        ),
        "8bit without its batch": GuardedRun(
            steps=3, skipped=(2,), recipe=replace(RECIPE, state_dtype="8bit")
        ),
    }
    return {name: run_guarded(case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def policies() -> dict[str, GuardedRecord]:
    (records,) = run_on_ranks(check_policies, 1)
    return records


def test_a_guard_changes_no_bit_of_a_healthy_run(policies):
    assert policies["guarded"].final == policies["clean"].final


@pytest.mark.parametrize("optimizer", ["", "SGD ", "8bit "])
def test_a_run_that_skips_a_step_is_a_run_without_its_batch(policies, optimizer):
    skipped = policies[optimizer.strip() or "skipped"]
    without = policies[f"{optimizer}without its batch"]
    assert skipped.final == without.final
    assert (skipped.position, without.position) == (16, 12)
    assert skipped.dumped == [(3, 8, 4)]


def test_actions_see_only_settled_steps_and_each_once(policies):
    record = policies["acting at every step"]
    assert record.final == policies["skipped"].final
    assert [step for step, _ in record.acted] == [1, 2, 3, 4]
    assert [e["step"] for e in record.events] == [3]


def test_only_violations_in_a_row_end_the_run(policies):
    record = policies["in a row"]
    events = [(event["event"], event["step"]) for event in record.events]
    assert events == [
        ("step_skipped", 2),
        ("step_skipped", 4),
        ("step_skipped", 5),
        ("diverged", 6),
    ]
    assert record.error.startswith("3: training diverged: inf or NaN at step 6")
    assert "3 violations in a row" in record.error and "step-3" in record.error
    assert record.events[-1]["checkpoint"] == "step-3"


def test_a_violation_in_the_last_step_is_handled(policies):
    record = policies["last step"]
    assert [event["step"] for event in record.events] == [4]
    assert record.position == 16 and not record.error


def test_warn_takes_the_step_and_off_reports_nothing(policies):
    assert policies["warned"].final == policies["ignored"].final == policies["not skipped"].final
    assert [(e["event"], e["step"]) for e in policies["warned"].events] == [("spike", 18)]
    assert policies["ignored"].events == []
