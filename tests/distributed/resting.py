"""The planner's bytes at rest for a layout of the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.distributed.oracle import Layout, Recipe
from titanlite.job import read_job
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite_planner.memory.job import estimate_job_memory


def estimate_rest(layout: Layout, recipe: Recipe) -> list[tuple[float, float, float]]:
    """(parameters, gradients, optimizer state) of each pipeline rank after backward."""
    base, section = read_job([], 1, here=False), layout.section(recipe)
    batch, length = layout.local_batch(recipe), recipe.seq_len
    splits = layout.transforms(recipe, torch.float32).splits_backward
    plan, problems = plan_pipeline(section, recipe.spec, recipe.sizes, length, batch, splits)
    assert plan is not None, problems
    training = replace(
        base.config.training,
        seq_len=length,
        local_batch_size=batch,
        dtype="float32",
        mixed_precision_param="float32",
    )
    job = replace(
        base,
        config=replace(
            base.config, parallelism=section, training=training, optimizer=recipe.section
        ),
        spec=recipe.spec,
        sizes=recipe.sizes,
        degrees=layout.degrees,
        pipeline=plan,
        global_batch=batch * layout.degrees.batch,
    )
    ranks = estimate_job_memory(job).ranks
    return [(rank.parameters, rank.rest_gradients, rank.optimizer_state) for rank in ranks]
