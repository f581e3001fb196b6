"""The replica check names the rank whose state differs by one bit, and no rank of a healthy run."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
import torch

from tests.distributed.oracle import ADAMW, Layout, Record, run_until, start_run, with_enough_blocks
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import MOE, MOE_EXPERTS, MOE_SIZES
from titanlite.distributed.collectives import local_shard
from titanlite.meters.replica_check import ROW, ROWS, ReplicaCheck, find_differing_ranks, hash_bits

RECIPE = replace(ADAMW, batch=12, steps=2)
WEIGHT = "layers.1.feed_forward.w2.weight"
MOMENT = f"exp_avg_sq of {WEIGHT}"
NORM = "layers.0.ffn_norm.weight"


def flip_a_bit(tensor: torch.Tensor, bit: int = 3) -> None:
    """Flip one bit of the last element."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    flat = local_shard(tensor.detach()).view(-1)
    flat.view(integers[tensor.element_size()])[-1] ^= 1 << bit


def damage(state, what: str) -> None:
    parameters = dict(state.model.named_parameters()) | dict(state.model.named_buffers())
    if what == "generator":
        torch.rand(1)
    elif what.startswith("exp_avg_sq of "):
        flip_a_bit(state.optimizer.state[parameters[what.split()[-1]]]["exp_avg_sq"])
    elif what.startswith("step of "):
        state.optimizer.state[parameters[what.split()[-1]]]["step"] += 1
    else:
        flip_a_bit(parameters[what])


def findings_of(cases, base=RECIPE) -> list[tuple[list, list]]:
    """For each (layout, rank, damaged value): (findings after two steps, after the damage)."""
    results = []
    for layout, rank, what in cases:
        recipe = with_enough_blocks(base, layout) if layout.pipeline > 1 else base
        state, engine, mesh = start_run(layout, recipe)
        run_until(state, engine, mesh, recipe, Record(), recipe.steps)
        check = ReplicaCheck(state, mesh)
        healthy = check.find()
        if torch.distributed.get_rank() == rank:
            damage(state, what)
        results.append((healthy, [tuple(finding) for finding in check.find()]))
        torch.manual_seed(0)
    return results


CASES = {  # (layout, damaged rank, value) -> (named ranks, compared ranks, first value)
    2: [
        ((Layout(replicate=2), 1, WEIGHT), ([0, 1], 2, WEIGHT)),
        ((Layout(replicate=2), 0, MOMENT), ([0, 1], 2, MOMENT)),
        ((Layout(replicate=2), 0, f"step of {NORM}"), ([0, 1], 2, f"step of {NORM}")),
        ((Layout(tensor=2), 1, NORM), ([0, 1], 2, NORM)),
        ((Layout(tensor=2), 1, WEIGHT), None),  # each rank has another shard: no replica
        ((Layout(shard=2), 1, "generator"), ([0, 1], 2, "generators")),
        ((Layout(pipeline=2, microbatch=3), 1, "generator"), ([0, 1], 2, "generators")),
    ],
    3: [((Layout(replicate=3), 1, WEIGHT), ([1], 3, WEIGHT))],
    4: [
        ((Layout(replicate=2, shard=2), 3, NORM), ([1, 3], 2, NORM)),
        ((Layout(context=2, tensor=2), 2, "generator"), ([2], 4, "generators")),
        ((Layout(tensor=4), 2, NORM), ([2], 4, NORM)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("ranks", CASES)
def test_one_flipped_bit_names_the_odd_rank_and_a_healthy_run_none(ranks):
    cases = [case for case, _ in CASES[ranks]]
    for results in run_on_ranks(findings_of, ranks, cases):
        for (case, named), (healthy, damaged) in zip(CASES[ranks], results, strict=True):
            assert healthy == [], str(case[0])
            odd, compared, value = named or ([], 0, "")
            hosts = [socket.gethostname()] * len(odd)
            assert damaged == ([(odd, hosts, compared, value)] if named else []), str(case)


def healthy_findings(cases: list[tuple[Layout, str]]) -> list[list]:
    findings = []
    for layout, optimizer in cases:
        recipe = replace(RECIPE, optimizer=optimizer)
        state, engine, mesh = start_run(layout, recipe)
        run_until(state, engine, mesh, recipe, Record(), recipe.steps)
        findings.append(ReplicaCheck(state, mesh).find())
    return findings


def test_optimizers_that_compute_whole_matrices_on_one_rank_keep_replicas_equal():
    """Four tensor-parallel ranks have replicas of the projections to two key-value heads."""
    layouts, optimizers = (Layout(replicate=2, shard=2), Layout(tensor=4)), ("Muon", "SOAP")
    cases = [(layout, optimizer) for layout in layouts for optimizer in optimizers]
    assert run_on_ranks(healthy_findings, 4, cases) == [[[]] * 4] * 4


def test_without_a_majority_all_replicas_are_named():
    hashes = {0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 2}, 2: {"a": 1, "b": 3}, 3: {"a": 4, "b": 2}}
    hosts = dict.fromkeys(hashes, "node")
    assert find_differing_ranks(hashes, hosts).ranks == [0, 1, 2, 3]
    hashes[3] = {"a": 1, "b": 2}
    assert find_differing_ranks(hashes, hosts)[:1] + find_differing_ranks(hashes, hosts)[2:] == (
        [2],
        4,
        "b",
    )
    hashes[2] = {"a": 1}  # state that a rank does not have
    assert find_differing_ranks(hashes, hosts)[::3] == ([2], "b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_every_bit_of_every_element_changes_the_hash(dtype):
    tensor = torch.randint(0, 256, (7, 24), dtype=torch.uint8).view(dtype)
    hashes = {hash_bits(tensor).item()}
    octets = tensor.view(torch.uint8).view(-1)
    for position in range(len(octets)):
        for bit in range(8):
            octets[position] ^= 1 << bit
            hashes.add(hash_bits(tensor).item())
            octets[position] ^= 1 << bit
    assert len(hashes) == 1 + 8 * len(octets)


def test_the_hash_depends_on_the_order_and_not_on_the_chunks(monkeypatch):
    values = torch.arange(3.0 * ROW + 100)
    whole = hash_bits(values).item()
    swapped_rows = torch.cat((values[ROW : 2 * ROW], values[:ROW], values[2 * ROW :]))
    swapped_elements = values[torch.arange(len(values)) ^ 1]
    assert len({whole, *(hash_bits(v).item() for v in (swapped_rows, swapped_elements))}) == 3
    monkeypatch.setitem(ROWS, "cpu", 2)
    assert hash_bits(values).item() == whole
    assert hash_bits(torch.zeros(0)).item() == 0


def test_a_flipped_bit_of_an_expert_names_its_replicas():
    layout, expert = Layout(replicate=2, shard=2, expert=2), "layers.1.moe.experts.w2"
    case = (layout, 3, expert)
    for ((healthy, damaged),) in run_on_ranks(findings_of, 4, [case], MOE):
        assert healthy == []
        assert [finding[0] for finding in damaged] == [[1, 3]]


def test_a_flipped_bit_of_a_selection_bias_is_found_on_all_ranks_that_have_it():
    """It is no parameter, but it selects experts: ranks would route the same token differently."""
    sizes = replace(MOE_SIZES, experts=replace(MOE_EXPERTS, score="sigmoid", selection_bias=True))
    bias, recipe = "layers.1.moe.router.expert_bias", replace(MOE, sizes=sizes)
    cases = [(layout, 1, bias) for layout in (Layout(replicate=2), Layout(shard=2, expert=2))]
    for rank in run_on_ranks(findings_of, 2, cases, recipe):
        for healthy, damaged in rank:
            assert healthy == []
            assert [(finding[0], finding[3]) for finding in damaged] == [([0, 1], bias)]
