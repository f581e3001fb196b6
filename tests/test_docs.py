"""A claim that names its test names one that is there."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

PAGES = ("SECURITY.md", "docs/faults.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page):
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", (ROOT / page).read_text("utf-8"))
    assert named
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or f"def {test}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert not missing, f"{page} names tests that are not there: {missing}"


def test_every_row_of_the_fault_table_names_a_test():
    rows = [
        r
        for r in (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines()
        if r.startswith("| ")
    ]
    rows = [row for row in rows if not row.startswith(("| fault", "| ---"))]
    assert rows and all("::test_" in row for row in rows), [r for r in rows if "::test_" not in r]
