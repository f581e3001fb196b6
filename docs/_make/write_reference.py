"""Regenerate what the documentation copies from the code: python docs/_make/write_reference.py

- docs/reference/configuration.md, from the schema of the configuration
- docs/reference/recipe.md, from the schema of a recipe of a corpus
- the line counts of packages in README.md
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from titanlite.config_reference import reference_page
from titanlite.job import JobConfig
from titanlite_corpus.read import CorpusSource
from titanlite_corpus.recipe import Recipe

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
RECIPE = ROOT / "docs" / "reference" / "recipe.md"
README = ROOT / "README.md"
PACKAGES = "<!-- packages -->"  # before and after the table of packages


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    pages = {
        CONFIGURATION: reference_page(JobConfig),
        RECIPE: reference_page(Recipe, "Recipe", {"sources": CorpusSource}),
        README: update_line_counts(ROOT, README.read_text("utf-8")),
    }
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")


def update_line_counts(root: Path, text: str) -> str:
    """The README with new line counts, rounded to tens, in its table of packages."""
    before, table, after = text.split(PACKAGES)
    rows = [_update_row(root, row) for row in table.splitlines(keepends=True)]
    return f"{before}{PACKAGES}{''.join(rows)}{PACKAGES}{after}"


def _update_row(root: Path, row: str) -> str:
    path, cells = linked_path(row), row.rstrip("\n").split("|")
    if path is None:
        return row
    cells[-2] = f" {round(count_lines(root / path), -1):,} "
    return "|".join(cells) + "\n"


def linked_path(row: str) -> str | None:
    """The path that the first link of a table row leads to."""
    link = re.search(r"\]\(([^)]+)\)", row)
    return link[1] if link else None


def count_lines(path: Path) -> int:
    """Lines of a Python file, or of all Python files of a folder."""
    files = [path] if path.is_file() else list(path.rglob("*.py"))
    files = [file for file in files if "tests" not in file.parts]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files)


if __name__ == "__main__":
    main()
