"""Find the fastest layout of a model on a cluster; see --help."""

import sys

import checkout  # noqa: F401
from titanlite_cli import run_titanlite

if __name__ == "__main__":
    sys.exit(run_titanlite(["plan", *sys.argv[1:]]))
