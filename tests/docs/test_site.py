"""The documentation as a site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import HANG_SECONDS, ROOT

pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[docs]'")
# of tags that a browser loads by itself; links to other hosts are fine
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(https?:[^"' >]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_link_of_the_site_leads_to_a_page_with_that_heading(site):
    """Strictly built: a link, an anchor or a page outside of the navigation fails the build."""
    for page in (
        "",
        "docs/tutorial/quickstart",
        "titanlite/models/llama.py",
        "titanlite/job/__init__.py",
    ):
        assert (site / page / "index.html").exists()


def test_a_page_loads_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    loaded = {url for page in pages for url in LOADED.findall(page.read_text("utf-8"))}
    assert not loaded
