"""A checkpoint loads exactly what was saved, or is refused, and the previous one is used."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import pickle
import resource
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saving import bits, load, open_checkpointer, save, save_and_wait
from tests.distributed.oracle import ADAMW, SGD, Layout, Record, full_value, run_until, start_run
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import recipe_of
from titanlite.checkpoint import SaveRequest, list_steps, read_checkpoint_manifest
from titanlite.checkpoint.checkpointer import _without_excluded
from titanlite.checkpoint.job_properties import check_job_properties
from titanlite.checkpoint.manifest import FORMAT, manifest_hash
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.checkpoint.tensor_writer import _prepare_folder
from titanlite.errors import CheckpointError
from titanlite.log import logger
from titanlite.runtime.lease import LEASE_FILE, acquire_lease
from titanlite.storage import StorageFolder
from titanlite.training.state import Counters


def trained(layout: Layout, steps: int = 1):
    """A state after training, so that it has optimizer state."""
    state, engine, mesh = start_run(layout, ADAMW)
    run_until(state, engine, mesh, ADAMW, Record(), steps)
    return state


@torch.no_grad()
def modify(state) -> None:
    """Change every tensor of a state in place."""
    for parameter in state.model.parameters():
        parameter.add_(1.0)
        for value in state.optimizer.state[parameter].values():
            value.add_(1.0)


def manifest_exists_at_commit(folder, mode) -> list[bool]:
    """Whether the manifest existed at each call of `before_commit`, and at the end."""
    state, existed = trained(Layout()), []
    checkpointer, manifest = (
        open_checkpointer(folder, async_mode=mode),
        folder / "step-1/manifest.json",
    )

    def note() -> None:
        existed.append(manifest.exists())

    request = SaveRequest(1, state.model, state.optimizer, state.progress(), before_commit=note)
    checkpointer.save(request)
    assert not checkpointer.wait().problem
    return [*existed, manifest.exists()]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_before_commit_is_called_before_the_manifest_is_written(tmp_path, mode):
    assert run_on_ranks(manifest_exists_at_commit, 1, tmp_path, mode) == [[False, True]]


def test_names_are_synced_before_the_manifest_is_named(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def record_fsync(descriptor) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_replace(*names) -> None:
        done.append("named")
        replace(*names)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    folder = StorageFolder(tmp_path) / "step-1"
    folder.create_folder()
    folder.write_atomically("manifest.json", b"{}")
    written = ["step-1", f"manifest.json.{os.getpid()}.tmp", "named", "step-1", tmp_path.name]
    assert done[-len(written) :] == written


def save_with_a_bug(folder, mode) -> tuple[str, str]:
    """(problem of a save that fails by a bug, what is logged)."""
    state, checkpointer = trained(Layout()), open_checkpointer(folder, async_mode=mode)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logger.addHandler(handler)

    def fail() -> None:
        raise AttributeError("an injected bug")

    request = SaveRequest(1, state.model, state.optimizer, state.progress(), before_commit=fail)
    checkpointer.save(request)
    return checkpointer.wait().problem, log.getvalue()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_bug_in_a_save_is_logged_with_its_traceback_and_the_run_continues(tmp_path, mode):
    [(problem, logged)] = run_on_ranks(save_with_a_bug, 1, tmp_path, mode)
    assert "AttributeError: an injected bug" in problem
    assert "Traceback" in logged and "in fail" in logged


# --- asynchronous --------------------------------------------------------------------------------


def modify_after_save(folder, mode) -> list[tuple[bool, bool]]:
    """Save three times through the same staging memory, and modify the state after each save.

    Returns for each whether a load restores the saved bytes, and whether `save` was asynchronous.
    """
    state, results = trained(Layout(shard=2)), []
    checkpointer = open_checkpointer(folder, async_mode=mode)
    for state.counters.step in (1, 2, 3):
        before = bits(state)
        save(checkpointer, state)
        asynchronous = checkpointer.writing
        modify(state)
        after, result = bits(state), checkpointer.wait()
        assert not result.problem, result.problem
        load(open_checkpointer(folder), state)
        assert before != after
        results.append((bits(state) == before, asynchronous))
        modify(state)
    return results


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_changes_after_save_returns_are_not_saved(mode, tmp_path):
    for results in run_on_ranks(modify_after_save, 2, str(tmp_path), mode):
        assert [restored for restored, _ in results] == [True] * 3
        assert [asynchronous for _, asynchronous in results] == [mode != "disabled"] * 3


def save_on_a_full_disk(folder, mode, failing_ranks) -> list:
    """Two saves that exceed a limit on file sizes, then one without the limit."""
    state = trained(Layout(shard=2))
    checkpointer = open_checkpointer(folder, async_mode=mode)
    save_and_wait(checkpointer, state)
    problems, unlimited = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for state.counters.step in (2, 3):
        if dist.get_rank() in failing_ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))
        save(checkpointer, state)
        problems.append(checkpointer.wait().problem)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        dist.barrier()
        names = sorted(os.listdir(folder))  # the failed save is removed
        assert checkpointer.due(state.step, ends_run=True)
        assert checkpointer.find().folder.name == "step-1"
    failures, state.counters.step = checkpointer.failures, 4
    save_and_wait(checkpointer, state)
    return [problems, failures, names, checkpointer.steps()]


@pytest.mark.parametrize(
    "mode, failing", [("disabled", (0, 1)), ("async", (0, 1)), ("async", (1,))]
)
def test_a_full_disk_fails_a_save_but_not_the_run(mode, failing, tmp_path):
    for problems, failures, names, steps in run_on_ranks(
        save_on_a_full_disk, 2, str(tmp_path), mode, failing
    ):
        assert all(f"rank {failing[0]}" in text and "too large" in text for text in problems)
        assert failures == 2 and names == ["step-1"] and steps == [1, 4]


def test_a_save_larger_than_the_free_disk_space_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="MB are free"):
        _prepare_folder(StorageFolder(tmp_path / "step-1"), 1 << 60)


def lose_the_lease(folder, mode, when) -> list:
    """Save steps 1 and 2, keeping one; another job takes the lease at check number `when`.

    Returns the problem of the last save, the step folders, and how the lease was lost.
    """
    state, checks = trained(Layout(shard=2)), []
    # No heartbeat within the test: the loss is detected only by reading the lease.
    lease = acquire_lease(Path(folder), heartbeat_seconds=1000) if dist.get_rank() == 0 else None

    def check_lease() -> int:
        checks.append(1)
        if len(checks) == when:
            Path(folder, LEASE_FILE).write_text("{}")
        lease.check()
        return lease.number

    checkpointer = open_checkpointer(
        folder, async_mode=mode, keep_latest_k=1, check_lease=check_lease
    )
    for state.counters.step in (1, 2):
        save(checkpointer, state)
        problem = checkpointer.wait().problem
    return [
        problem,
        sorted(path.name for path in Path(folder).glob("step-*")),
        lease and lease.lost,
    ]


# A save checks the lease before it touches its folder, before its commit and before each removal:
# checks 1 and 2 are of step 1, checks 3 to 5 of step 2, which replaces it.
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    "when, remaining, committed",
    [(3, ["step-1"], False), (4, ["step-1", "step-2"], False), (5, ["step-1", "step-2"], True)],
)
def test_a_job_that_lost_its_lease_neither_commits_nor_removes(
    mode, when, remaining, committed, tmp_path
):
    first, second = run_on_ranks(lose_the_lease, 2, str(tmp_path), mode, when)
    assert first[:2] == second[:2] and "has taken it from this job" in first[2]
    problem, names, _ = first
    assert names == remaining and (tmp_path / "step-2" / "manifest.json").exists() == committed
    assert bool(problem) != committed and (committed or "has taken it from this job" in problem)
    assert read_checkpoint_manifest(StorageFolder(tmp_path / "step-1")).lease == 1


# --- damage --------------------------------------------------------------------------------------


def largest_shard(step: Path) -> Path:
    return max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)


def change(file: Path, replace) -> None:
    """Replace 4096 bytes in the middle of the largest tensor of a shard file."""
    metadata = pickle.loads(file.with_name(".metadata").read_bytes())
    infos = [i for i in metadata.storage_data.values() if i.relative_path == file.name]
    tensor = max(infos, key=lambda info: info.length)
    start, content = tensor.offset + tensor.length // 2, bytearray(file.read_bytes())
    content[start : start + 4096] = replace(content[start : start + 4096])
    file.write_bytes(content)


def flip_one_bit(part: bytes) -> bytes:
    return bytes([part[0] ^ 4]) + part[1:]


def empty_manifest(step: Path) -> None:
    """Write a manifest with a correct hash but without any other key."""
    body = {"format": FORMAT}
    (step / "manifest.json").write_text(json.dumps({**body, "hash": manifest_hash(body)}))


def edit_manifest(step: Path) -> None:
    file = step / "manifest.json"
    body = json.loads(file.read_text())
    body["progress"]["position"] += 1
    file.write_text(json.dumps(body))


DAMAGE = {
    "a truncated shard": lambda step: os.truncate(largest_shard(step), 1000),
    "an empty shard": lambda step: os.truncate(largest_shard(step), 0),
    "a missing shard": lambda step: largest_shard(step).unlink(),
    "a flipped bit": lambda step: change(largest_shard(step), flip_one_bit),
    "a zeroed page": lambda step: change(largest_shard(step), lambda part: bytes(len(part))),
    "a missing manifest": lambda step: (step / "manifest.json").unlink(),
    "a torn manifest": lambda step: os.truncate(step / "manifest.json", 700),
    "an edited manifest": edit_manifest,
    "a manifest that is none": empty_manifest,
    "a missing .metadata": lambda step: (step / ".metadata").unlink(),
    "missing chunks": lambda step: (step / "chunks.json").unlink(),
}


def save_two_steps(folder) -> None:
    state = trained(Layout(shard=2))
    properties = {"debug.seed": 7, "data.sources": {"code": "weight 1"}}
    checkpointer = open_checkpointer(folder, properties=properties, layout="shard 2")
    for state.counters.step in (1, 2):
        state.counters.position = state.step * 100
        save_and_wait(checkpointer, state)


def load_damaged(folders) -> list[tuple]:
    """Resume from folders whose newest checkpoint is damaged.

    Returns the checkpoint that is used, its position, why the other is refused, the names in the
    folder, and the error if the damaged checkpoint is the only one.
    """
    results = []
    state, _, _ = start_run(Layout(shard=2), ADAMW)
    for folder in folders:
        checkpointer = open_checkpointer(folder)
        found = checkpointer.find()
        used = load(checkpointer, state)
        names = sorted(os.listdir(folder))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder, "step-1"))
            Path(folder, "step-2.aside-1").rename(Path(folder, "step-2"))
        dist.barrier()
        try:
            error_if_only_one = f"no error: {open_checkpointer(folder).find()}"
        except CheckpointError as error:
            error_if_only_one = str(error)
        results.append((used, state.position, found.refused, names, error_if_only_one))
    return results


def test_every_damage_is_reported_and_the_previous_checkpoint_is_used(tmp_path):
    run_on_ranks(save_two_steps, 2, str(tmp_path / "whole"))
    folders = {}
    for damage, apply_damage in DAMAGE.items():
        folders[damage] = tmp_path / damage
        shutil.copytree(tmp_path / "whole", folders[damage])
        apply_damage(folders[damage] / "step-2")
    for results in run_on_ranks(load_damaged, 2, [str(folder) for folder in folders.values()]):
        for damage, result in zip(folders, results, strict=True):
            used, position, refused, names, error_if_only_one = result
            assert (used, position) == ("step-1", 100), damage
            assert len(refused) == 1 and "step-2: " in refused[0], damage
            assert names == ["step-1", "step-2.aside-1"], f"{damage}: the damaged one is kept"
            assert "no valid checkpoint found" in error_if_only_one, damage
            assert "step-2: " in error_if_only_one, damage


def find_step_2(folder) -> str:
    try:
        return f"no error: {open_checkpointer(folder, load_step=2).find()}"
    except CheckpointError as error:
        return str(error)


def test_a_damaged_load_step_does_not_hide_that_other_steps_exist(tmp_path):
    run_on_ranks(save_two_steps, 2, str(tmp_path))
    DAMAGE["a missing shard"](tmp_path / "step-2")
    error = run_on_ranks(find_step_2, 1, str(tmp_path))[0]
    assert "checkpoint.load_step is not valid" in error and "step-2: is damaged" in error
    assert "use another checkpoint.load_step" in error and "no valid checkpoint" not in error


def load_with_each_verify(folder) -> list[str]:
    state, _, _ = start_run(Layout(), ADAMW)
    return [load(open_checkpointer(folder, verify=how), state) for how in ("off", "sizes", "full")]


def test_each_verify_setting_detects_the_damage_it_checks_for(tmp_path):
    run_on_ranks(save_two_steps, 2, str(tmp_path / "flipped"))
    shutil.copytree(tmp_path / "flipped", tmp_path / "longer")
    DAMAGE["a flipped bit"](tmp_path / "flipped" / "step-2")
    with largest_shard(tmp_path / "longer" / "step-2").open("ab") as shard:
        shard.write(b"more")
    used = [
        run_on_ranks(load_with_each_verify, 1, str(tmp_path / damage))[0]
        for damage in ("flipped", "longer")
    ]
    assert used == [["step-2", "step-2", "step-1"], ["step-2", "step-1", "step-1"]]


# --- finding -------------------------------------------------------------------------------------


def save_over(folder) -> str:
    """Save step 1 twice; before the second save, add a shard file of a layout with more ranks."""
    state = trained(Layout())
    save_and_wait(open_checkpointer(folder), state)
    Path(folder, "step-1", "__7_0.distcp").write_bytes(b"of before")
    save_and_wait(open_checkpointer(folder), state)
    return load(open_checkpointer(folder), state)


def test_saving_a_step_again_removes_all_files_of_the_previous_save(tmp_path):
    assert run_on_ranks(save_over, 1, str(tmp_path)) == ["step-1"]
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "chunks.json", "manifest.json"}


def find_in(folder, config) -> str:
    found = open_checkpointer(folder, **config).find()
    return "nothing" if found is None else found.folder.name


def test_an_interrupted_first_save_is_removed_and_the_run_starts(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "unfinished").touch()
    for removed in ("step-2.removed", "step-2.removed.removed", "step-1.aside-1.removed"):
        (tmp_path / removed).mkdir()  # a removal that was interrupted, perhaps twice
    assert run_on_ranks(find_in, 1, str(tmp_path), {}) == ["nothing"]
    assert list(tmp_path.iterdir()) == []


def test_an_empty_checkpoint_folder_does_not_hide_the_initial_checkpoint(tmp_path):
    run_on_ranks(save_two_steps, 2, str(tmp_path / "other"))
    (tmp_path / "own").mkdir()
    config = {"initial_load_path": str(tmp_path / "other" / "step-2")}
    assert run_on_ranks(find_in, 1, str(tmp_path / "own"), config) == ["step-2"]


def start_from_another_run(folder) -> bool:
    """Whether the last save is due in a run whose last step is that of its initial checkpoint."""
    state = trained(Layout())
    save_and_wait(open_checkpointer(Path(folder, "other")), state)
    initial = str(Path(folder, "other", f"step-{state.step}"))
    own = open_checkpointer(Path(folder, "own"), initial_load_path=initial)
    assert own.load(own.find(), state.model, state.optimizer, {}) is None
    return own.due(state.step, ends_run=True)


def resume_without_counts(folder) -> tuple[int, list[int], str]:
    """The step at which a run goes on, its checkpoints, and the next start's."""
    state = trained(Layout())
    own = open_checkpointer(folder, exclude_from_loading=["train_state"])
    save_and_wait(own, state)
    load(own, state)
    own.set_aside_later_steps(state.step)
    return state.step, own.steps(), find_in(folder, {})


def test_a_run_does_not_set_its_own_checkpoints_aside(tmp_path):
    assert run_on_ranks(resume_without_counts, 1, str(tmp_path)) == [(1, [1], "step-1")]


def test_a_run_that_starts_from_another_one_saves_the_step_of_the_same_number(tmp_path):
    assert run_on_ranks(start_from_another_run, 1, str(tmp_path)) == [True]


def test_load_only_changes_nothing_in_the_folder(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "unfinished").touch()
    assert run_on_ranks(find_in, 1, str(tmp_path), {"load_only": True}) == ["nothing"]
    assert (tmp_path / "step-3" / "unfinished").exists()


# --- parts ---------------------------------------------------------------------------------------


def save_model_only(folder, dtype) -> tuple[dict, int]:
    state = trained(Layout(shard=2), 2)
    config = {"last_save_model_only": True, "export_dtype": dtype}
    checkpointer = open_checkpointer(folder, **config)
    save_and_wait(checkpointer, state, final=True)
    return {
        name: full_value(p).to(getattr(torch, dtype)) for name, p in state.model.named_parameters()
    }


def load_parts(folder) -> list:
    """Resume from a model-only checkpoint: as it is, without optimizer state, and a finished run.

    Returns for each the step, the weights and the number of parameters with optimizer state; or the
    error.
    """
    results = []
    resuming = math.inf
    for config, steps in (
        ({}, resuming),
        ({"exclude_from_loading": ["optimizer"]}, resuming),
        ({}, 1),  # training.steps, which may be less now
    ):
        state, _, _ = start_run(Layout(), ADAMW)
        checkpointer = open_checkpointer(folder, **config)
        try:
            progress = checkpointer.load(
                checkpointer.find(), state.model, state.optimizer, {}, finished_at=steps
            )
            weights = {name: full_value(p) for name, p in state.model.named_parameters()}
            results.append((progress["step"], weights, len(state.optimizer.state)))
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_from_a_model_only_save_is_refused_with_the_alternatives(dtype, tmp_path):
    saved = run_on_ranks(save_model_only, 2, str(tmp_path), dtype)[0]
    tensors = read_checkpoint_manifest(StorageFolder(tmp_path / "step-2")).tensors
    assert {record.dtype for record in tensors.values()} == {dtype}
    assert set(tensors) == {f"model.{name}" for name in saved}
    refusal, without, finished = run_on_ranks(load_parts, 1, str(tmp_path))[0]
    assert "has only weights" in refusal and "exclude_from_loading" in refusal
    for step, weights, states in (without, finished):
        assert step == 2 and states == 0
        assert all(torch.equal(weights[name], saved[name].float()) for name in saved)


def save_model_of_experts(folder) -> None:
    state, _, _ = start_run(Layout(), recipe_of("deepseek_v3"))
    config = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    save_and_wait(open_checkpointer(folder, **config), state, final=True)


def test_a_model_only_save_keeps_selection_biases_in_float32(tmp_path):
    """Rounded, they would select other experts."""
    run_on_ranks(save_model_of_experts, 1, str(tmp_path))
    tensors = read_checkpoint_manifest(StorageFolder(tmp_path / "step-0")).tensors
    wide = [name for name, record in tensors.items() if record.dtype != "bfloat16"]
    assert wide == ["model.layers.1.moe.router.expert_bias"]
    assert tensors[wide[0]].dtype == "float32"


def resume_without_optimizer_state(folder) -> tuple[bool, int]:
    """(weights are equal, step) of a run of SGD without momentum that is resumed."""
    state, engine, mesh = start_run(Layout(), SGD)
    run_until(state, engine, mesh, SGD, Record(), 2)
    assert not save_and_wait(open_checkpointer(folder), state).problem
    resumed, _, _ = start_run(Layout(), SGD)
    load(open_checkpointer(folder), resumed)
    return bits(resumed) == bits(state), resumed.step


def test_an_optimizer_without_state_resumes(tmp_path):
    assert run_on_ranks(resume_without_optimizer_state, 1, tmp_path) == [(True, 2)]


def roll_back_in(folder) -> tuple:
    """Save steps 0 to 4, damage some; returns what there is to roll back to, and the result."""
    state = trained(Layout())
    checkpointer = open_checkpointer(folder, keep_latest_k=0, exclude_from_loading=["optimizer"])
    for state.counters.step in (0, 1, 2, 3, 4):
        state.counters.position = state.step * 100
        save_and_wait(checkpointer, state)
    expected = bits(state)
    DAMAGE["a flipped bit"](Path(folder, "step-2"))
    Path(folder, "step-0", "manifest.json").unlink()
    model_only = open_checkpointer(folder, keep_latest_k=0, last_save_model_only=True)
    state.counters.step, state.counters.position = 5, 500
    save_and_wait(model_only, state, final=True)
    # as after a kill between a save and the removal of what it makes surplus
    kept = open_checkpointer(folder, keep_latest_k=4, exclude_from_loading=["optimizer"])
    modify(state)
    found, refused = kept.find_first_valid([2, 3])
    progress = kept.load(found, state.model, state.optimizer, {}, completely=True)
    missing, _ = kept.find_first_valid([2, 7])
    positions, damaged = kept.positions(with_optimizer=True)
    weights, _ = kept.positions()
    problems = damaged + refused
    is_equal = bits(state) == expected
    return positions, set(weights), problems, found.step, progress["position"], is_equal, missing


def test_a_roll_back_loads_the_optimizer_too_and_finds_what_retention_keeps(tmp_path):
    """What is found must not depend on whether a kill has prevented a removal."""
    positions, weights, problems, *loaded = run_on_ranks(roll_back_in, 1, str(tmp_path))[0]
    assert positions == {2: 200, 3: 300, 4: 400} and weights == {2, 3, 4, 5}
    assert loaded == [3, 300, True, None]
    assert [f"step-{step}: is" in text for step, text in zip((0, 2), problems, strict=True)] == [
        True,
        True,
    ], problems


def load_without_each_part(folder) -> list[tuple]:
    results = []
    for parts in (["dataloader"], ["train_state"], ["optimizer"]):
        state, _, _ = start_run(Layout(), ADAMW)
        load(open_checkpointer(folder, load_only=True, exclude_from_loading=parts), state)
        results.append((state.step, state.position, len(state.optimizer.state) > 0))
    return results


def test_exclude_from_loading_resets_only_the_parts_it_names(tmp_path):
    run_on_ranks(save_two_steps, 2, str(tmp_path))
    results = run_on_ranks(load_without_each_part, 1, str(tmp_path))[0]
    assert results == [(2, 0, True), (0, 200, True), (2, 200, False)]


def test_the_data_start_from_scratch_after_a_roll_back_that_skipped_samples():
    progress = {"step": 9, "position": 90, "tokens": 900, "gaps": [[12, 36]]}
    counters = Counters()
    counters.restore(_without_excluded({**progress, "lanes": {"text": {}}}, ["dataloader"]))
    assert (counters.step, counters.position, counters.samples, counters.gaps) == (9, 0, 0, ())


def load_with_other_properties(folder, allowed) -> list[str]:
    """The checkpoint that is loaded, or the error, for each value of allow_changes."""
    properties = {"data.sources": {"code": "weight 2"}, "model": {"dim": 32}, "debug.seed": 1}
    results = []
    for allow_changes in allowed:
        state, _, _ = start_run(Layout(), ADAMW)
        try:
            checkpointer = open_checkpointer(folder, allow_changes=allow_changes)
            results.append(load(checkpointer, state, properties))
        except CheckpointError as error:
            results.append(str(error))
    return results


def save_with_properties(folder) -> None:
    properties = {"data.sources": {"code": "weight 1"}, "model": {"dim": 32}, "debug.seed": 0}
    save_and_wait(open_checkpointer(folder, properties=properties), trained(Layout()))


def test_a_changed_job_property_is_refused_unless_it_is_allowed_by_name(tmp_path):
    run_on_ranks(save_with_properties, 1, str(tmp_path))
    allowed = [[], ["debug.seed"], ["debug.seed", "data.sources"]]
    none_allowed, one_allowed, both_allowed = run_on_ranks(
        load_with_other_properties, 1, str(tmp_path), allowed
    )[0]
    assert "data.sources (code: weight 1 saved, weight 2 now)" in none_allowed
    assert "debug.seed (0 saved, 1 now)" in none_allowed and "model (" not in none_allowed
    assert 'allow_changes = ["data.sources", "debug.seed"]' in none_allowed
    assert "debug.seed (" not in one_allowed and "data.sources (" in one_allowed
    assert both_allowed == "step-1"
    with pytest.raises(
        CheckpointError, match=r"not contain optimizer\.state\.x.*Set \[optimizer\]"
    ):
        state = {"optimizer": {"state.x": torch.empty(1)}}
        read_tensors(StorageFolder(tmp_path) / "step-1", state, no_dist=True)


def property_error(saved: dict, current: dict, model_only: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_job_properties(
            StorageFolder("step-1"), saved, current, model_only=model_only, allowed=[]
        )
    return str(caught.value)


def test_the_advice_about_a_changed_property_is_true():
    saved, current = {"model": {"dim": 32}}, {"model": {"dim": 64}}
    assert "initial_load_path" in property_error(saved, current)
    assert "initial_load_path" not in property_error(saved, current, model_only=True)
    dropped = property_error({"model": {"mtp_layers": 1}}, {"model": {"mtp_layers": 0}})
    assert "initial_load_in_hf" in dropped and "allow_changes" not in dropped


# --- other file systems --------------------------------------------------------------------------


def save_damage_resume(url) -> list:
    """Save three steps, keeping two; damage the newest; resume."""
    state = trained(Layout())
    checkpointer = open_checkpointer(url, async_mode="async", keep_latest_k=2)
    for state.counters.step in (1, 2, 3):
        save_and_wait(checkpointer, state)
    before, folder = bits(state), StorageFolder(url) / "step-3"
    shard = next(name for name in folder.sizes() if name.endswith(".distcp"))
    folder.write_atomically(shard, flip_one_bit(folder.read(shard)))
    modify(state)
    steps = checkpointer.steps()
    used, names = load(checkpointer, state), StorageFolder(url).folders()
    return [steps, used, bits(state) == before, names, list_steps(StorageFolder(url)).aside]


@pytest.mark.parametrize(
    "url, aside", [("memory://bucket/run/checkpoint", ""), ("file://{}/checkpoint", ".aside-1")]
)
def test_checkpoints_can_be_saved_to_any_url_of_fsspec(url, aside, tmp_path):
    result = run_on_ranks(save_damage_resume, 1, url.format(tmp_path))[0]
    assert result == [[2, 3], "step-2", True, ["step-2", f"step-3{aside}"], [f"step-3{aside}"]]


def test_a_manifest_lists_every_tensor_with_the_hash_of_its_content(tmp_path):
    run_on_ranks(save_two_steps, 2, str(tmp_path))
    first, second = (
        read_checkpoint_manifest(StorageFolder(tmp_path / f"step-{n}")) for n in (1, 2)
    )
    assert first.tensors == second.tensors, "the same tensors"
    assert first.tensors["model.tok_embeddings.weight"].shape == [509, 32]
    assert first.has("optimizer") and first.bytes > 0
    assert len({record.hash for record in first.tensors.values()}) > len(first.tensors) / 2
    assert asdict(first)["files"].keys() >= {".metadata", "__0_0.distcp", "__1_0.distcp"}


def resume_linked(folder, outside) -> tuple:
    """Save two steps, move them to another disk and link them; resume; save a third, keeping two.

    Returns the checkpoint that was used, and the names in the folder.
    """
    state = trained(Layout())
    checkpointer = open_checkpointer(folder, keep_latest_k=2)
    for state.counters.step in (1, 2):
        save_and_wait(checkpointer, state)
        (folder / f"step-{state.step}").rename(outside / f"step-{state.step}")
        (folder / f"step-{state.step}").symlink_to(outside / f"step-{state.step}")
    used = load(checkpointer, state)
    state.counters.step = 3
    save_and_wait(checkpointer, state)
    return used, sorted(path.name for path in folder.glob("step-*"))


def test_a_checkpoint_linked_from_another_disk_is_used_and_only_the_link_is_deleted(tmp_path):
    folder, outside = tmp_path / "checkpoint", tmp_path / "outside"
    outside.mkdir()
    [(used, names)] = run_on_ranks(resume_linked, 1, folder, outside)
    assert (used, names) == ("step-2", ["step-2", "step-3"])
    assert (outside / "step-1" / "manifest.json").exists()  # only the link was removed
