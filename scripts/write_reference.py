"""Write docs/configuration.md from the schema: python scripts/write_reference.py"""

from __future__ import annotations

import argparse
from pathlib import Path

from titanlite.config_reference import reference_page
from titanlite.job import JobConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(reference_page(JobConfig), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
