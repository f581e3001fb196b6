"""Generate text: python scripts/generate.py --checkpoint outputs/checkpoint/step-100"""

from __future__ import annotations

import argparse
import signal
import sys

import checkout  # noqa: F401
from titanlite.checkpoint import find_newest_checkpoint
from titanlite.distributed.process_group import choose_device
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error, printable
from titanlite.generate import Sampling, load_generator
from titanlite.storage import StorageFolder


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="a step-N folder, or the folder of a run, whose newest valid checkpoint is used",
    )
    parser.add_argument(
        "--prompt", default="", help="text to continue (default: empty, which begins a document)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="default: 0.8; 0: always the most likely token",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens (default: 0, all)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with total probability P (default: 1.0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="needed if the checkpoint has no copy of its tokenizer"
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="default: auto, which is cuda if there is a GPU",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        checkpoint = find_newest_checkpoint(StorageFolder(args.checkpoint))
        generator = load_generator(checkpoint, choose_device(args.device), args.tokenizer)
        text = generator.complete(args.prompt, args.max_new_tokens, sampling)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    # End quietly if `| head` closes stdout. Set only now: libraries rely on SIGPIPE being ignored.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # a model may write sequences that control a terminal
    print(printable(args.prompt + text) if sys.stdout.isatty() else args.prompt + text)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
