"""Checkpoints to and from Hugging Face.

python scripts/convert_checkpoint.py to-hf outputs/my_run/checkpoint/step-500 exported
python scripts/convert_checkpoint.py from-hf Llama-3.2-1B converted/llama

to-hf writes what transformers' AutoModelForCausalLM and AutoTokenizer open. from-hf writes a
checkpoint of the weights alone, for checkpoint.initial_load_path and scripts/generate.py. Neither
ever has more than one shard in memory.
"""

from __future__ import annotations

import argparse
import sys

import torch

from titanlite.checkpoint import from_hugging_face, to_hugging_face
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.storage import StorageFolder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(dest="way", required=True)
    to = ways.add_parser("to-hf", help="a checkpoint becomes a Hugging Face folder")
    to.add_argument("checkpoint", help="a step-N folder")
    to.add_argument("out", help="a new folder")
    to.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="as saved if unset")
    to.add_argument("--tokenizer", help="its file, where the checkpoint has no copy")
    to.add_argument("--max-shard-gb", type=float, default=5.0, help="of one safetensors file")
    back = ways.add_parser("from-hf", help="a Hugging Face folder becomes a checkpoint")
    back.add_argument("folder", help="with config.json and safetensors")
    back.add_argument("out", help="a new folder")
    args = parser.parse_args(argv)
    try:
        if args.way == "to-hf":
            dtype = args.dtype and getattr(torch, args.dtype)
            options = {"dtype": dtype, "tokenizer": args.tokenizer}
            most = int(args.max_shard_gb * 1e9)
            step, out = StorageFolder(args.checkpoint), StorageFolder(args.out)
            note = to_hugging_face(step, out, max_shard_bytes=most, **options)
            print(f"{args.out}: written. {note}")
        else:
            made = from_hugging_face(StorageFolder(args.folder), StorageFolder(args.out))
            print(f"{args.out}: {len(made.tensors)} tensors, {made.bytes / 1e6:,.1f} MB")
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
