"""A run stopped under one layout resumes under any other, bit for bit; load_step and retention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import bits, bits_of, load, open_checkpointer, save_and_wait
from tests.distributed.oracle import (
    ADAMW,
    SGD,
    Layout,
    Record,
    batch_at,
    one_process,
    parse_layouts,
    run_until,
    start_run,
    with_enough_blocks,
    with_tied_embeddings,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import FURTHER_TOKENS
from titanlite.checkpoint.manifest import read_checkpoint_manifest
from titanlite.checkpoint.model_state import model_and_optimizer_state
from titanlite.errors import CheckpointError
from titanlite.optim.fp32_vectors import MASTER
from titanlite.storage import StorageFolder

DENSE = with_enough_blocks(replace(ADAMW, batch=12, seq_len=24), Layout(pipeline=2))
TIED = with_tied_embeddings(DENSE)
EXPERTS = replace(ADAMW, sizes=replace(FURTHER_TOKENS.sizes, mtp_layers=1), batch=8, seq_len=12)
RUNS = {  # name -> (recipe, layouts, more of them with `--layouts 2`)
    "dense": (  # 509 rows over 3 ranks
        DENSE,
        "one; shard=3,accumulate=2; pipeline=2,microbatch=3,schedule=ZBVZeroBubble",
        "shard=2,tensor=2; pipeline=2,context=2,microbatch=3;"
        "pipeline=2,shard=2,microbatch=3,schedule=ZBVZeroBubble",
    ),
    "tied": (
        TIED,
        "one; pipeline=2,microbatch=3; pipeline=2,tensor=2,microbatch=3,schedule=ZBVZeroBubble",
        "pipeline=2,shard=2,microbatch=3",
    ),
    "experts": (
        EXPERTS,
        "one; tensor=2,shard=2,expert=2,expert_tensor=2;pipeline=2,tensor=2,expert=2,microbatch=2",
        "shard=4,expert=2; shard=2,expert=2; shard=8,expert=4",
    ),
}
STOP = 2  # of the recipes' steps


def train_and_save(layout, recipe, folder, dtype=torch.float32) -> dict[str, bytes]:
    """Train to step STOP and save; returns the saved bits of this rank."""
    state, engine, mesh = start_run(layout, recipe, dtype=dtype, param_dtype=dtype)
    run_until(state, engine, mesh, recipe, Record(), STOP)
    options = {"properties": {"model": {"dim": 32}}, "layout": str(layout)}
    save_and_wait(open_checkpointer(folder, **options), state)
    return bits(state)


def resume(
    layout, recipe, folders, dtype=torch.float32
) -> list[tuple[dict[str, bytes], list[float]]]:
    """For each checkpoint: (state after loading, losses of the steps after it).

    The first is loaded into a new run, the others over the state that the previous one left.
    """
    results = []
    state, engine, mesh = start_run(layout, recipe, dtype=dtype, param_dtype=dtype)
    for folder in folders:
        load(open_checkpointer(folder), state)
        loaded, record = bits(state), Record()
        assert state.step == STOP
        run_until(state, engine, mesh, recipe, record, recipe.steps)
        results.append((loaded, record.losses))
    return results


def merge_bits(parts) -> dict[str, bytes]:
    """The bits of all ranks; what several ranks have must be equal on all of them."""
    merged = {name: value for part in parts for name, value in part.items()}
    assert all(merged[name] == value for part in parts for name, value in part.items())
    return merged


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory, request
) -> Callable[[str], dict[Layout, tuple[str, dict[str, bytes]]]]:
    """The checkpoints of a run under each of its layouts: (folder, saved bits)."""

    @cache
    def save(run: str) -> dict[Layout, tuple[str, dict[str, bytes]]]:
        recipe, saved_by = RUNS[run][0], {}
        for layout in layouts_of(run, request.config):
            folder = str(tmp_path_factory.mktemp("saved"))
            saved = run_on_ranks(train_and_save, layout.degrees.ranks, layout, recipe, folder)
            saved_by[layout] = (folder, merge_bits(saved))
        return saved_by

    return save


def layouts_of(run: str, config) -> list[Layout]:
    _, text, more = RUNS[run]
    return parse_layouts(text if config.getoption("--layouts") == 1 else f"{text}; {more}")


def pytest_generate_tests(metafunc) -> None:
    if "after" in metafunc.fixturenames:
        cases = [(run, layout) for run in RUNS for layout in layouts_of(run, metafunc.config)]
        metafunc.parametrize("run, after", cases, ids=str)


def test_every_layout_resumes_from_others(run, after, checkpoints, request):
    """From the two before it in a ring, so each is loaded twice; with `--layouts`, from all."""
    recipe, expected = RUNS[run][0], one_process(RUNS[run][0]).losses
    by_layout = list(checkpoints(run).items())
    at = list(checkpoints(run)).index(after)
    chosen = [by_layout[at - 1], by_layout[at - 2]]
    if request.config.getoption("--layouts") > 1:
        chosen = by_layout
    folders = [folder for _, (folder, _) in chosen]
    by_rank = run_on_ranks(resume, after.degrees.ranks, after, recipe, folders)
    for (before, (_, saved)), *results in zip(chosen, *by_rank, strict=True):
        loaded = merge_bits([bits for bits, _ in results])
        assert loaded == saved, f"{before} -> {after}: loaded bits differ from saved bits"
        for _, losses in results:
            assert losses == pytest.approx(expected[STOP:], rel=1e-5), f"{before} -> {after}"


def test_a_checkpoint_has_a_tied_weight_as_without_stages(checkpoints):
    """Both names of the weight, and one state of the optimizer; equal shards have equal hashes."""
    manifests = [
        read_checkpoint_manifest(StorageFolder(folder) / f"step-{STOP}").tensors
        for folder, _ in checkpoints("tied").values()
    ]
    assert all(tensors.keys() == manifests[0].keys() for tensors in manifests)
    for tensors in manifests:
        assert tensors["model.output.weight"] == tensors["model.tok_embeddings.weight"]
        assert not any(name.startswith("optimizer.state.output") for name in tensors)


def train_and_compare_copies(layout, recipe) -> list[dict[str, bytes]]:
    """The bits of this rank's state after training, and those of its copy of the embedding."""
    state, engine, mesh = start_run(layout, recipe)
    run_until(state, engine, mesh, recipe, Record(), 1)  # the copy is that of before the update
    weights = model_and_optimizer_state(state.model)["model"]
    if "output.weight" in weights:
        assert bits_of(weights["output.weight"]) == bits_of(weights["tok_embeddings.weight"])
    run_until(state, engine, mesh, recipe, Record(), recipe.steps)
    engine.evaluate(*batch_at(0, recipe))
    copies = [c.copy for c in engine._sharded.tied_copies if c.copy is not None]
    return [bits(state), *({"tok_embeddings.weight": bits_of(copy)} for copy in copies)]


@pytest.mark.parametrize(
    "name, layout",
    [
        ("AdamW", Layout(pipeline=2, shard=2, microbatch=3)),
        ("Adafactor", Layout(pipeline=2, tensor=2, microbatch=3, schedule="ZBVZeroBubble")),
    ],
    ids=str,
)
def test_both_copies_of_a_tied_weight_have_the_same_bits(name, layout):
    """Its weight decay is that of every parameter, and not the doubled one of two optimizers."""
    recipe = replace(TIED, optimizer=name, options=(("weight_decay", 0.5),))
    by_rank = run_on_ranks(train_and_compare_copies, 4, layout, recipe)
    assert sorted(map(len, by_rank)) == [1, 1, 2, 2]  # the ranks of the last stage have the copy
    trained = merge_bits([part for parts in by_rank for part in parts])
    for key in ("tok_embeddings.weight", "layers.0.attention.wq.weight"):
        expected = one_process(recipe).weights[key]
        weight = torch.frombuffer(bytearray(trained[key]), dtype=torch.float32)
        assert (weight.view_as(expected) - expected).norm() < 1e-5 * expected.norm(), key


@pytest.mark.parametrize(
    "recipe",
    [ADAMW, SGD, replace(ADAMW, state_dtype="bfloat16")],
    ids=["AdamW", "SGD", "AdamW bf16 states"],
)
def test_bf16_runs_resume_with_the_fp32_copies_of_vectors(recipe, tmp_path):
    recipe, folder, bf16 = replace(recipe, batch=4, seq_len=8), str(tmp_path), torch.bfloat16
    saved = merge_bits(run_on_ranks(train_and_save, 2, Layout(shard=2), recipe, folder, bf16))
    assert len(saved[f"norm.weight.{MASTER}"]) == 2 * len(saved["norm.weight"])
    results = run_on_ranks(resume, 2, Layout(tensor=2), recipe, [folder], bf16)
    assert merge_bits([loaded for ((loaded, _),) in results]) == saved


def resume_with_other_weight_decay(folder) -> tuple[float, float]:
    state, _, _ = start_run(Layout(), ADAMW)
    state.optimizer.param_groups[0]["weight_decay"] = 0.5  # as a changed TOML sets it
    load(open_checkpointer(folder), state)
    return state.optimizer.param_groups[0]["weight_decay"], state.optimizer.param_groups[0]["lr"]


def test_lr_and_weight_decay_come_from_the_job_and_not_the_checkpoint(tmp_path):
    run_on_ranks(train_and_save, 1, Layout(), ADAMW, str(tmp_path))
    assert run_on_ranks(resume_with_other_weight_decay, 1, str(tmp_path))[0] == (0.5, ADAMW.lr)


def collect_load_errors(folder) -> dict[str, str]:
    """The error message of each load that must fail."""
    errors = {}

    def try_load(name, config, properties=None, recipe=ADAMW):
        state, _, _ = start_run(Layout(), recipe)
        try:
            load(open_checkpointer(folder, **config), state, properties)
        except CheckpointError as error:
            errors[name] = str(error)

    try_load("no such step", {"load_step": 7})
    try_load("another model", {}, {"model": {"dim": 64}})
    smaller = replace(ADAMW, sizes=replace(ADAMW.sizes, n_layers=ADAMW.sizes.n_layers - 1))
    allowed = {"allow_changes": ["model"]}
    try_load("fewer layers", allowed, {"model": {"n_layers": 1}}, smaller)
    shard = next(Path(folder, f"step-{STOP}").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    try_load("named but damaged", {"load_step": STOP})
    return errors


def test_a_checkpoint_that_cannot_be_loaded_is_an_error_and_no_new_start(tmp_path):
    run_on_ranks(train_and_save, 1, Layout(), ADAMW, str(tmp_path))
    errors = run_on_ranks(collect_load_errors, 1, str(tmp_path))[0]
    assert (
        "load_step = 7" in errors["no such step"]
        and f"Existing steps: {STOP}" in errors["no such step"]
    )
    assert "model (dim: 32 saved, 64 now)" in errors["another model"]
    assert "weights are not in the model of this job: model.layers." in errors["fewer layers"]
    assert "bytes, not" in errors["named but damaged"]


def save_steps(checkpointer, state, *steps: int) -> None:
    """Save checkpoints of several steps without training."""
    for step in steps:
        state.counters.step = step
        save_and_wait(checkpointer, state)


def save_after_crashes(folder, recipe) -> list[list[int]]:
    """Save three, then crash five times before the commit, then save one more."""
    state, _, _ = start_run(Layout(shard=2), recipe)
    checkpointer = open_checkpointer(folder, keep_latest_k=2)
    save_steps(checkpointer, state, 1, 2, 3)
    if torch.distributed.get_rank() == 0:
        for step in (4, 5, 6, 7, 8):  # as left by a crash before the commit
            partial = Path(folder, f"step-{step}")
            partial.mkdir()
            (partial / "unfinished").touch()
            (partial / "__0_0.distcp").write_bytes(b"half")
    torch.distributed.barrier()
    before, resumed_from = checkpointer.steps(), load(checkpointer, state)
    assert resumed_from == "step-3"
    save_steps(checkpointer, state, 4)
    return [before, checkpointer.steps()]


def roll_back_and_save(folder, recipe) -> tuple[list[int], list[str]]:
    """Save three steps, roll back to the first, and save one more; keep_latest_k is 2."""
    state, _, _ = start_run(Layout(), recipe)
    save_steps(open_checkpointer(folder), state, 1, 2, 3)
    checkpointer = open_checkpointer(folder, keep_latest_k=2, load_step=1)
    assert load(checkpointer, state) == "step-1"
    save_steps(checkpointer, state, 2)
    return checkpointer.steps(), checkpoint_names(folder)


def checkpoint_names(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("step-*"))


def test_a_roll_back_sets_later_checkpoints_aside_and_does_not_resume_from_them(tmp_path):
    steps, names = run_on_ranks(roll_back_and_save, 1, str(tmp_path), ADAMW)[0]
    assert steps == [1, 2]
    assert names == ["step-1", "step-2", "step-2.aside-1", "step-3.aside-1"]


def start_repeatedly(folder, recipe, load_steps) -> list[list[str]]:
    """Start with each `load_step` and, unless None (load_only), save the next two steps.

    Returns the checkpoint that each start resumed from, and the names of all at the end.
    """
    state, _, _ = start_run(Layout(), recipe)
    save_steps(open_checkpointer(folder), state, 1, 2, 3)
    starts = []
    for load_step in load_steps:
        options = (
            {"load_only": True, "load_step": 4} if load_step is None else {"load_step": load_step}
        )
        checkpointer = open_checkpointer(folder, keep_latest_k=3, keep_aside_k=2, **options)
        starts.append(load(checkpointer, state))
        if load_step is not None:
            save_steps(checkpointer, state, state.step + 1, state.step + 2)
    return [starts, checkpoint_names(folder)]


def test_the_same_load_step_rolls_back_only_once(tmp_path):
    """Repeating the command must not discard the steps trained since the first roll-back."""
    load_steps = [1, 1, None, 1, -1, 7]
    starts, names = run_on_ranks(start_repeatedly, 1, str(tmp_path), ADAMW, load_steps)[0]
    assert starts == ["step-1", "step-3", "step-4", "step-5", "step-7", "step-7"]
    kept, aside = ["step-7", "step-8", "step-9"], ["step-8.aside-1", "step-9.aside-1"]
    assert sorted(names) == sorted(kept + aside), "no more than keep_aside_k aside"


def test_retention_counts_only_valid_checkpoints(tmp_path):
    before, after = run_on_ranks(save_after_crashes, 2, str(tmp_path), ADAMW)[0]
    assert before == [2, 3] and after == [3, 4]
