"""The corpus: python -m titanlite_corpus COMMAND."""

from __future__ import annotations

import sys

from titanlite_lab.dispatch import run_command

COMMANDS = {
    "prepare": "shards from text, by a recipe or only tokenized; --verify",
    "inspect": "samples by number, position or step; texts in a corpus; dumps of the guard",
    "collect-python": "the source text of Python's own standard library",
}

if __name__ == "__main__":
    sys.exit(run_command("titanlite_corpus", COMMANDS, sys.argv[1:]))
