"""train.py with its imports done; it starts when a line of stdin, JSON, has its arguments.

One process waits like this while another is measured, so that imports take no time of the budget.
It does not use the GPU before it starts.
"""

from __future__ import annotations

import json
import sys

import train

if __name__ == "__main__":
    line = sys.stdin.readline()
    if line:
        sys.exit(train.main(json.loads(line)))
