"""Look into the checkpoints of a run: python scripts/checkpoint.py ls outputs/checkpoint

ls      every step, whole or not, and those set aside, with their size and how they were saved
verify  read every byte and compare it with what was written; exit 2 if any is not
show    what one checkpoint holds
newest  print the path of the newest valid checkpoint
rm      remove one checkpoint
"""

from __future__ import annotations

import argparse
import json
import sys

from titanlite.checkpoint import (
    check_hashes,
    find_newest_checkpoint,
    list_steps,
    read_checkpoint_manifest,
    step_and_number,
)
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, CheckpointError, UserError, format_error
from titanlite.storage import StorageFolder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=["ls", "verify", "show", "newest", "rm"])
    parser.add_argument("place", help="a run, its checkpoint folder, or one step-N")
    args = parser.parse_args(argv)
    acts = {"ls": show_all, "verify": verify, "show": show, "newest": newest, "rm": remove}
    try:
        return acts[args.act](StorageFolder(args.place))
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR


def show_all(place: StorageFolder) -> int:
    for step, aside in steps_of(place):
        note = "set aside  " if aside else ""
        try:
            manifest = read_checkpoint_manifest(step)
        except CheckpointError as error:
            print(f"{step.name:<18} {note}not whole: {error.message.removeprefix(f'{step}: ')}")
            continue
        parts = "weights, moments" if manifest.has("optimizer") else "weights alone"
        print(
            f"{step.name:<18} {manifest.bytes / 1e6:>10,.1f} MB  {len(manifest.files):>5} files"
            f"  {note}{parts}  position {manifest.progress.get('position')}  {manifest.layout}"
        )
    return EXIT_DONE


def verify(place: StorageFolder) -> int:
    bad = 0
    for step, aside in steps_of(place):
        if aside:  # this was found wanting, or left behind
            continue
        try:
            manifest = read_checkpoint_manifest(step)
            check_hashes(step, manifest, manifest.files)
            print(f"{step}: {len(manifest.files)} files, {manifest.bytes:,} bytes, all true")
        except CheckpointError as error:
            bad += 1
            print(error)
    return EXIT_USER_ERROR if bad else EXIT_DONE


def show(place: StorageFolder) -> int:
    manifest = read_checkpoint_manifest(place)
    position, tokens = (manifest.progress.get(key) for key in ("position", "tokens"))
    print(f"{place}: step {manifest.step}, position {position}, {tokens} tokens")
    print(f"  saved under {manifest.layout}, in {manifest.seconds:.1f} s, by {manifest.versions}")
    if manifest.lease:
        print(f"  under lease number {manifest.lease} of its folder")
    print(f"  facts {json.dumps(manifest.facts, ensure_ascii=False)}")
    for name, file in manifest.files.items():
        print(f"  {file.bytes:>14,} bytes  {file.hash}  {name}")
    for name, tensor in manifest.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "one number"
        print(f"  {tensor.dtype:>9}  {tensor.hash}  {name} [{shape}]")
    return EXIT_DONE


def newest(place: StorageFolder) -> int:
    print(find_newest_checkpoint(place))
    return EXIT_DONE


def remove(place: StorageFolder) -> int:
    if not place.name.startswith("step-"):
        raise CheckpointError(f"{place}: is not one checkpoint.", fix="Name a step-N folder.")
    if not place.exists():
        raise CheckpointError(f"{place}: there is no such folder.")
    place.remove(first="manifest.json")
    print(f"{place}: removed")
    return EXIT_DONE


def steps_of(place: StorageFolder) -> list[tuple[StorageFolder, bool]]:
    """The step itself, or those of a checkpoint folder, or of the run it is in.

    With each, whether it is set aside; one that is named itself is taken as it is.
    """
    if place.name.startswith("step-"):
        return [(place, False)]
    for folder in (place, place / "checkpoint"):
        found = list_steps(folder)
        steps = [f"step-{step}" for step in found.steps]
        removed = [name for name in found.unfinished if not name.endswith(".removed")]
        if names := sorted([*steps, *found.aside, *removed], key=step_and_number):
            return [(folder / name, name in found.aside) for name in names]
    raise CheckpointError(f"{place}: holds no checkpoints.", fix="Name a run, or a step-N folder.")


if __name__ == "__main__":
    sys.exit(main())
