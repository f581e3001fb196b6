"""Turn text into shards of token ids; see --help."""

import sys

import checkout  # noqa: F401
from titanlite_corpus.__main__ import COMMANDS
from titanlite_lab.dispatch import run_command

if __name__ == "__main__":
    sys.exit(run_command("titanlite_corpus", COMMANDS, ["prepare", *sys.argv[1:]]))
