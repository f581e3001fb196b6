"""Collect Python's standard library as text.

  python -m titanlite_corpus collect-python --out python.jsonl

Every machine has this corpus. Writes one JSON line per source file, without tests and installed
packages.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, DataError, UserError, format_error
from titanlite.files import write_file_atomically
from titanlite.log import pluralize

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` must not end in a traceback
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, metavar="FILE.jsonl", help="file to write")
    args = parser.parse_args(argv)
    try:
        documents, size = collect(Path(sysconfig.get_paths()["stdlib"]), Path(args.out))
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{args.out}: {pluralize(documents, 'document')}, {size / 1e6:.1f} MB of text")
    return EXIT_DONE


def collect(library: Path, out: Path) -> tuple[int, int]:
    """Write every source file under `library` as a JSON line; returns (documents, bytes)."""
    lines, size = [], 0
    for path in sorted(source_files(library)):
        content = path.read_bytes()
        try:
            document = {"path": path.relative_to(library).as_posix(), "text": content.decode()}
        except UnicodeDecodeError:
            continue  # a few files are not UTF-8
        lines.append(json.dumps(document, ensure_ascii=False) + "\n")
        size += len(content)
    if not lines:
        raise DataError(f"{library}: this Python has no source files of its standard library.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(out, "".join(lines).encode())
    return len(lines), size


def source_files(library: Path) -> Iterator[Path]:
    """The .py files under a folder, without tests and installed packages."""
    for folder, below, names in os.walk(library):
        below[:] = [name for name in below if name not in EXCLUDED]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
