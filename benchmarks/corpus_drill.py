"""Prepare the synthetic corpus with 1, 2 and 4 workers, and with kills; compare every byte.

python -m benchmarks.corpus_drill --gb 2 --kills 10

States the time, the peak memory of a process, and whether all shards are equal.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import xxhash

from benchmarks.synthetic_corpus import write_corpus

ROOT = Path(__file__).parents[1]
RECIPE = """
out = "{out}"
tokenizer = "{tokenizer}"
validation_share = 0.01
shard_mib = 64
[[sources]]
name = "web"
inputs = ["{inputs}"]
[filter]
rules = ["language", "gopher_quality", "gopher_repetition", "personal_data"]
[deduplicate]
[shuffle]
"""


PREPARE = """
import runpy, sys
import titanlite.corpus.read
titanlite.corpus.read.TABLE_BYTES = int(sys.argv.pop(1)) << 20
runpy.run_path("scripts/prepare_data.py", run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/corpus_drill"), metavar="FOLDER")
    parser.add_argument("--gb", type=float, default=2.0, help="of text (default: 2)")
    parser.add_argument("--kills", type=int, default=10, help="of the command (default: 10)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--table-mib", type=int, default=64, help="smaller: more tasks")
    args = parser.parse_args()
    inputs = args.out / "text"
    if not inputs.exists():
        write_corpus(inputs, int(args.gb * 1e9))
    hashes = set()
    for workers in args.workers:
        out = args.out / f"workers{workers}"
        seconds, peak = run(write_recipe(args, out), workers, args.table_mib)
        hashes.add(hash_shards(out))
        print(f"{workers} workers: {seconds:.0f} s, peak {peak / 1e6:.0f} MB a process", flush=True)
    if args.kills:
        out = args.out / "killed"
        recipe = write_recipe(args, out)
        limit = seconds / (args.kills + 1) * 2
        for number in range(args.kills):
            run(recipe, 2, args.table_mib, kill_after=random.Random(number).uniform(1, limit))
        run(recipe, 2, args.table_mib)
        hashes.add(hash_shards(out))
        print(f"killed {args.kills} times, then completed", flush=True)
    print("all shards are equal" if len(hashes) == 1 else f"DIFFERENT: {hashes}")


def write_recipe(args: argparse.Namespace, out: Path) -> Path:
    """The recipe of one of the outputs."""
    args.out.mkdir(parents=True, exist_ok=True)
    path = out.with_suffix(".toml")
    values = {"out": out, "tokenizer": args.tokenizer, "inputs": args.out / "text"}
    path.write_text(RECIPE.format(**values))
    return path


def run(
    recipe: Path, workers: int, table_mib: int, kill_after: float | None = None
) -> tuple[float, int]:
    """(seconds, peak bytes of memory of one process) of the command; kills it if asked to."""
    command = [sys.executable, "-c", PREPARE, str(table_mib), "--recipe", str(recipe.resolve())]
    started = time.monotonic()
    child = subprocess.Popen(
        [*command, "--workers", str(workers)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    peak = 0
    while child.poll() is None:
        peak = max([peak, *map(peak_memory, processes_of(child.pid))])
        if kill_after is not None and time.monotonic() - started > kill_after:
            child.send_signal(signal.SIGKILL)
            child.wait()
            time.sleep(1)  # until its workers have noticed
            return time.monotonic() - started, peak
        time.sleep(0.2)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {child.returncode}")
    return time.monotonic() - started, peak


def processes_of(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(path.parent.name))
        except OSError:  # the process has ended
            continue
    return found


def peak_memory(process: int) -> int:
    """The peak of the resident memory of a process, in bytes."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def hash_shards(out: Path) -> str:
    """Hash of the names and contents of all files but the work."""
    digest = xxhash.xxh3_128()
    for path in sorted(out.rglob("*")):
        if path.is_file() and ".work" not in path.parts:
            digest.update(str(path.relative_to(out)).encode())
            with open(path, "rb") as file:
                while content := file.read(1 << 24):
                    digest.update(content)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
