"""train.py with its imports done: it starts when a line on stdin says with which settings.

One stands by while another is measured, so that nobody waits for imports; it touches no GPU before.
"""

from __future__ import annotations

import json
import sys

import train

if __name__ == "__main__":
    line = sys.stdin.readline()
    if line:
        sys.exit(train.main(json.loads(line)))
