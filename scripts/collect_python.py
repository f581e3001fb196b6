"""Text that every machine has: python scripts/collect_python.py --out python.jsonl

The running Python's own library, one document a file, without its tests and without what was
installed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, DataError, UserError, format_error
from titanlite.files import write_whole_file

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, metavar="FILE.jsonl")
    args = parser.parse_args()
    try:
        documents, size = collect(Path(sysconfig.get_paths()["stdlib"]), Path(args.out))
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{args.out}: {documents} documents, {size / 1e6:.1f} MB of text")
    return EXIT_DONE


def collect(library: Path, out: Path) -> tuple[int, int]:
    """Write every source file under `library` as a line of JSON; how many, and their bytes."""
    lines, size = [], 0
    for path in sorted(source_files(library)):
        content = path.read_bytes()
        try:
            document = {"path": path.relative_to(library).as_posix(), "text": content.decode()}
        except UnicodeDecodeError:
            continue  # a few say their own encoding
        lines.append(json.dumps(document, ensure_ascii=False) + "\n")
        size += len(content)
    if not lines:
        raise DataError(f"{library}: this Python has no library in source.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole_file(out, "".join(lines).encode())
    return len(lines), size


def source_files(library: Path) -> Iterator[Path]:
    """The .py files under a folder, but for those of tests and of installed packages."""
    for folder, below, names in os.walk(library):
        below[:] = [name for name in below if name not in LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


if __name__ == "__main__":
    sys.exit(main())
