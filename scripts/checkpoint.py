"""Look into the checkpoints of a run: python scripts/checkpoint.py ls outputs/checkpoint

ls      every step, whole or not, with its size and how it was saved
verify  read every byte and compare it with what was written; exit 2 if any is not
show    what one checkpoint holds
newest  print the path of the newest valid checkpoint
rm      remove one checkpoint
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from titanlite.checkpoint import Place, check_hashes, newest_checkpoint, read_manifest
from titanlite.errors import EXIT_DONE, EXIT_USER, CheckpointError, UserError, report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=["ls", "verify", "show", "newest", "rm"])
    parser.add_argument("place", help="a run, its checkpoint folder, or one step-N")
    args = parser.parse_args(argv)
    acts = {"ls": list_steps, "verify": verify, "show": show, "newest": newest, "rm": remove}
    try:
        return acts[args.act](Place(args.place))
    except UserError as error:
        print(report(error), file=sys.stderr)
        return EXIT_USER


def list_steps(place: Place) -> int:
    for step in steps_of(place):
        try:
            manifest = read_manifest(step)
        except CheckpointError as error:
            print(f"{step.name:<18} not whole: {error.message.removeprefix(f'{step}: ')}")
            continue
        parts = "weights, moments" if manifest.has("optimizer") else "weights alone"
        print(
            f"{step.name:<18} {manifest.bytes / 1e6:>10,.1f} MB  {len(manifest.files):>5} files"
            f"  {parts}  position {manifest.progress.get('position')}  {manifest.layout}"
        )
    return EXIT_DONE


def verify(place: Place) -> int:
    bad = 0
    for step in steps_of(place):
        if ".aside-" in step.name and step is not place:  # this was found wanting, or left behind
            continue
        try:
            manifest = read_manifest(step)
            check_hashes(step, manifest, manifest.files)
            print(f"{step}: {len(manifest.files)} files, {manifest.bytes:,} bytes, all true")
        except CheckpointError as error:
            bad += 1
            print(error)
    return EXIT_USER if bad else EXIT_DONE


def show(place: Place) -> int:
    manifest = read_manifest(place)
    position, tokens = (manifest.progress.get(key) for key in ("position", "tokens"))
    print(f"{place}: step {manifest.step}, position {position}, {tokens} tokens")
    print(f"  saved under {manifest.layout}, in {manifest.seconds:.1f} s, by {manifest.versions}")
    print(f"  facts {json.dumps(manifest.facts, ensure_ascii=False)}")
    for name, file in manifest.files.items():
        print(f"  {file.bytes:>14,} bytes  {file.hash}  {name}")
    for name, tensor in manifest.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "one number"
        print(f"  {tensor.dtype:>9}  {tensor.hash}  {name} [{shape}]")
    return EXIT_DONE


def newest(place: Place) -> int:
    print(newest_checkpoint(place))
    return EXIT_DONE


def remove(place: Place) -> int:
    if not place.name.startswith("step-"):
        raise CheckpointError(f"{place}: is not one checkpoint.", fix="Name a step-N folder.")
    if not place.exists():
        raise CheckpointError(f"{place}: there is no such folder.")
    place.remove(first="manifest.json")
    print(f"{place}: removed")
    return EXIT_DONE


def steps_of(place: Place) -> list[Place]:
    """The step itself, or those of a checkpoint folder, or of the run it is in."""
    if place.name.startswith("step-"):
        return [place]
    for folder in (place, place / "checkpoint"):
        steps = [name for name in folder.folders() if re.fullmatch(r"step-\d+(\.aside-\d+)?", name)]
        if steps:
            return [folder / name for name in sorted(steps, key=_number)]
    raise CheckpointError(f"{place}: holds no checkpoints.", fix="Name a run, or a step-N folder.")


def _number(name: str) -> tuple[int, str]:
    return int(name.removeprefix("step-").partition(".")[0]), name


if __name__ == "__main__":
    sys.exit(main())
