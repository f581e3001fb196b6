"""A run that stopped under one layout goes on under any other as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import bits, load, open_checkpointer, save_and_wait
from tests.distributed.oracle import (
    ADAMW,
    SGD,
    Layout,
    Record,
    one_process,
    run_until,
    start_run,
    with_enough_blocks,
    with_tied_embeddings,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.errors import CheckpointError
from titanlite.optim.fp32_vectors import MASTER

LAYOUTS = {
    "one": Layout(),
    "shard3": Layout(shard=3, accumulate=2),  # 509 rows over 3 ranks
    "shard2tensor2": Layout(shard=2, tensor=2),
    "pipeline2shard2": Layout(pipeline=2, shard=2, microbatch=3, schedule="ZBVZeroBubble"),
    "pipeline2context2": Layout(pipeline=2, context=2, microbatch=3),
}
RECIPE = with_enough_blocks(replace(ADAMW, batch=12, seq_len=24), Layout(pipeline=2))
STOP = 2  # of RECIPE.steps


def stop_under(layout, recipe, folder, dtype=torch.float32) -> dict[str, bytes]:
    state, engine, mesh = start_run(layout, recipe, dtype=dtype, param_dtype=dtype)
    run_until(state, engine, mesh, recipe, Record(), STOP)
    about = {"facts": {"model": {"dim": 32}}, "layout": str(layout)}
    save_and_wait(open_checkpointer(folder, **about), state)
    return bits(state)


def go_on_under(
    layout, recipe, folders, dtype=torch.float32
) -> list[tuple[dict[str, bytes], list[float]]]:
    """For each checkpoint: the state right after loading, and the losses from there on. The first
    is loaded into a fresh run, the others over what the one before has left."""
    answers = []
    state, engine, mesh = start_run(layout, recipe, dtype=dtype, param_dtype=dtype)
    for folder in folders:
        load(open_checkpointer(folder), state)
        loaded, record = bits(state), Record()
        assert state.step == STOP
        run_until(state, engine, mesh, recipe, record, recipe.steps)
        answers.append((loaded, record.losses))
    return answers


def of_all(parts) -> dict[str, bytes]:
    """What the ranks hold, together; where several hold the same, it is the same."""
    whole_of = {name: value for part in parts for name, value in part.items()}
    assert all(whole_of[name] == value for part in parts for name, value in part.items())
    return whole_of


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> dict[str, tuple[str, dict[str, bytes]]]:
    """A checkpoint under every layout: its folder, and the bits that went into it."""
    made = {}
    for name, layout in LAYOUTS.items():
        folder = str(tmp_path_factory.mktemp(name))
        saved = run_on_ranks(stop_under, layout.degrees.ranks, layout, RECIPE, folder)
        made[name] = (folder, of_all(saved))
    return made


@pytest.mark.parametrize("after", LAYOUTS)
def test_every_layout_goes_on_from_every_other(after, stopped):
    layout, right = LAYOUTS[after], one_process(RECIPE).losses
    folders = [folder for folder, _ in stopped.values()]
    by_rank = run_on_ranks(go_on_under, layout.degrees.ranks, layout, RECIPE, folders)
    for (before, (_, saved)), *answers in zip(stopped.items(), *by_rank, strict=True):
        loaded = of_all([bits for bits, _ in answers])
        assert loaded == saved, f"{before} -> {after}: other bits than were saved"
        for _, losses in answers:
            assert losses == pytest.approx(right[STOP:], rel=1e-5), f"{before} -> {after}"


def test_tied_weights_go_on_as_one(tmp_path):
    recipe, folder = with_tied_embeddings(ADAMW), str(tmp_path)
    saved = run_on_ranks(stop_under, 2, Layout(tensor=2), recipe, folder)[0]
    (loaded, losses) = run_on_ranks(go_on_under, 2, Layout(shard=2), recipe, [folder])[0][0]
    assert loaded == saved and losses == pytest.approx(one_process(recipe).losses[STOP:], rel=1e-5)


@pytest.mark.parametrize(
    "recipe", [ADAMW, SGD, replace(ADAMW, state_dtype="bfloat16")], ids=["AdamW", "SGD", "lean"]
)
def test_in_bf16_too_each_vector_goes_on_in_all_its_digits(recipe, tmp_path):
    recipe, folder, low = replace(recipe, batch=4, seq_len=8), str(tmp_path), torch.bfloat16
    saved = of_all(run_on_ranks(stop_under, 2, Layout(shard=2), recipe, folder, low))
    assert len(saved[f"norm.weight.{MASTER}"]) == 2 * len(saved["norm.weight"])
    answers = run_on_ranks(go_on_under, 2, Layout(tensor=2), recipe, [folder], low)
    assert of_all([loaded for ((loaded, _),) in answers]) == saved


def change_of_rates(folder) -> tuple[float, float]:
    state, _, _ = start_run(Layout(), ADAMW)
    state.optimizer.param_groups[0]["weight_decay"] = 0.5  # the job now says so
    load(open_checkpointer(folder), state)
    return state.optimizer.param_groups[0]["weight_decay"], state.optimizer.param_groups[0]["lr"]


def test_the_job_decides_rates_and_decay_not_the_checkpoint(tmp_path):
    run_on_ranks(stop_under, 1, Layout(), ADAMW, str(tmp_path))
    assert run_on_ranks(change_of_rates, 1, str(tmp_path))[0] == (0.5, ADAMW.lr)


def refusals(folder) -> dict[str, str]:
    """What is said to each wish that cannot be met."""
    said = {}

    def note(name, config, facts=None):
        state, _, _ = start_run(Layout(), ADAMW)
        try:
            load(open_checkpointer(folder, **config), state, facts)
        except CheckpointError as error:
            said[name] = str(error)

    note("no such step", {"load_step": 7})
    note("another model", {}, {"model": {"dim": 64}})
    shard = next(Path(folder, f"step-{STOP}").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    note("named but damaged", {"load_step": STOP})
    return said


def test_what_cannot_be_loaded_is_refused_and_never_started_anew(tmp_path):
    run_on_ranks(stop_under, 1, Layout(), ADAMW, str(tmp_path))
    said = run_on_ranks(refusals, 1, str(tmp_path))[0]
    assert (
        "load_step = 7" in said["no such step"]
        and f"Existing steps: {STOP}" in said["no such step"]
    )
    assert "model (dim: 32 saved, 64 now)" in said["another model"]
    assert "bytes, not" in said["named but damaged"]


def crash_between(folder, recipe) -> list[list[int]]:
    """Save three, then crash five times before the commit, then save one more."""
    state, _, _ = start_run(Layout(shard=2), recipe)
    checkpointer = open_checkpointer(folder, keep_latest_k=2)
    for state.counters.step in (1, 2, 3):
        save_and_wait(checkpointer, state)
    if torch.distributed.get_rank() == 0:
        for step in (4, 5, 6, 7, 8):  # what a crash before the commit leaves behind
            litter = Path(folder, f"step-{step}")
            litter.mkdir()
            (litter / "unfinished").touch()
            (litter / "__0_0.distcp").write_bytes(b"half")
    torch.distributed.barrier()
    before, went_on_from = checkpointer.steps(), load(checkpointer, state)
    assert went_on_from == "step-3"
    state.counters.step = 4
    save_and_wait(checkpointer, state)
    return [before, checkpointer.steps()]


def set_aside_later_steps(folder, recipe) -> tuple[list[int], list[str]]:
    """Save three steps, go back to the first, and save one more, keeping two."""
    state, _, _ = start_run(Layout(), recipe)
    for state.counters.step in (1, 2, 3):
        save_and_wait(open_checkpointer(folder), state)
    checkpointer = open_checkpointer(folder, keep_latest_k=2, load_step=1)
    assert load(checkpointer, state) == "step-1"
    state.counters.step = 2
    save_and_wait(checkpointer, state)
    return checkpointer.steps(), names_in(folder)


def names_in(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_a_run_that_turns_back_neither_loses_its_future_nor_is_overtaken_by_it(tmp_path):
    steps, names = run_on_ranks(set_aside_later_steps, 1, str(tmp_path), ADAMW)[0]
    assert steps == [1, 2]
    assert names == ["step-1", "step-2", "step-2.aside-1", "step-3.aside-1"]


def restart(folder, recipe, wishes) -> list[list[str]]:
    """From where each of some starts goes on that wishes for a step, or None where it only loads;
    each that saves takes two steps and saves after both."""
    state, _, _ = start_run(Layout(), recipe)
    for state.counters.step in (1, 2, 3):
        save_and_wait(open_checkpointer(folder), state)
    starts = []
    for wish in wishes:
        options = {"load_only": True, "load_step": 4} if wish is None else {"load_step": wish}
        checkpointer = open_checkpointer(folder, keep_latest_k=3, keep_aside_k=2, **options)
        starts.append(load(checkpointer, state))
        if wish is not None:
            first = state.step + 1
            for state.counters.step in (first, first + 1):
                save_and_wait(checkpointer, state)
    return [starts, names_in(folder)]


def test_a_step_to_go_back_to_is_gone_back_to_once(tmp_path):
    """The same command three times must not throw away three times what was trained."""
    wishes = [1, 1, None, 1, -1, 7]
    starts, names = run_on_ranks(restart, 1, str(tmp_path), ADAMW, wishes)[0]
    assert starts == ["step-1", "step-3", "step-4", "step-5", "step-7", "step-7"]
    kept, aside = ["step-7", "step-8", "step-9"], ["step-8.aside-1", "step-9.aside-1"]
    assert sorted(names) == sorted(kept + aside), "no more than keep_aside_k aside"


def test_retention_counts_only_whole_checkpoints(tmp_path):
    before, after = run_on_ranks(crash_between, 2, str(tmp_path), ADAMW)[0]
    assert before == [2, 3] and after == [3, 4]
