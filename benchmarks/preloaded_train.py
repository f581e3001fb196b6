"""Import train.py, wait for one line of JSON arguments on stdin, then run it.

One process waits while another is measured, so that imports take no time of the budget. It does
not use the GPU before it runs.
"""

from __future__ import annotations

import json
import sys

import train

if __name__ == "__main__":
    line = sys.stdin.readline()
    if line:
        sys.exit(train.main(json.loads(line)))
