"""Train in a clone: torchrun --nproc_per_node N train.py …; see titanlite/train.py."""

import sys

from titanlite.distributed.time_limit import exit_process
from titanlite.train import main

if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
