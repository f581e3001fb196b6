"""The layouts that a search chooses from are those that train.py accepts, all of them."""

from __future__ import annotations

import itertools
import math

import pytest

from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError
from titanlite.job import MOVED, JobConfig
from titanlite.models import FAMILIES
from titanlite.parallelize.schedule import SCHEDULES
from titanlite.settings import load_config
from titanlite_planner.plan.layout_space import (
    RECOMPUTES,
    Frame,
    LayoutChoice,
    LayoutSpace,
    StepOptions,
)
from titanlite_planner.plan.planned_job import planned_config, planned_job

GPUS, BATCH, SEQ_LEN, LAYERS = 12, 24, 96, 6
SIZES = ["--model.n_layers", str(LAYERS), "--model.n_heads", "6", "--model.n_kv_heads", "3"]
SIZES += ["--model.dim", "96", "--model.hidden_dim", "96", "--model.vocab_size", "64"]


@pytest.fixture(scope="module")
def base() -> JobConfig:
    argv = [*SIZES, "--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(BATCH)]
    config, problems = load_config(JobConfig, argv, MOVED)
    assert not problems
    return config


def space_of(base: JobConfig, **changes) -> LayoutSpace:
    spec = FAMILIES["llama3"]
    sizes = spec.sizes_of(base.model)
    return LayoutSpace(spec, sizes, GPUS, SEQ_LEN, BATCH, **changes)


def is_accepted(base: JobConfig, choice: LayoutChoice) -> bool:
    try:
        planned_job(planned_config(base, choice), choice)
    except ConfigError:
        return False
    return True


def all_degrees():
    for degrees in itertools.product(range(1, GPUS + 1), repeat=4):
        rest, remainder = divmod(GPUS, degrees[0] * degrees[1] * degrees[2] * degrees[3])
        if rest and not remainder:
            yield Degrees(*degrees, rest)


def all_frames():
    for degrees in all_degrees():
        rank_batch = max(1, BATCH // degrees.batch)
        for micro_batch in range(1, rank_batch + 1):
            yield Frame(degrees, micro_batch, max(1, rank_batch // micro_batch))


def test_the_degrees_and_schedules_are_those_that_train_py_accepts(base):
    space = space_of(base)
    listed = {(f, *schedule) for f in space.frames() for schedule in space.schedules(f)}
    assert len(listed) > 100
    for frame in all_frames():
        candidates = [("1F1B", 1)]
        if frame.degrees.pipeline > 1:
            candidates = list(itertools.product(SCHEDULES, range(1, 4)))
        divides = frame.micro_batch * frame.n_microbatches * frame.degrees.batch == BATCH
        for name, stages in candidates:
            if (SCHEDULES[name].stages_per_rank == 1) != (stages == 1) and candidates[1:]:
                continue  # not expressible: such a schedule has one stage a rank, or several
            if stages * frame.degrees.pipeline > LAYERS:
                continue  # not searched: a stage without a block
            choice = LayoutChoice(frame, name, stages)
            accepted = divides and is_accepted(base, choice)
            assert accepted == ((frame, name, stages) in listed), choice


def test_the_options_are_those_that_train_py_accepts(base):
    config, _ = load_config(JobConfig, [*SIZES, "--training.seq_len", "96"], MOVED)
    space = space_of(base, compiled=False)
    frame = Frame(Degrees(2, 2, 1, 1, 3), 1, 6)
    for schedule, stages in (("1F1B", 1), ("ZBVZeroBubble", 2)):
        if schedule not in {name for name, _ in space.schedules(frame)}:
            continue  # needs a newer torch
        listed = space.options(frame, schedule)
        for values in itertools.product(RECOMPUTES, *([(False, True)] * 3)):
            options = StepOptions(*values)
            accepted = is_accepted(config, LayoutChoice(frame, schedule, stages, options))
            assert accepted == (options in listed), options


def test_options_come_after_those_that_cost_less(base):
    frame = Frame(Degrees(1, 12, 1, 1, 1), 1, 2)
    options = space_of(base).options(frame, "1F1B")
    for earlier, later in itertools.combinations(options, 2):
        assert not earlier.costs_no_less_than(later)
    assert options[0] == StepOptions()
    assert options[-1] == StepOptions("full", True, True, True)


def test_what_is_fixed_stays(base):
    fixed = {"tensor": 3, "pipeline": 2, "schedule": "GPipe", "recompute": "full", "reshard": True}
    space = space_of(base, fixed=fixed)
    frames = list(space.frames())
    assert {(f.degrees.tensor, f.degrees.pipeline) for f in frames} == {(3, 2)}
    assert {s for f in frames for s in space.schedules(f)} == {("GPipe", 1)}
    sharded = next(f for f in frames if f.degrees.shard == 2)
    options = space.options(sharded, "GPipe")
    assert {(o.recompute, o.reshard) for o in options} == {("full", True)}


def test_tied_embeddings_can_have_a_pipeline():
    spec = FAMILIES["llama3"]
    space = LayoutSpace(spec, spec.flavors["1B"], 16, 8192, 64)
    assert {frame.degrees.pipeline for frame in space.frames()} == {1, 2, 4, 8, 16}


def test_float8_needs_tokens_that_are_multiples_of_16(base):
    space = space_of(base, precisions=("float8", "float8 gather"))
    frames = list(space.frames())
    for frame in frames:
        assert frame.micro_batch * SEQ_LEN // frame.degrees.context % 16 == 0
        gathers = frame.degrees.shard * frame.degrees.context > 1
        assert gathers or frame.precision == "float8"
    assert any(frame.precision == "float8 gather" for frame in frames)


def test_experts_are_divided_in_every_way_that_train_accepts():
    """On 4 GPUs, 6 experts of width 36."""
    argv = [
        "--model.name",
        "qwen3_moe",
        "--model.n_experts",
        "6",
        "--model.expert_hidden_dim",
        "36",
    ]
    argv += ["--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", "4"]
    config, problems = load_config(JobConfig, argv, MOVED)
    assert not problems
    spec = FAMILIES["qwen3_moe"]
    space = LayoutSpace(spec, spec.sizes_of(config.model), 4, SEQ_LEN, 4)
    found = {frame.degrees for frame in space.frames() if frame.micro_batch == 1}
    accepted = set()
    for ranks in itertools.product((1, 2, 4), repeat=5):
        if math.prod(ranks) != 4:
            continue
        for expert, expert_tensor in itertools.product((1, 2, 3, 4, 6), (1, 2, 4)):
            degrees = Degrees(*ranks, expert, expert_tensor)
            frame = Frame(degrees, 1, 4 // degrees.batch)
            choice = LayoutChoice(frame)
            is_same = expert == 1 and expert_tensor > 1  # as expert_tensor = 1
            if not is_same and is_accepted(config, choice):
                accepted.add(degrees)
    assert found == accepted
    assert max(degrees.expert for degrees in found) == 2
