"""The search finds the fastest layout that fits, and explains it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator

import pytest

from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError
from titanlite.runtime.out_of_memory import GIB
from titanlite_planner.hardware import parse_gpus
from titanlite_planner.job_workload import workload_of
from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.memory.offloaded import offloaded_bytes
from titanlite_planner.plan.changes import changed_answers, explain_loss
from titanlite_planner.plan.layout_space import Frame, LayoutChoice, LayoutSpace, StepOptions
from titanlite_planner.plan.request import PlanArguments, PlanRequest, read_plan_request
from titanlite_planner.plan.search import LayoutSearch

SMALL = ["--model.n_layers", "4", "--model.dim", "2048", "--model.hidden_dim", "8192"]
SMALL += ["--model.n_heads", "16", "--model.n_kv_heads", "2", "--model.vocab_size", "32000"]
FIXED = ["replicate=1", "offload_activations=no"]


def request_of(gpus="8xH100", batch="16", **changes) -> PlanRequest:
    given = {"model": "llama3/8B", "seq_len": "4096", "overrides": SMALL, "fix": FIXED, **changes}
    arguments = PlanArguments(gpus=gpus, global_batch=batch, **given)
    return read_plan_request(arguments)


def search_of(request: PlanRequest, usable_bytes: float | None = None, **options) -> LayoutSearch:
    target = request.target
    if usable_bytes is not None:
        target = dataclasses.replace(target, usable_bytes=usable_bytes)
    return LayoutSearch(request.space, target, **options)


def all_candidates(space: LayoutSpace) -> Iterator[LayoutChoice]:
    """Every legal candidate."""
    for frame in space.frames():
        for schedule, stages in space.schedules(frame):
            for options in space.options(frame, schedule):
                yield LayoutChoice(frame, schedule, stages, options)


@pytest.mark.slow
def test_the_best_is_the_best_of_all_candidates():
    request = request_of()
    search = search_of(request)
    candidates = [  # all that the host has memory for, the fastest first
        (search.estimate_time(choice).total, number, search.needed_bytes(choice), choice)
        for number, choice in enumerate(all_candidates(request.space))
        if search.fits_the_host(choice)
    ]
    candidates.sort()
    needed = sorted(bytes_needed for _, _, bytes_needed, _ in candidates)
    for quantile in (0.02, 0.2, 1.0):
        usable = needed[int(quantile * (len(needed) - 1))]
        best = search_of(request, usable).run().best
        fitting = (choice for _, _, size, choice in candidates if size <= usable)
        expected = next(filter(None, map(search.checked, fitting)))  # that train.py accepts
        assert best[0].time.total == expected.time.total
        assert best[0].memory.total <= usable
        assert [step.time.total for step in best] == sorted(step.time.total for step in best)
        assert len({step.choice.frame for step in best}) == len(best)


def test_a_search_and_each_of_its_estimates_stay_cheap():
    """Counted, not timed: estimates of a search, and function calls of an estimate."""
    small = search_of(request_of())
    small.run()
    assert small.counts.time_estimates <= 230
    assert small.counts.memory_estimates <= 32
    large = request_of("4096xH100", "2048", model="llama3/405B", overrides=[], fix=["tensor=8"])
    search = search_of(large)
    frame = Frame(Degrees(shard=16, tensor=8, pipeline=32), 1, 128)
    choice = LayoutChoice(frame, "Interleaved1F1B", 3, StepOptions("full"))
    search.estimate_time(choice)
    search.needed_bytes(choice)  # the schedule's order is known from here on
    assert calls_of(lambda: search.estimate_time(choice)) <= 2_500
    assert calls_of(lambda: search.needed_bytes(choice)) <= 46_000


def calls_of(action: Callable[[], object]) -> int:
    """How many Python functions `action` calls."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_activations_are_offloaded_only_as_far_as_the_host_has_memory_for_them():
    request = request_of(fix=["offload_activations=yes", "recompute=none", "micro_batch=2"])
    step = search_of(request).run().best[0]
    offloaded = offloaded_bytes(step.workload)
    assert offloaded == pytest.approx(
        step.workload.model.n_layers * BlockActivations(step.workload).saved(0)
    )
    small = dataclasses.replace(request.cluster.machine, host_gib=0.01)
    with pytest.raises(ConfigError, match="Nothing fits: what is offloaded needs more than 80%"):
        search_of(
            dataclasses.replace(
                request, cluster=dataclasses.replace(request.cluster, machine=small)
            )
        ).run()


def test_a_planned_step_is_the_step_of_its_job():
    request = request_of(fix=["micro_batch=1", "pipeline=2"], batch="32")
    steps = search_of(request).run().best
    assert {step.choice.frame.degrees.pipeline for step in steps} == {2}
    for step in steps:
        assert workload_of(step.job) == step.workload


def test_the_recipe_of_float8_is_that_of_the_job_also_beside_bf16():
    pytest.importorskip("torchao")
    recipe = ["--quantize.linear.float8.recipe_name", "rowwise"]
    request = request_of(precision="any", overrides=[*SMALL, *recipe])
    choice = next(c for c in all_candidates(request.space) if c.frame.precision == "float8")
    step = search_of(request).checked(choice)
    assert step is not None and step.workload.numerics.quantize_bytes
    assert workload_of(step.job) == step.workload
    # "float8 gather" needs another recipe; the search goes on without it
    precisions = {step.choice.frame.precision for step in search_of(request).run().best}
    assert "float8 gather" not in precisions


@pytest.mark.parametrize("precision", ["float8", "float8 gather"])
def test_float8_changes_only_the_matmuls_and_the_all_gather(precision):
    pytest.importorskip("torchao")
    request = request_of(precision="float8")
    search = search_of(request)
    choice = next(c for c in all_candidates(request.space) if c.frame.precision == precision)
    step = search.checked(choice)
    assert step is not None and workload_of(step.job) == step.workload
    assert step.workload.numerics.matmuls == "float8"
    assert step.workload.numerics.float8_gather == (precision == "float8 gather")


@pytest.mark.parametrize(
    ("usable", "need"),
    [
        (0.4 * GIB, r"the smallest layout found, .*, needs 0\.[4-9] GiB"),
        (1.0, r"parameters and gradients alone need, with FSDP 8, 0.3 GiB"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_smallest_need(usable, need):
    with pytest.raises(ConfigError, match=rf"Nothing fits: a GPU has .* GiB to use, and {need}"):
        search_of(request_of(), usable).run()


@pytest.mark.parametrize(
    ("settings", "fixed"),
    [
        (["--training.enable_cpu_offload=true"], []),
        (
            ["--optimizer.early_step_in_backward=true", "--training.max_norm=0"],
            ["offload_optimizer=yes"],
        ),
    ],
    ids=str,
)
def test_what_is_not_on_the_gpu_need_not_fit_there(settings, fixed):
    fix = ["recompute=full", "micro_batch=1", "offload_activations=no", *fixed]
    changes = {
        "overrides": [*SMALL, "--model.n_layers=32", *settings],
        "fix": fix,
        "seq_len": "256",
    }
    request = request_of("1xH100", "1", **changes)
    step = search_of(request).run().best[0]
    assert search_of(request, step.memory.total).run().best[0] == step


def test_a_batch_that_no_layout_divides_is_refused():
    with pytest.raises(ConfigError, match=r"No layout of 8 GPUs, tensor = 3"):
        search_of(request_of(fix=["tensor=3"])).run()


def test_a_setting_that_train_py_refuses_is_reported():
    overrides = [*SMALL, "--optimizer.eps", "0", "--training.dtype", "bfloat16"]
    overrides += ["--training.mixed_precision_param", "float16"]
    with pytest.raises(ConfigError, match="float16 compute requires float32 parameters"):
        search_of(request_of(overrides=overrides)).run()


def test_the_reasons_of_a_loss_add_up():
    first, *others = search_of(request_of()).run().best
    for step in others:
        reasons = explain_loss(step, first)
        assert reasons == sorted(reasons, key=lambda reason: -reason[1])
        lost = step.time.total - first.time.total
        assert sum(seconds for _, seconds in reasons) == pytest.approx(lost, abs=0.3 * lost + 1e-6)


def test_changed_assumptions_change_the_speed_as_they_must():
    request = request_of("16xH100")
    search = search_of(request)
    best = search.run().best[0]
    answers = {a.assumption: a for a in changed_answers(request, best, search.bounds)}
    assert answers["twice the memory of a GPU"].speed >= 1.0
    assert answers["half the network"].speed <= 1.0 <= answers["twice the network"].speed
    assert answers["global batch 32"].speed > answers["global batch 8"].speed
    for estimated in changed_answers(request, best, {}):  # the bounds save work, nothing else
        known = answers[estimated.assumption]
        assert (known.choice, known.speed) == (estimated.choice, estimated.speed)
    unchanged = [answer for answer in answers.values() if answer.same_layout]
    for answer in unchanged:
        frame = answer.choice.frame
        assert dataclasses.replace(frame, n_microbatches=0) == dataclasses.replace(
            best.choice.frame, n_microbatches=0
        )
    assert parse_gpus("16xH100") == request.cluster  # the request itself is not changed
