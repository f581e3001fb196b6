"""Checkpoints of experts: saved under one layout, resumed under another, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.oracle import ADAMW, Layout, one_process
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_expert_parallel import SIZES
from tests.distributed.test_resume import STOP, merge_bits, resume, train_and_save

LAYOUTS = {
    "one": Layout(),
    "EP2": Layout(shard=2, expert=2),
    "EP4-FSDP2": Layout(shard=8, expert=4),
    "TP2-EP2": Layout(tensor=2, shard=2, expert=2, expert_tensor=2),
    "PP2-EP2": Layout(pipeline=2, tensor=2, expert=2, microbatch=2),
}
RECIPE = replace(ADAMW, sizes=replace(SIZES, n_layers=2), batch=8, seq_len=12)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, tuple[str, dict[str, bytes]]]:
    """A checkpoint under every layout: (folder, saved bits)."""
    saved_by = {}
    for name, layout in LAYOUTS.items():
        folder = str(tmp_path_factory.mktemp(name))
        saved = run_on_ranks(train_and_save, layout.degrees.ranks, layout, RECIPE, folder)
        saved_by[name] = (folder, merge_bits(saved))
    return saved_by


@pytest.mark.parametrize("after", LAYOUTS)
def test_experts_resume_under_every_other_layout(after, checkpoints):
    layout, expected = LAYOUTS[after], one_process(RECIPE).losses
    folders = [folder for folder, _ in checkpoints.values()]
    by_rank = run_on_ranks(resume, layout.degrees.ranks, layout, RECIPE, folders)
    for (before, (_, saved)), *results in zip(checkpoints.items(), *by_rank, strict=True):
        loaded = merge_bits([bits for bits, _ in results])
        assert loaded == saved, f"{before} -> {after}: loaded bits differ from saved bits"
        for _, losses in results:
            assert losses == pytest.approx(expected[STOP:], rel=1e-5), f"{before} -> {after}"
