"""What is saved is what is loaded, or it is refused by name and the one before is used."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saving import bits, load, open_checkpointer, save, save_whole
from tests.distributed.oracle import ADAMW, Layout, Record, go_on, start, whole
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import list_steps, read_checkpoint_manifest
from titanlite.checkpoint.manifest import FORMAT, manifest_hash
from titanlite.checkpoint.tensor_writer import _prepare_folder
from titanlite.errors import CheckpointError
from titanlite.runtime.lease import LEASE_FILE, acquire_lease
from titanlite.storage import StorageFolder


def trained(layout: Layout, steps: int = 1):
    """A state that has moments."""
    state, engine, mesh = start(layout, ADAMW)
    go_on(state, engine, mesh, ADAMW, Record(), steps)
    return state


@torch.no_grad()
def spoil(state) -> None:
    """Change every tensor of a state in place."""
    for parameter in state.model.parameters():
        parameter.add_(1.0)
        for value in state.optimizer.state[parameter].values():
            value.add_(1.0)


def order_of_commit(folder, mode) -> list[bool]:
    """Whether there was a manifest each time `before_commit` was called, and at the end."""
    state, seen = trained(Layout()), []
    checkpointer, manifest = (
        open_checkpointer(folder, async_mode=mode),
        folder / "step-1/manifest.json",
    )
    look = {"before_commit": lambda: seen.append(manifest.exists())}
    checkpointer.save(1, state.model, state.optimizer, progress=state.progress(), **look)
    assert not checkpointer.wait().problem
    return [*seen, manifest.exists()]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_must_not_be_older_than_a_checkpoint_is_written_before_its_manifest(tmp_path, mode):
    assert run_on_ranks(order_of_commit, 1, tmp_path, mode) == [[False, True]]


# --- asynchronous --------------------------------------------------------------------------------


def save_then_spoil(folder, mode) -> list[tuple[bool, bool]]:
    """For three saves into the same staging memory: whether the old bytes came back, and whether
    `save` returned before they were written."""
    state, answers = trained(Layout(shard=2)), []
    checkpointer = open_checkpointer(folder, async_mode=mode)
    for state.step in (1, 2, 3):
        before = bits(state)
        save(checkpointer, state)
        aside = checkpointer.writing
        spoil(state)
        after, saved = bits(state), checkpointer.wait()
        assert not saved.problem, saved.problem
        load(open_checkpointer(folder), state)
        assert before != after
        answers.append((bits(state) == before, aside))
        spoil(state)
    return answers


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_what_changes_after_save_returned_does_not_reach_the_disk(mode, tmp_path):
    for answers in run_on_ranks(save_then_spoil, 2, str(tmp_path), mode):
        assert [right for right, _ in answers] == [True] * 3
        assert [aside for _, aside in answers] == [mode != "disabled"] * 3


def full_disk(folder, mode, ranks_that_fail) -> list:
    """Two saves that do not fit on a disk (a quota), then one that does."""
    state = trained(Layout(shard=2))
    checkpointer = open_checkpointer(folder, async_mode=mode)
    save_whole(checkpointer, state)
    problems, unlimited = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for state.step in (2, 3):
        if dist.get_rank() in ranks_that_fail:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, unlimited[1]))
        save(checkpointer, state)
        problems.append(checkpointer.wait().problem)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        dist.barrier()
        there = sorted(os.listdir(folder))  # what was written is gone, to make room
        assert checkpointer.find().folder.name == "step-1"
    failures, state.step = checkpointer.failures, 4
    save_whole(checkpointer, state)
    return [problems, failures, there, checkpointer.steps()]


@pytest.mark.parametrize(
    "mode, failing", [("disabled", (0, 1)), ("async", (0, 1)), ("async", (1,))]
)
def test_a_disk_that_is_full_costs_a_checkpoint_and_not_the_run(mode, failing, tmp_path):
    for problems, failures, there, steps in run_on_ranks(
        full_disk, 2, str(tmp_path), mode, failing
    ):
        assert all(f"rank {failing[0]}" in text and "too large" in text for text in problems)
        assert failures == 2 and there == ["step-1"] and steps == [1, 4]


def test_a_save_that_cannot_fit_is_not_begun(tmp_path):
    with pytest.raises(CheckpointError, match="MB are free"):
        _prepare_folder(StorageFolder(tmp_path / "step-1"), 1 << 60)


def lose_the_lease(folder, mode, when) -> list:
    """Save with a lease that another job takes at the `when`th check of a save; then that one's
    step is saved, and the rest of the folder must still be there."""
    state, checks = trained(Layout(shard=2)), []
    # No heartbeat comes in time: only what reads the lease itself can know.
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
    for state.step in (1, 2):
        save(checkpointer, state)
        problem = checkpointer.wait().problem
    return [
        problem,
        sorted(path.name for path in Path(folder).glob("step-*")),
        lease and lease.lost,
    ]


# Each save is checked before its folder is touched, before its commit, and before each removal:
# two checks of step 1, then those of step 2, which is to replace it.
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(
    "when, left, committed",
    [(3, ["step-1"], False), (4, ["step-1", "step-2"], False), (5, ["step-1", "step-2"], True)],
)
def test_who_lost_the_lease_neither_commits_nor_removes(mode, when, left, committed, tmp_path):
    first, second = run_on_ranks(lose_the_lease, 2, str(tmp_path), mode, when)
    assert first[:2] == second[:2] and "has taken it from this job" in first[2]
    problem, names, _ = first
    assert names == left and (tmp_path / "step-2" / "manifest.json").exists() == committed
    assert bool(problem) != committed and (committed or "has taken it from this job" in problem)
    assert read_checkpoint_manifest(StorageFolder(tmp_path / "step-1")).lease == 1


# --- damage --------------------------------------------------------------------------------------


def largest(step: Path) -> Path:
    return max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)


def change(file: Path, replace) -> None:
    """Replace a page in the middle of the largest tensor."""
    metadata = pickle.loads(file.with_name(".metadata").read_bytes())
    own = [i for i in metadata.storage_data.values() if i.relative_path == file.name]
    tensor = max(own, key=lambda info: info.length)
    start, content = tensor.offset + tensor.length // 2, bytearray(file.read_bytes())
    content[start : start + 4096] = replace(content[start : start + 4096])
    file.write_bytes(content)


def one_bit(part: bytes) -> bytes:
    return bytes([part[0] ^ 4]) + part[1:]


def empty_manifest(step: Path) -> None:
    """One that is signed, and says nothing."""
    body = {"format": FORMAT}
    (step / "manifest.json").write_text(json.dumps({**body, "hash": manifest_hash(body)}))


def edit_manifest(step: Path) -> None:
    file = step / "manifest.json"
    body = json.loads(file.read_text())
    body["progress"]["position"] += 1
    file.write_text(json.dumps(body))


DAMAGE = {
    "a truncated shard": lambda step: os.truncate(largest(step), 1000),
    "an empty shard": lambda step: os.truncate(largest(step), 0),
    "a missing shard": lambda step: largest(step).unlink(),
    "a flipped bit": lambda step: change(largest(step), one_bit),
    "a zeroed page": lambda step: change(largest(step), lambda part: bytes(len(part))),
    "a missing manifest": lambda step: (step / "manifest.json").unlink(),
    "a torn manifest": lambda step: os.truncate(step / "manifest.json", 700),
    "an edited manifest": edit_manifest,
    "a manifest that is none": empty_manifest,
    "a missing .metadata": lambda step: (step / ".metadata").unlink(),
    "missing chunks": lambda step: (step / "chunks.json").unlink(),
}


def save_two(folder) -> None:
    state = trained(Layout(shard=2))
    checkpointer = open_checkpointer(folder)
    for state.step in (1, 2):
        state.position = state.step * 100
        save_whole(checkpointer, state)


def what_is_found(folders) -> list[tuple]:
    """Of each folder with a damaged newest checkpoint: what is used, what is said; then with no
    other one left: what is said."""
    answers = []
    state, _, _ = start(Layout(shard=2), ADAMW)
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
            alone = f"started anew: {open_checkpointer(folder).find()}"
        except CheckpointError as error:
            alone = str(error)
        answers.append((used, state.position, found.refused, names, alone))
    return answers


def test_every_damage_is_named_and_the_checkpoint_before_is_used(tmp_path):
    run_on_ranks(save_two, 2, str(tmp_path / "whole"))
    folders = {}
    for damage, act in DAMAGE.items():
        folders[damage] = tmp_path / damage
        shutil.copytree(tmp_path / "whole", folders[damage])
        act(folders[damage] / "step-2")
    for answers in run_on_ranks(what_is_found, 2, [str(folder) for folder in folders.values()]):
        for damage, (used, position, refused, names, alone) in zip(folders, answers, strict=True):
            assert (used, position) == ("step-1", 100), damage
            assert len(refused) == 1 and "step-2: " in refused[0], damage
            assert names == ["step-1", "step-2.aside-1"], f"{damage}: nothing may be lost"
            assert "no valid checkpoint found" in alone and "step-2: " in alone, damage


def verify_less(folder) -> list[str]:
    state, _, _ = start(Layout(), ADAMW)
    return [load(open_checkpointer(folder, verify=how), state) for how in ("off", "sizes", "full")]


def test_how_much_is_verified_is_what_was_asked_for(tmp_path):
    run_on_ranks(save_two, 2, str(tmp_path / "flipped"))
    shutil.copytree(tmp_path / "flipped", tmp_path / "longer")
    DAMAGE["a flipped bit"](tmp_path / "flipped" / "step-2")
    with largest(tmp_path / "longer" / "step-2").open("ab") as shard:
        shard.write(b"more")
    answers = [
        run_on_ranks(verify_less, 1, str(tmp_path / how))[0] for how in ("flipped", "longer")
    ]
    assert answers == [["step-2", "step-2", "step-1"], ["step-2", "step-1", "step-1"]]


# --- what is found -------------------------------------------------------------------------------


def save_over(folder) -> str:
    """Save step 1 into a folder that holds a checkpoint of it, and a shard of a larger layout."""
    state = trained(Layout())
    save_whole(open_checkpointer(folder), state)
    Path(folder, "step-1", "__7_0.distcp").write_bytes(b"of before")
    save_whole(open_checkpointer(folder), state)
    return load(open_checkpointer(folder), state)


def test_a_step_that_is_saved_again_is_not_mixed_with_what_was_there(tmp_path):
    assert run_on_ranks(save_over, 1, str(tmp_path)) == ["step-1"]
    names = {path.name for path in (tmp_path / "step-1").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "chunks.json", "manifest.json"}


def find_in(folder, config) -> str:
    found = open_checkpointer(folder, **config).find()
    return "nothing" if found is None else found.folder.name


def test_a_first_save_that_was_cut_short_is_no_reason_to_stop(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "unfinished").touch()
    (tmp_path / "step-2.removed").mkdir()
    assert run_on_ranks(find_in, 1, str(tmp_path), {}) == ["nothing"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_but_empty_does_not_hide_the_initial_checkpoint(tmp_path):
    run_on_ranks(save_two, 2, str(tmp_path / "other"))
    (tmp_path / "own").mkdir()
    config = {"initial_load_path": str(tmp_path / "other" / "step-2")}
    assert run_on_ranks(find_in, 1, str(tmp_path / "own"), config) == ["step-2"]


def test_who_only_loads_changes_nothing(tmp_path):
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "unfinished").touch()
    assert run_on_ranks(find_in, 1, str(tmp_path), {"load_only": True}) == ["nothing"]
    assert (tmp_path / "step-3" / "unfinished").exists()


# --- parts ---------------------------------------------------------------------------------------


def save_last(folder, dtype) -> tuple[dict, int]:
    state = trained(Layout(shard=2), 2)
    config = {"last_save_model_only": True, "export_dtype": dtype}
    checkpointer = open_checkpointer(folder, **config)
    save_whole(checkpointer, state, final=True)
    return {name: whole(p).to(getattr(torch, dtype)) for name, p in state.model.named_parameters()}


def load_parts(folder) -> list:
    """(what is said to going on, weights and moments after leaving the moments out, or finished)"""
    answers = []
    for config, steps in (({}, None), ({"exclude_from_loading": ["optimizer"]}, None), ({}, 2)):
        state, _, _ = start(Layout(), ADAMW)
        checkpointer = open_checkpointer(folder, **config)
        try:
            progress = checkpointer.load(
                checkpointer.find(), state.model, state.optimizer, {}, finished_at=steps
            )
            weights = {name: whole(p) for name, p in state.model.named_parameters()}
            answers.append((progress["step"], weights, len(state.optimizer.state)))
        except CheckpointError as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_last_save_of_the_model_alone_says_that_it_cannot_be_gone_on_from(dtype, tmp_path):
    saved = run_on_ranks(save_last, 2, str(tmp_path), dtype)[0]
    tensors = read_checkpoint_manifest(StorageFolder(tmp_path / "step-2")).tensors
    assert {record.dtype for record in tensors.values()} == {dtype}
    assert set(tensors) == {f"model.{name}" for name in saved}
    refusal, without, finished = run_on_ranks(load_parts, 1, str(tmp_path))[0]
    assert "has only weights" in refusal and "exclude_from_loading" in refusal
    for step, weights, moments in (without, finished):
        assert step == 2 and moments == 0
        assert all(torch.equal(weights[name], saved[name].float()) for name in saved)


def start_parts_anew(folder) -> list[tuple]:
    answers = []
    for parts in (["dataloader"], ["train_state"], ["optimizer"]):
        state, _, _ = start(Layout(), ADAMW)
        load(open_checkpointer(folder, load_only=True, exclude_from_loading=parts), state)
        answers.append((state.step, state.position, len(state.optimizer.state) > 0))
    return answers


def test_only_the_parts_named_start_anew(tmp_path):
    run_on_ranks(save_two, 2, str(tmp_path))
    answers = run_on_ranks(start_parts_anew, 1, str(tmp_path))[0]
    assert answers == [(2, 0, True), (0, 200, True), (2, 200, False)]


def other_facts(folder, allowed) -> list[str]:
    facts, said = {"data.sources": {"code": "weight 2"}, "model": {"dim": 32}, "debug.seed": 1}, []
    for allow_changes in allowed:
        state, _, _ = start(Layout(), ADAMW)
        try:
            said.append(load(open_checkpointer(folder, allow_changes=allow_changes), state, facts))
        except CheckpointError as error:
            said.append(str(error))
    return said


def save_facts(folder) -> None:
    facts = {"data.sources": {"code": "weight 1"}, "model": {"dim": 32}, "debug.seed": 0}
    save_whole(open_checkpointer(folder, facts=facts), trained(Layout()))


def test_a_changed_fact_is_refused_with_what_differs_unless_it_is_allowed_by_name(tmp_path):
    run_on_ranks(save_facts, 1, str(tmp_path))
    allowed = [[], ["debug.seed"], ["debug.seed", "data.sources"]]
    nothing, one, both = run_on_ranks(other_facts, 1, str(tmp_path), allowed)[0]
    assert "data.sources (code: weight 1 saved, weight 2 now)" in nothing
    assert "debug.seed (0 saved, 1 now)" in nothing and "model (" not in nothing
    assert 'allow_changes = ["data.sources", "debug.seed"]' in nothing
    assert "debug.seed (" not in one and "data.sources (" in one and both == "step-1"


# --- elsewhere -----------------------------------------------------------------------------------


def somewhere_else(url) -> list:
    """Save three, keeping two; damage the newest; go on."""
    state = trained(Layout())
    checkpointer = open_checkpointer(url, async_mode="async", keep_latest_k=2)
    for state.step in (1, 2, 3):
        save_whole(checkpointer, state)
    before, place = bits(state), StorageFolder(url) / "step-3"
    shard = next(name for name in place.sizes() if name.endswith(".distcp"))
    place.write_atomically(shard, one_bit(place.read(shard)))
    spoil(state)
    steps = checkpointer.steps()
    found, names = load(checkpointer, state), StorageFolder(url).folders()
    return [steps, found, bits(state) == before, names, list_steps(StorageFolder(url)).aside]


@pytest.mark.parametrize(
    "url, aside", [("memory://bucket/run/checkpoint", ""), ("file://{}/checkpoint", ".aside-1")]
)
def test_checkpoints_may_be_wherever_a_url_leads(url, aside, tmp_path):
    answer = run_on_ranks(somewhere_else, 1, url.format(tmp_path))[0]
    assert answer == [[2, 3], "step-2", True, ["step-2", f"step-3{aside}"], [f"step-3{aside}"]]


def test_a_manifest_lists_every_tensor_with_a_hash_that_follows_its_content(tmp_path):
    run_on_ranks(save_two, 2, str(tmp_path))
    first, second = (
        read_checkpoint_manifest(StorageFolder(tmp_path / f"step-{n}")) for n in (1, 2)
    )
    assert first.tensors == second.tensors, "the same tensors"
    assert first.tensors["model.tok_embeddings.weight"].shape == [509, 32]
    assert first.has("optimizer") and first.bytes > 0
    assert len({record.hash for record in first.tensors.values()}) > len(first.tensors) / 2
    assert asdict(first)["files"].keys() >= {".metadata", "__0_0.distcp", "__1_0.distcp"}


def resume_linked(folder, elsewhere) -> tuple:
    """What is found where two checkpoints were moved to another disk and linked, then a third is
    saved with two kept."""
    state = trained(Layout())
    checkpointer = open_checkpointer(folder, keep_latest_k=2)
    for state.step in (1, 2):
        save_whole(checkpointer, state)
        (folder / f"step-{state.step}").rename(elsewhere / f"step-{state.step}")
        (folder / f"step-{state.step}").symlink_to(elsewhere / f"step-{state.step}")
    found = load(checkpointer, state)
    state.step = 3
    save_whole(checkpointer, state)
    return found, sorted(path.name for path in folder.glob("step-*"))


def test_a_checkpoint_that_is_linked_from_another_disk_is_used_and_never_deleted(tmp_path):
    folder, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    elsewhere.mkdir()
    [(found, left)] = run_on_ranks(resume_linked, 1, folder, elsewhere)
    assert (found, left) == ("step-2", ["step-2", "step-3"])
    assert (elsewhere / "step-1" / "manifest.json").exists()  # the link alone was removed
