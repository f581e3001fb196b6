"""The oracle finds faults: each one that is planted in the trainer fails the case that it names."""

from __future__ import annotations

import re

import pytest

from conftest import ROOT
from tests.distributed.oracle import one_process, parse_layouts
from tests.distributed.planted import FAULTS, QUICK, run_planted
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_oracle import RECIPES, ROWS, find_errors, recipe_for


@pytest.fixture(scope="module")
def found(request) -> dict[str, str]:
    """What the oracle says of each planted fault; empty: nothing."""
    names = [*FAULTS] if request.config.getoption("--planted") else [*QUICK]
    cases = []
    for name in names:
        (layout,) = parse_layouts(FAULTS[name].layout)
        cases.append((name, layout, recipe_for(FAULTS[name].recipe, layout)))
    assert {layout.degrees.ranks for _, layout, _ in cases} == {2}
    by_rank = run_on_ranks(run_planted, 2, cases)
    return {
        name: _judge(name, layout, recipe, records)
        for (name, layout, recipe), *records in zip(cases, *by_rank, strict=True)
    }


def _judge(name, layout, recipe, records) -> str:
    if errors := [record for record in records if isinstance(record, str)]:
        return errors[0]
    expected = one_process(recipe)
    if FAULTS[name].everywhere:
        with FAULTS[name].planted():
            expected = one_process.__wrapped__(recipe)  # not the one that is cached
    try:
        errors = find_errors(layout, recipe, records, expected)
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


@pytest.mark.parametrize("name", FAULTS)
def test_the_oracle_finds_a_planted_fault(name, found, request):
    if name not in found:
        pytest.skip("runs with --planted")
    print(f"{name} | {FAULTS[name].recipe}: {FAULTS[name].layout} | {found[name]}")  # pytest -rP
    assert FAULTS[name].found_in in found[name]


def test_every_fault_is_planted_in_a_case_of_the_oracle():
    pairs = [pair for row in ROWS for pair in row]
    tested = {(name, str(layout)) for name, layouts in pairs for layout in parse_layouts(layouts)}
    claimed = {
        (fault.recipe, str(layout))
        for fault in FAULTS.values()
        for layout in parse_layouts(fault.layout)
    }
    assert not claimed - tested
    assert {fault.recipe for fault in FAULTS.values()} <= RECIPES.keys()


def test_the_page_lists_every_fault():
    page = (ROOT / "docs/explanation/numerics.md").read_text("utf-8")
    table = page.partition("\n### What the oracle finds\n")[2]
    listed = re.findall(r"^\| (.+?) \| `(.+?): (.+?)` \|", table, re.M)
    assert listed == [(name, fault.recipe, fault.layout) for name, fault in FAULTS.items()]
