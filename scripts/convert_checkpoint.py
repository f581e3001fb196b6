"""Convert checkpoints to and from Hugging Face folders.

  python scripts/convert_checkpoint.py to-hf outputs/my_run exported
  python scripts/convert_checkpoint.py from-hf Llama-3.2-1B converted/llama

to-hf writes a folder for transformers' AutoModelForCausalLM and AutoTokenizer. from-hf writes a
checkpoint with only weights, for checkpoint.initial_load_path and scripts/generate.py. Both have
at most one shard in memory at a time.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch

import checkout  # noqa: F401
from titanlite.checkpoint import find_newest_checkpoint, from_hugging_face, to_hugging_face
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.log import configure_log, log_waiting, pluralize
from titanlite.storage import StorageFolder, is_url


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("to-hf", help="checkpoint -> Hugging Face folder")
    export.add_argument("checkpoint", help="a step-N folder, or a run: its newest valid checkpoint")
    export.add_argument("out", help="a new folder")
    export.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights; default: as saved",
    )
    export.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer file, if the checkpoint has no copy of it"
    )
    export.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="of one safetensors file, in GB; default: 5"
    )
    convert = commands.add_parser("from-hf", help="Hugging Face folder -> checkpoint")
    convert.add_argument("folder", help="with config.json and safetensors")
    convert.add_argument("out", help="a new folder")
    args = parser.parse_args(argv)
    try:
        if args.command == "to-hf":
            export_checkpoint(args)
        else:
            with log_waiting(f"converting {args.folder}"):
                manifest = from_hugging_face(StorageFolder(args.folder), StorageFolder(args.out))
            size = f"{pluralize(len(manifest.tensors), 'tensor')}, {manifest.bytes / 1e6:,.1f} MB"
            print(f"{args.out}: {size}")
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE


def export_checkpoint(args: argparse.Namespace) -> None:
    checkpoint = find_newest_checkpoint(StorageFolder(args.checkpoint))
    with log_waiting(f"exporting {checkpoint}"):
        note = to_hugging_face(
            checkpoint,
            StorageFolder(args.out),
            dtype=args.dtype and getattr(torch, args.dtype),
            tokenizer=args.tokenizer,
            max_shard_bytes=int(args.max_shard_gb * 1e9),
        )
    print(f"{args.out}: exported from {checkpoint}. {note}")


if __name__ == "__main__":
    configure_log()
    if not any(map(is_url, sys.argv)):  # a remote store that disconnects sends SIGPIPE, too
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` is not an error
    sys.exit(main())
