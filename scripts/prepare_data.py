"""Turn text into shards of token ids; see --help."""

import sys

import checkout  # noqa: F401
from titanlite_cli import run_titanlite

if __name__ == "__main__":
    sys.exit(run_titanlite(["prepare", *sys.argv[1:]]))
