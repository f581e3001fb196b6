"""Traces jobs on a fake GPU, one for each line of JSON on its input; replies with a line each.

A process of its own, because it replaces parts of torch: see benchmarks/gpu_bytes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from benchmarks.gpu_bytes.fake_cuda import Trace, fake_cuda
from benchmarks.gpu_bytes.traced_run import trace_run


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a job prints goes to the log
    trace = Trace()
    with fake_cuda(trace):
        for line in sys.stdin:
            request = json.loads(line)
            try:
                reply = trace_run(trace, **request)
            except Exception:
                reply = {"error": traceback.format_exc()}
            print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
