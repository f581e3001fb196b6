"""Low-memory optimizer states are the same under every layout, and so are their checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.oracle import ADAMW, Layout, one_process, run_layouts
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_resume import STOP, merge_bits, resume, train_and_save

# Each of 2 tensor-parallel ranks has two quantisation blocks per row; 509 rows is a prime number.
SIZES = replace(ADAMW.sizes, head_dim=64, hidden_dim=256)
RECIPE = replace(ADAMW, sizes=SIZES, batch=12, seq_len=12)
PIPELINE = Layout(pipeline=2, microbatch=3)


def test_every_layout_trains_like_one_process_with_quantised_optimizer_states():
    """With clipping. A value that rounds to a neighbouring code changes the norm, hence 1e-3."""
    recipes = [replace(RECIPE, state_dtype=kind) for kind in ("bfloat16", "8bit", "4bit", "float8")]
    cases = [(Layout(shard=2, tensor=2), recipe) for recipe in recipes]
    for recipe, record in zip(recipes, run_on_ranks(run_layouts, 4, cases)[0], strict=True):
        expected = one_process(recipe)
        assert record.losses == pytest.approx(expected.losses, rel=1e-5), recipe.state_dtype
        assert record.norms == pytest.approx(expected.norms, rel=1e-3), recipe.state_dtype


@pytest.mark.parametrize(
    "kind, layouts", [("8bit", [PIPELINE]), ("4bit", [Layout(), Layout(shard=3)])]
)
def test_quantised_optimizer_states_resume_bit_equal_under_any_layout(kind, layouts, tmp_path):
    """From and to a disk in 4 bits."""
    folder, disk = str(tmp_path / "checkpoint"), str(tmp_path)
    options = (("offload", True), ("offload_folder", disk)) if kind == "4bit" else ()
    recipe = replace(RECIPE, state_dtype=kind, options=options)
    saved = merge_bits(run_on_ranks(train_and_save, 4, Layout(shard=2, tensor=2), recipe, folder))
    assert any(f"exp_avg_root_{kind}_scale" in name for name in saved)
    expected_losses = one_process(recipe).losses[STOP:]
    for layout in layouts:
        results = run_on_ranks(resume, layout.degrees.ranks, layout, recipe, [folder])
        assert merge_bits([loaded for ((loaded, _),) in results]) == saved, str(layout)
        assert results[0][0][1] == pytest.approx(expected_losses, rel=1e-5)
