"""Let a checkpoint write: python scripts/generate.py --checkpoint outputs/checkpoint/step-100"""

from __future__ import annotations

import argparse
import sys

from titanlite.checkpoint import find_newest_checkpoint
from titanlite.distributed.process_group import choose_device
from titanlite.errors import UserError, format_error
from titanlite.generate import Sampling, load_generator
from titanlite.storage import StorageFolder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint", required=True, help="a step-N folder, or a run: its newest valid one"
    )
    parser.add_argument("--prompt", default="", help="text to go on from; empty: a new document")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top-k", type=int, default=0, help="among the k likeliest; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="among the likeliest of this mass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", help="its file, where the checkpoint has no copy")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_args()
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        step = find_newest_checkpoint(StorageFolder(args.checkpoint))
        writer = load_generator(step, choose_device(args.device), args.tokenizer)
        text = writer.write(args.prompt, args.max_new_tokens, sampling)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return 2
    print(args.prompt + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
