"""The rules of the field for layouts follow from the estimates; the search has no such rule."""

from __future__ import annotations

import dataclasses

import pytest

from titanlite_planner.plan.request import PlanArguments, PlanRequest, read_plan_request
from titanlite_planner.plan.search import LayoutSearch, PlannedLayout

LESS = ["micro_batch=1", "offload_activations=no", "offload_optimizer=no"]  # a quicker search


def request_of(
    *fix: str, gpus: str = "128xH100", batch: int = 64, model: str = "llama3/70B"
) -> PlanRequest:
    arguments = PlanArguments(
        model=model, gpus=gpus, seq_len="8192", global_batch=str(batch), fix=[*LESS, *fix]
    )
    return read_plan_request(arguments)


def fastest(request: PlanRequest) -> PlannedLayout:
    return LayoutSearch(request.space, request.target, 1).run().best[0]


def with_link_domain(request: PlanRequest, gpus: int) -> PlanRequest:
    machine = dataclasses.replace(request.cluster.machine, gpus=gpus, link_domain=gpus)
    return dataclasses.replace(
        request, cluster=dataclasses.replace(request.cluster, machine=machine)
    )


def test_tensor_parallel_stays_inside_the_link_domain():
    fixed = ("pipeline=1", "context=1")
    inside, outside = request_of("tensor=8", *fixed), request_of("tensor=16", *fixed)
    slower = fastest(outside).time.total / fastest(inside).time.total
    wider = fastest(with_link_domain(outside, 16)).time.total
    assert slower > 1.1
    assert wider < 0.95 * fastest(outside).time.total


def test_the_pipeline_is_for_slow_networks():
    """Pipeline ranks are on different machines, and send the least."""
    request = request_of("context=1", "tensor=8", "schedule=1F1B", batch=256)
    machine = dataclasses.replace(request.cluster.machine, network_gbit_per_s=20.0)
    slow = dataclasses.replace(
        request, cluster=dataclasses.replace(request.cluster, machine=machine)
    )
    fast_degrees, slow_degrees = (fastest(each).choice.frame.degrees for each in (request, slow))
    assert slow_degrees.pipeline > fast_degrees.pipeline


def test_replicas_are_across_machines_and_shards_inside():
    """With a slow network, accumulation, and a model that fits a machine: a replica for each.

    If replicas reduced the gradients of every micro-batch, they would send more than FSDP does.
    """
    fixed = ("pipeline=1", "context=1", "tensor=1")
    request = request_of(*fixed, gpus="64xH100", model="llama3/8B", batch=512)
    parallelism = dataclasses.replace(
        request.base.parallelism, fsdp_gradient_reduction="last_microbatch"
    )
    base = dataclasses.replace(request.base, parallelism=parallelism)
    machine = dataclasses.replace(request.cluster.machine, network_gbit_per_s=20.0)
    slow = dataclasses.replace(
        request, base=base, cluster=dataclasses.replace(request.cluster, machine=machine)
    )
    degrees = fastest(slow).choice.frame.degrees
    assert (degrees.replicate, degrees.shard) == (8, 8)


def test_a_larger_batch_lowers_the_bubble():
    fixed = ("pipeline=8", "tensor=8", "schedule=1F1B", "context=1")
    small, large = (fastest(request_of(*fixed, batch=batch)).time for batch in (32, 256))
    assert small.bubble / small.total > 2 * large.bubble / large.total
    assert large.bubble == pytest.approx(small.bubble, rel=0.05)  # in seconds, it is the same
