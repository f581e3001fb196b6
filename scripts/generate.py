"""Generate text from a checkpoint; see --help."""

import sys

import checkout  # noqa: F401
from titanlite_cli import run_titanlite

if __name__ == "__main__":
    sys.exit(run_titanlite(["generate", *sys.argv[1:]]))
