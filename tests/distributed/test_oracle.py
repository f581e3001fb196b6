"""Every layout computes the same losses, gradients and weights as one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.oracle import (
    ADAMW,
    DOCUMENT_END,
    SGD,
    SIZES,
    Layout,
    batch_at,
    build_sharded,
    merge_ranks,
    one_process,
    run_layouts,
    with_enough_blocks,
    with_tied_embeddings,
    worst_error,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.resting import estimate_rest
from tests.parallelize.test_schedule import as_csv
from titanlite.data import ShardWriter
from titanlite.data.manifest import write_corpus_manifest
from titanlite.labels import DOCUMENT_END as PACKED_END
from titanlite.models.mup import BaseWidths
from titanlite.parallelize.schedule import SCHEDULES, build_schedule_order
from titanlite_corpus.packing.windows import PackSettings, pack_shard

# Each is run with SGD and gradient accumulation: Adam and clipping would hide gradients that are
# wrong by a factor. Those in CLIPPED are run with AdamW and clipping too.
LAYOUTS = [
    Layout(),
    Layout(shard=2),
    Layout(shard=3),
    Layout(shard=4),
    Layout(replicate=2),
    Layout(replicate=2, shard=2),
    Layout(replicate=2, context=2),
    Layout(tensor=2),
    Layout(tensor=4),  # more ranks than key-value heads
    Layout(shard=2, tensor=2),
    Layout(context=2),
    Layout(context=2, rotate="alltoall", balancer="none"),
    Layout(context=4),
    Layout(context=2, shard=2, rotate="alltoall"),
    Layout(context=2, tensor=2, balancer="none"),
]
# The same, on a model with enough blocks for the stages.
PIPELINES = [
    *(Layout(pipeline=2, microbatch=9, schedule=schedule) for schedule in SCHEDULES),
    *(
        Layout(pipeline=2, microbatch=9, schedule=schedule, stages=6)
        for schedule, spec in SCHEDULES.items()
        if spec.stages_per_rank is None
    ),
    Layout(pipeline=4, microbatch=9),
    Layout(pipeline=4, microbatch=9, schedule="InterleavedZeroBubble"),
    Layout(pipeline=2, shard=2, microbatch=3, schedule="ZBVZeroBubble"),
    Layout(pipeline=2, tensor=2, microbatch=18),
    Layout(pipeline=2, context=2, microbatch=9, schedule="Interleaved1F1B"),
]
CLIPPED = [
    Layout(shard=2),
    Layout(replicate=2, shard=2),
    Layout(tensor=2),
    Layout(shard=2, tensor=2),
    Layout(context=2),
    Layout(pipeline=2, microbatch=9, schedule="1F1B"),
    Layout(pipeline=2, tensor=2, microbatch=18),
]
# On 8 ranks, where DTensor is slowest with three mesh dimensions: each is run once, with SGD.
EIGHT_RANKS = [
    Layout(replicate=2, shard=2, tensor=2),
    Layout(pipeline=2, shard=2, tensor=2, microbatch=3, schedule="DualPipeV"),
    Layout(pipeline=2, replicate=2, shard=2, microbatch=1, accumulate=3),
    Layout(pipeline=2, context=2, tensor=2, microbatch=6, rotate="alltoall", accumulate=3),
]
# Each is run with SGD.
OPTIONS = [
    [
        Layout(tensor=2, loss_parallel=False),
        Layout(tensor=2, recompute="selective"),
        Layout(tensor=2, offload_activations=True),
    ],
    [
        Layout(offload_activations=True),
        Layout(recompute="op"),
        Layout(compile="aot_eager", recompute="op"),
    ],
    [
        Layout(shard=2, tensor=2, recompute="op"),
        Layout(shard=2, tensor=2, offload_activations=True, recompute="selective"),
        Layout(shard=2, tensor=2, compile="aot_eager", recompute="full"),
    ],
    [Layout(tensor=4, loss_parallel=False, chunk=100), Layout(tensor=4, chunk=7 * 48)],
    [
        Layout(
            shard=2,
            tensor=2,
            accumulate=3,
            loss_parallel=False,
            chunk=64,
            recompute="full",
            reduction="last_microbatch",
            reshard="never",
        ),
    ],
    [
        Layout(shard=2, accumulate=3, reduction="last_microbatch"),
        Layout(shard=2, reshard="always"),
        Layout(shard=2, reshard="never"),
        Layout(shard=2, offload=True),
        Layout(shard=2, recompute="op", offload=True),
        Layout(shard=2, compile="aot_eager", offload_activations=True),
        Layout(shard=2, recompute="full", chunk=100),
        Layout(shard=2, reduction="last_microbatch", early=True),
    ],
    [
        Layout(replicate=2, shard=2, accumulate=3, reduction="last_microbatch"),
        Layout(replicate=2, shard=2, accumulate=3, reduction="last_microbatch", early=True),
    ],
    [Layout(shard=2, tensor=2, reduction="last_microbatch", early=True)],
    [
        Layout(context=2, rotate="alltoall", recompute="full"),
        Layout(context=2, offload=True),
        Layout(context=2, compile="aot_eager"),
    ],
    [Layout(context=4, rotate="alltoall", balancer="none"), Layout(context=4, balancer="none")],
]
# The same, on a model with enough blocks.
PIPELINE_OPTIONS = [
    [
        Layout(pipeline=2, microbatch=9, reshard="always"),
        Layout(pipeline=2, microbatch=9, recompute="full"),
        Layout(pipeline=2, microbatch=9, schedule="ZBVZeroBubble", recompute="selective", chunk=50),
        Layout(pipeline=2, microbatch=9, offload=True),
        Layout(pipeline=2, microbatch=9, recompute="op"),
        Layout(pipeline=2, microbatch=9, schedule="DualPipeV", recompute="op"),
        Layout(pipeline=2, microbatch=9, schedule="InterleavedZeroBubble", compile="aot_eager"),
        Layout(pipeline=2, microbatch=9, schedule="ZBVZeroBubble", offload_activations=True),
        Layout(pipeline=2, microbatch=9, schedule="Interleaved1F1B", compile="aot_eager"),
        Layout(
            pipeline=2, microbatch=9, schedule="Interleaved1F1B", stages=10
        ),  # embedding and output layer have stages of their own
    ],
    [
        Layout(pipeline=2, tensor=2, microbatch=9, loss_parallel=False),
        Layout(pipeline=2, tensor=2, microbatch=9, schedule="InterleavedZeroBubble", stages=10),
    ],
    [
        Layout(pipeline=2, shard=2, microbatch=6, reshard="always"),
        *(  # their backward is whole
            Layout(pipeline=2, shard=2, microbatch=3, schedule=schedule, reshard="always", **whole)
            for schedule in ("ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble")
            for whole in ({"recompute": "full"}, {"compile": "aot_eager"})
        ),
        Layout(pipeline=2, shard=2, microbatch=3, accumulate=3, reduction="last_microbatch"),
        Layout(
            pipeline=2,
            shard=2,
            microbatch=3,
            accumulate=3,
            reduction="last_microbatch",
            schedule="InterleavedZeroBubble",
        ),
    ],
]
# Documents cross every shard boundary; each is run once, with SGD.
DOCUMENT_LAYOUTS = [
    [Layout(), Layout(accumulate=3, recompute="full")],
    [Layout(shard=2, accumulate=3), Layout(tensor=2, recompute="full"), Layout(context=2)],
    [
        Layout(pipeline=2, microbatch=3, schedule="ZBVZeroBubble"),
        Layout(context=2, rotate="alltoall", balancer="none"),
    ],
    [Layout(shard=2, tensor=2), Layout(context=4, rotate="alltoall")],
    [Layout(pipeline=2, context=2, microbatch=6)],
]
TIED_LAYOUTS = [Layout(shard=3), Layout(tensor=4), Layout(shard=2, tensor=2)]
TIED_PIPELINES = [
    [
        *(Layout(pipeline=2, microbatch=9, schedule=schedule) for schedule in SCHEDULES),
        Layout(pipeline=2, microbatch=9, offload=True, recompute="op"),
        Layout(pipeline=2, microbatch=9, schedule="ZBVZeroBubble", offload=True, recompute="full"),
        Layout(pipeline=2, microbatch=9, schedule="Interleaved1F1B", compile="aot_eager"),
        Layout(pipeline=2, microbatch=3, accumulate=3, reduction="last_microbatch"),
    ],
    [
        Layout(pipeline=2, shard=2, microbatch=3, accumulate=3, reduction="last_microbatch"),
        Layout(pipeline=2, shard=2, microbatch=3, schedule="DualPipeV", reshard="never"),
        Layout(pipeline=2, shard=2, microbatch=6, reshard="always", recompute="full"),
    ],
    [Layout(pipeline=2, replicate=2, microbatch=3, accumulate=3)],
    [
        Layout(pipeline=2, tensor=2, microbatch=18),
        Layout(pipeline=2, tensor=2, microbatch=9, schedule="ZBVZeroBubble"),
    ],
    [Layout(pipeline=2, context=2, microbatch=9, schedule="Interleaved1F1B")],
]


SHORT = replace(SGD, steps=2)  # the second step depends on the update of the first


def assert_matches_one_process(cases) -> None:
    """Compare loss, norm and the planner's bytes at rest; under SGD every gradient and weight too.

    AdamW would amplify the rounding of a gradient near zero to a full update.
    """
    by_rank = run_on_ranks(run_layouts, cases[0][0].degrees.ranks, cases)
    for (layout, recipe), *records in zip(cases, *by_rank, strict=True):
        record = merge_ranks(records)
        if not (layout.early or layout.offload):  # else not all there after backward
            ranks_of_stage = layout.degrees.ranks // layout.pipeline
            rest = [record.rest for record in records[::ranks_of_stage]]
            assert rest == estimate_rest(layout, recipe), str(layout)
        errors = worst_error(record, one_process(recipe), tensors=recipe.optimizer == "SGD")
        print(f"{layout} {recipe.optimizer}: at most {max(errors.values()):.1e}")  # pytest -rP
        assert max(errors.values()) <= 1e-5, (str(layout), recipe.optimizer, errors)


@pytest.mark.parametrize("layout", [*LAYOUTS, *PIPELINES], ids=str)
def test_every_layout_matches_one_process(layout):
    accumulating, recipes = replace(layout, accumulate=3), (SGD, ADAMW)
    if layout.pipeline > 1:
        accumulating = replace(accumulating, microbatch=layout.microbatch // 3)
        recipes = tuple(with_enough_blocks(recipe, layout) for recipe in recipes)
    sgd, adamw = recipes
    assert_matches_one_process(
        [(accumulating, sgd), *([(layout, adamw)] if layout in CLIPPED else [])]
    )


@pytest.mark.parametrize("layout", EIGHT_RANKS, ids=str)
def test_three_mesh_dimensions_match_one_process(layout):
    assert_matches_one_process(
        [(layout, with_enough_blocks(SHORT, layout) if layout.pipeline > 1 else SHORT)]
    )


def join_names(layouts) -> str:
    return ";".join(map(str, layouts))


@pytest.mark.parametrize("layouts", OPTIONS, ids=join_names)
def test_no_option_of_a_layout_changes_the_results(layouts):
    assert_matches_one_process([(layout, SHORT) for layout in layouts])


@pytest.mark.parametrize("layouts", PIPELINE_OPTIONS, ids=join_names)
def test_no_option_of_a_pipeline_changes_the_results(layouts):
    assert_matches_one_process([(layout, with_enough_blocks(SHORT, layout)) for layout in layouts])


def test_a_schedule_from_a_file_matches_one_process(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text(
        "\n" + as_csv(build_schedule_order("ZBVZeroBubble", ranks=2, stages=4, microbatches=4))
    )
    layout = Layout(pipeline=2, csv=str(file), microbatch=9)
    assert_matches_one_process([(layout, with_enough_blocks(SGD, layout))])


@pytest.mark.parametrize("layouts", DOCUMENT_LAYOUTS, ids=join_names)
def test_masked_documents_match_separate_sequences_in_one_process(layouts):
    recipe = replace(SGD, documents=True, batch=12, steps=3)
    assert_matches_one_process(
        [(x, with_enough_blocks(recipe, x) if x.pipeline > 1 else recipe) for x in layouts]
    )


def write_packed(folder: Path, seq_len: int) -> str:
    """Windows packed by best fit; the padding has the id of an end, which ends nothing here."""
    random = np.random.default_rng(0)
    with ShardWriter(folder / "documents", SIZES.vocab_size) as writer:
        for _ in range(400):
            length = int(np.exp(random.normal(2.5, 1.0))) + 1
            writer.add(random.integers(1, SIZES.vocab_size, length))
        writer.close()
    record, _ = pack_shard(
        folder / "documents", folder / "packed/0", PackSettings(seq_len, DOCUMENT_END)
    )
    manifest = {"packed_seq_len": seq_len}
    write_corpus_manifest(folder / "packed", "random", SIZES.vocab_size, [record], **manifest)
    return str(folder / "packed")


def test_packed_windows_match_separate_documents_in_one_process(tmp_path):
    packed = write_packed(tmp_path, SGD.seq_len)
    recipe = replace(SGD, documents=True, packed=packed, batch=8, steps=2)
    marks = [(batch_at(step, recipe)[1] == PACKED_END).sum(1) for step in range(2)]
    assert all(count.sum() >= 5 for count in marks)
    deep = replace(recipe, sizes=replace(SIZES, n_layers=4))
    assert_matches_one_process(
        [
            (Layout(tensor=2), recipe),
            (Layout(context=2), recipe),
            (Layout(pipeline=2, microbatch=4), deep),
        ]
    )


def documents_of_blocks(layout) -> tuple[Counter[int], int, int]:
    """(forwards of blocks by the prepared index that they use, micro-batches, blocks) of a step."""
    recipe = with_enough_blocks(replace(SGD, documents=True, batch=12), layout)
    model, _, engine = build_sharded(layout, recipe)
    batch, used = engine.prepare(*batch_at(0, recipe)), []
    for block in model.layers.values():
        block.register_forward_pre_hook(lambda module, inputs: used.append(inputs[2]))
    engine.forward_backward(batch, torch.tensor(1.0))
    numbers = {id(index): number for number, index in enumerate(batch.documents)}
    return Counter(numbers.get(id(index), -1) for index in used), len(numbers), len(model.layers)


@pytest.mark.parametrize(
    "layout",
    [Layout(pipeline=2, microbatch=3, accumulate=2), Layout(context=2, accumulate=3)],
    ids=str,
)
def test_no_stage_and_no_micro_batch_searches_for_its_documents(layout):
    """Where a prepared index is not handed over, the model finds the documents, and waits."""
    for forwards, microbatches, blocks in run_on_ranks(documents_of_blocks, 2, layout):
        assert microbatches >= 3
        assert forwards == dict.fromkeys(range(microbatches), blocks)


def count_forwards(layout) -> tuple[int, int]:
    """(forwards of a rank's blocks in one step, recomputation included; its blocks)."""
    recipe = with_enough_blocks(SHORT, layout)
    model, _, engine = build_sharded(layout, recipe)
    forwards: list[str] = []
    for name, block in model.layers.items():
        block.ffn_norm.register_forward_pre_hook(lambda *_, name=name: forwards.append(name))
    engine.forward_backward(engine.prepare(*batch_at(0, recipe)), torch.tensor(1.0))
    return len(forwards), len(model.layers)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"])
def test_a_split_backward_recomputes_each_block_once(schedule):
    layout = Layout(pipeline=2, microbatch=9, schedule=schedule, recompute="full")
    for forwards, blocks in run_on_ranks(count_forwards, 2, layout):
        assert forwards == 2 * blocks * SHORT.batch // layout.microbatch


@pytest.mark.parametrize("layout", TIED_LAYOUTS, ids=str)
def test_tied_embeddings_and_qk_norm_match_one_process(layout):
    assert_matches_one_process([(layout, with_tied_embeddings(SGD))])


@pytest.mark.parametrize("layouts", TIED_PIPELINES, ids=join_names)
def test_tied_embeddings_in_two_stages_match_one_process(layouts):
    recipe = with_tied_embeddings(with_enough_blocks(SHORT, layouts[0]))
    assert_matches_one_process([(layout, recipe) for layout in layouts])


def test_mup_matches_one_process():
    """Initial weights and learning rates are scaled by name, in every shard and stage."""
    base = BaseWidths(dim=8, n_heads=2, hidden_dim=22, n_kv_heads=1)
    untied = replace(SHORT, mup_base=base, lr=0.1)
    tied = replace(with_tied_embeddings(untied), lr=0.1)
    pipeline = Layout(pipeline=2, microbatch=6, shard=2)
    stages = [(pipeline, with_enough_blocks(recipe, pipeline)) for recipe in (untied, tied)]
    assert_matches_one_process([(Layout(shard=2, tensor=2), tied), *stages])


# Columns are sharded by tensor parallelism, vectors by FSDP, so units are on several ranks.
ADAPTIVE_LAYOUTS = [
    [Layout(), Layout(offload=True)],
    [
        Layout(shard=2),
        Layout(replicate=2),
        Layout(tensor=2),
        Layout(context=2),
        Layout(pipeline=2, microbatch=9),
    ],
    [Layout(shard=2, tensor=2), Layout(replicate=2, shard=2), Layout(tensor=4)],
]


@pytest.mark.parametrize("layouts", ADAPTIVE_LAYOUTS, ids=join_names)
def test_adaptive_clipping_matches_one_process(layouts):
    recipe = replace(SHORT, adaptive=5e-4)
    assert_matches_one_process(
        [(x, with_enough_blocks(recipe, x) if x.pipeline > 1 else recipe) for x in layouts]
    )


def test_adaptive_clipping_clips_some_units_and_the_reported_norm_is_of_before():
    clipped, plain = (one_process(replace(SHORT, adaptive=factor)) for factor in (5e-4, 0.0))
    assert clipped.norms[0] == plain.norms[0]
    whole, partly = set(), set()
    for name, gradient in clipped.gradients[0].items():
        same = (gradient == plain.gradients[0][name]).view(len(gradient), -1).all(1)
        whole |= {name} if not same.any() else set()
        partly |= {name} if same.any() and not same.all() else set()
    assert "norm.weight" in whole and "output.weight" not in whole | partly
    assert "layers.0.attention.wk.weight" in partly


def test_z_loss_matches_one_process_and_is_reported_separately():
    layouts = [
        Layout(tensor=2, chunk=100),
        Layout(tensor=2, loss_parallel=False),
        Layout(context=2, accumulate=2),
        Layout(pipeline=2, microbatch=3),
    ]
    recipe = replace(SHORT, z_loss=0.01)
    assert_matches_one_process(
        [(x, with_enough_blocks(recipe, x) if x.pipeline > 1 else recipe) for x in layouts]
    )


def test_every_clipped_layout_is_also_run_with_sgd():
    assert all(layout in [*LAYOUTS, *PIPELINES] for layout in CLIPPED)


def test_the_runs_with_clipping_are_clipped():
    """Otherwise the oracle would not test clipping."""
    norms = one_process(ADAMW).norms
    assert min(norms) > ADAMW.max_norm


def test_the_oracle_detects_an_update_that_is_wrong_by_a_factor():
    record, scaled = one_process(SGD), one_process(replace(SGD, lr=SGD.lr * 1.001))
    assert max(worst_error(scaled, record, tensors=True).values()) > 1e-5


def test_the_model_sizes_do_not_divide_evenly():
    """Otherwise a bug in uneven sharding would not be detected."""
    assert SIZES.vocab_size % 2 and SIZES.hidden_dim % 3
