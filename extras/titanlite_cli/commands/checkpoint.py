"""Inspect, verify and convert checkpoints: titanlite checkpoint ls outputs/my_run

commands:
  ls      list all checkpoints, including unfinished ones and those set aside
  verify  compare all bytes with the hashes in the manifests; exit code 2 if a checkpoint is not
          valid or its save is not finished
  show    print the manifest of one checkpoint: job properties, files and tensors
  newest  print the path of the newest valid checkpoint
  rm      remove one checkpoint
  to-hf   write a folder for transformers' AutoModelForCausalLM and AutoTokenizer
  from-hf write a checkpoint with only weights from a Hugging Face folder, for
          checkpoint.initial_load_path and titanlite generate
  average write a checkpoint with only weights: the mean of the weights of several checkpoints, or
          of one the average that its run kept ([weight_average])

to-hf and from-hf have at most one shard in memory at a time, average one tensor.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from titanlite.checkpoint import (
    CheckpointManifest,
    check_hashes,
    list_steps,
    read_checkpoint_manifest,
    step_sort_key,
    to_hugging_face,
)
from titanlite.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    CheckpointError,
    UserError,
    format_error,
    printable,
)
from titanlite.log import configure_log, log_waiting, pluralize
from titanlite.storage import StorageFolder, is_url
from titanlite_lab.checkpoints import (
    average_checkpoints,
    find_newest_checkpoint,
    from_hugging_face,
)


def main(argv: list[str]) -> int:
    configure_log()
    if any(map(is_url, argv)):  # a remote store that disconnects sends SIGPIPE
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    args = checkpoint_arguments(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR


def checkpoint_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def on_folder(action: Callable[[StorageFolder], int]) -> Callable[[argparse.Namespace], int]:
        return lambda args: action(StorageFolder(args.folder))

    def add(name: str, run: Callable[[argparse.Namespace], int], folder: str):
        command = commands.add_parser(name)
        command.add_argument("folder", help=f"{folder}; or a URL of one")
        command.set_defaults(run=run)
        return command

    run_folder = "a run (its job.dump_folder), its checkpoint folder, or a step-N folder"
    add("ls", on_folder(list_checkpoints), run_folder)
    add("verify", on_folder(verify_checkpoints), run_folder)
    add("newest", on_folder(print_newest), run_folder)
    add("show", on_folder(show_checkpoint), "a step-N folder")
    add("rm", on_folder(remove_checkpoint), "a step-N folder")
    export = add("to-hf", export_checkpoint, f"{run_folder} (a run: its newest valid checkpoint)")
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
    add(
        "from-hf", import_folder, "a Hugging Face folder with config.json and safetensors"
    ).add_argument("out", help="a new folder")
    average = commands.add_parser("average")
    average.add_argument(
        "folders", nargs="+", help=f"{run_folder} (a run: its newest valid checkpoint)"
    )
    average.add_argument("--out", required=True, help="a new folder, best named step-N")
    average.set_defaults(run=average_folders)
    return parser.parse_args(argv)


def list_checkpoints(folder: StorageFolder) -> int:
    for step_folder, is_aside in find_step_folders(folder):
        note = "set aside  " if is_aside else ""
        try:
            manifest = read_checkpoint_manifest(step_folder)
        except CheckpointError as error:
            reason = error.message.removeprefix(f"{step_folder}: ")
            print(f"{step_folder.name:<18} {note}not valid: {reason}")
            continue
        parts = "weights, optimizer" if manifest.has("optimizer") else "weights only"
        print(
            f"{step_folder.name:<18} {manifest.bytes / 1e6:>10,.1f} MB  {len(manifest.files):>5}"
            f" files  {note}{parts}  position {manifest.progress.get('position')}"
            f"  {manifest.layout}"
        )
    return EXIT_DONE


def verify_checkpoints(folder: StorageFolder) -> int:
    """Check all files of all checkpoints but those set aside, which no run would load."""
    invalid = 0
    for step_folder, is_aside in find_step_folders(folder):
        if is_aside:
            continue
        try:
            manifest = read_checkpoint_manifest(step_folder)
            check_hashes(step_folder, manifest, manifest.files)
        except CheckpointError as error:
            invalid += 1
            print(error)
        else:
            files = f"{pluralize(len(manifest.files), 'file')}, {manifest.bytes:,} bytes"
            print(f"{step_folder}: {files}, all hashes match")
    return EXIT_USER_ERROR if invalid else EXIT_DONE


def show_checkpoint(folder: StorageFolder) -> int:
    manifest = read_checkpoint_manifest(folder)
    print(folder)
    print_table(summary_rows(manifest))
    print("\njob properties (compared on resume: see checkpoint.allow_changes)")
    print_table(property_rows(manifest.facts))
    print("\nfiles: bytes, xxh3_128, name")
    for name, file in manifest.files.items():
        print(f"  {file.bytes:>14,}  {file.hash}  {name}")
    print("\ntensors: dtype, sum of xxh3_64, name [shape]")
    for name, tensor in manifest.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        print(f"  {tensor.dtype:>9}  {tensor.hash}  {name} [{shape}]")
    return EXIT_DONE


def summary_rows(manifest: CheckpointManifest) -> list[tuple[str, str]]:
    position, tokens = (manifest.progress.get(key) for key in ("position", "tokens"))
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    rows = [
        ("step", f"{manifest.step:,}"),
        ("position", "none: weights only" if position is None else f"{position:,} samples"),
        ("tokens", "none: weights only" if tokens is None else f"{tokens:,}"),
        ("layout", manifest.layout),
        ("size", f"{manifest.bytes / 1e6:,.1f} MB, saved in {manifest.seconds:.1f} s"),
        ("versions", versions),
    ]
    if manifest.lease:
        rows.append(("lease number", str(manifest.lease)))
    return rows


def property_rows(properties: dict[str, Any]) -> list[tuple[str, str]]:
    """One row per property, or per entry of a property that is a table."""
    rows = []
    for name, value in properties.items():
        table = value if isinstance(value, dict) else {}
        rows += [(f"{name}: {key}", json.dumps(entry)) for key, entry in table.items()]
        if not table:
            rows.append((name, json.dumps(value)))
    return rows


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Print two aligned columns; a checkpoint from a stranger may have control characters."""
    rows = [(printable(name), printable(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def print_newest(folder: StorageFolder) -> int:
    print(find_newest_checkpoint(folder))
    return EXIT_DONE


def remove_checkpoint(folder: StorageFolder) -> int:
    if not folder.name.startswith("step-"):
        raise CheckpointError(f"{folder}: is not one checkpoint.", fix="Give a step-N folder.")
    if not folder.exists():
        raise CheckpointError(f"{folder}: does not exist.")
    folder.remove(delete_first="manifest.json")
    print(f"{folder}: removed")
    return EXIT_DONE


def average_folders(args: argparse.Namespace) -> int:
    sources = [find_newest_checkpoint(StorageFolder(folder)) for folder in args.folders]
    out = StorageFolder(args.out)
    print(f"{out}: {average_checkpoints(sources, out)}")
    return EXIT_DONE


def find_step_folders(folder: StorageFolder) -> list[tuple[StorageFolder, bool]]:
    """The step folders of a run or checkpoint folder, each with whether it is set aside.

    A step folder itself is returned as it is. Raises CheckpointError if there is none.
    """
    if folder.name.startswith("step-"):
        return [(folder, False)]
    for parent in (folder, folder / "checkpoint"):
        listing = list_steps(parent)
        names = [f"step-{step}" for step in listing.steps] + listing.aside
        names += [name for name in listing.unfinished if not name.endswith(".removed")]
        if names:
            names.sort(key=step_sort_key)
            return [(parent / name, name in listing.aside) for name in names]
    raise CheckpointError(
        f"{folder}: contains no checkpoints.", fix="Give a run, or a step-N folder."
    )


def export_checkpoint(args: argparse.Namespace) -> int:
    checkpoint = find_newest_checkpoint(StorageFolder(args.folder))
    with log_waiting(f"exporting {checkpoint}"):
        note = to_hugging_face(
            checkpoint,
            StorageFolder(args.out),
            dtype=args.dtype and getattr(torch, args.dtype),
            tokenizer=args.tokenizer,
            max_shard_bytes=int(args.max_shard_gb * 1e9),
        )
    print(f"{args.out}: exported from {checkpoint}. {note}")
    return EXIT_DONE


def import_folder(args: argparse.Namespace) -> int:
    with log_waiting(f"converting {args.folder}"):
        manifest = from_hugging_face(StorageFolder(args.folder), StorageFolder(args.out))
    size = f"{pluralize(len(manifest.tensors), 'tensor')}, {manifest.bytes / 1e6:,.1f} MB"
    print(f"{args.out}: {size}")
    return EXIT_DONE
