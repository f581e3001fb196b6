"""How fast it is, as ratios measured in one run: python scripts/benchmark.py [--case NAME …]

Every figure is the median over rounds; what is compared takes turns, because machines drift.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from titanlite.data import (
    Order,
    ShardWriter,
    SourceConfig,
    open_stream,
    open_tokenizer,
    slices_of,
)
from titanlite.data.manifest import write_manifest
from titanlite.distributed.session import keep_freed_memory
from titanlite.models import FAMILIES

ROOT = Path(__file__).parents[1]
FAMILY, FLAVOR = FAMILIES["llama3"], "quickstart"
SHAPE = FAMILY.flavors[FLAVOR]
SEQ_LEN, BATCH, STEPS, SKIPPED = 256, 16, 14, 4  # the first steps warm caches and are not counted
CORES = len(os.sched_getaffinity(0))
Row = tuple[str, float, str]  # what, how much, of what


# --- the bare loop: all that a person would write for one process ---------------------------------


def bare_loop(corpus: Path, dtype: str, keep: bool) -> float:
    """Tokens a second of the same model, optimizer, precision and batch, and nothing else.

    With `keep`, freed memory stays with the process, as train.py does it on a CPU.
    """
    if keep:
        keep_freed_memory()
    torch.manual_seed(0)
    model = FAMILY.build(SHAPE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    spared = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = np.memmap(corpus / "train" / "shard.bin", np.uint16, "r")
    chance = np.random.default_rng(0)
    half = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    for step in range(STEPS):
        if step == SKIPPED:
            start = time.perf_counter()
        starts = chance.integers(0, len(tokens) - SEQ_LEN - 1, BATCH)
        rows = np.stack([tokens[s : s + SEQ_LEN + 1] for s in starts]).astype(np.int64)
        ids = torch.from_numpy(rows)
        with half:
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return (STEPS - SKIPPED) * BATCH * SEQ_LEN / (time.perf_counter() - start)


# --- train.py itself -----------------------------------------------------------------------------


def trainer(corpus: Path, dtype: str, processes: int = 1) -> tuple[float, float]:
    """(tokens a second, share of the matrix-product peak) of train.py as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "job.dump_folder": folder,
            "job.device": "cpu",
            "model.flavor": FLAVOR,
            "data.sources": f'[{{ name = "text", path = "{corpus}/train" }}]',
            "training.seq_len": SEQ_LEN,
            "training.local_batch_size": BATCH // processes,
            "training.global_batch_size": BATCH,
            "training.steps": STEPS,
            "training.mixed_precision_param": dtype,
            "activation_checkpoint.mode": "none",
            "metrics.log_freq": 1,
        }
        launch = [sys.executable]
        if processes > 1:
            launch += ["-m", "torch.distributed.run", "--standalone"]
            launch += [f"--nproc_per_node={processes}"]
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        _run([*launch, str(ROOT / "train.py"), *words], threads=CORES // processes)
        lines = [json.loads(line) for line in open(f"{folder}/metrics.jsonl", encoding="utf-8")]
    first, last = lines[SKIPPED - 1], lines[-1]  # from the end of the last skipped step
    speed = (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])
    return speed, statistics.median(line["mfu"] for line in lines[SKIPPED:])


def case_trainer(corpus: Path, rounds: int) -> Iterator[Row]:
    """train.py against the bare loop, one process, all cores."""
    for dtype in ("float32", "bfloat16"):
        runs = [
            (trainer(corpus, dtype), _bare(corpus, dtype, False), _bare(corpus, dtype, True))
            for _ in range(rounds)
        ]
        yield f"train.py, {dtype}", _median(ours[0] for ours, _, _ in runs), "tokens/s"
        cast = " by autocast" if dtype == "bfloat16" else ""
        yield f"bare loop, {dtype}{cast}", _median(bare for _, bare, _ in runs), "tokens/s"
        yield f"train.py / bare loop, {dtype}", _median(o[0] / b for o, b, _ in runs), "ratio"
        yield (
            f"train.py / bare loop that keeps freed memory too, {dtype}",
            _median(ours[0] / kept for ours, _, kept in runs),
            "ratio",
        )
        yield f"keeping freed memory / not, {dtype}", _median(k / b for _, b, k in runs), "ratio"
        yield f"share of the matrix-product peak, {dtype}", _median(o[1] for o, _, _ in runs), "share"


def case_fsdp(corpus: Path, rounds: int) -> Iterator[Row]:
    """FSDP over 2 processes against one process, with the same threads in all."""
    pairs = [(trainer(corpus, "bfloat16", 2), trainer(corpus, "bfloat16")) for _ in range(rounds)]
    yield "FSDP 2, bfloat16", _median(two[0] for two, _ in pairs), "tokens/s"
    yield "one process, bfloat16", _median(one[0] for _, one in pairs), "tokens/s"
    yield "FSDP 2 / one process", _median(two[0] / one[0] for two, one in pairs), "ratio"


# --- checkpoints ---------------------------------------------------------------------------------


def saving() -> None:
    """One rank of two: 504 MB of weights and moments, saved in every mode, and loaded again."""
    from torch.distributed.fsdp import fully_shard

    from titanlite.checkpoint import CheckpointConfig, Checkpointer, Place, read_tensors, state_of
    from titanlite.distributed.session import CommConfig, DebugConfig, join

    def seconds(act: Callable[[], object]) -> float:
        torch.distributed.barrier()
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    with join(torch.device("cpu"), CommConfig(), DebugConfig(), Path()) as session:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        found: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as own:
            box = [own]
            torch.distributed.broadcast_object_list(box)
            about = {"facts": {}, "job": {}, "layout": ""}
            for mode in ("disabled", "async", "async_with_pinned_mem"):
                config = CheckpointConfig(enable=True, async_mode=mode, keep_latest_k=2)
                checkpointer = Checkpointer(Place(f"{box[0]}/{mode}"), config, **about)
                for step in range(1, 8):
                    torch.distributed.barrier()
                    start = time.perf_counter()
                    checkpointer.save(step, model, optimizer, progress={"step": step})
                    blocked = time.perf_counter() - start
                    saved = checkpointer.wait()
                    assert saved and not saved.problem, saved
                    found.setdefault(f"{mode}, blocked", []).append(blocked)
                    found.setdefault(f"{mode}, written", []).append(saved.seconds)
            state, place = state_of(model, optimizer), Place(f"{box[0]}/disabled")
            for verify in ("off", "full") * 5:
                config = CheckpointConfig(enable=True, verify=verify)
                checkpointer = Checkpointer(place, config, **about)
                taken = seconds(lambda: read_tensors(checkpointer.find().place, state))  # noqa: B023
                found.setdefault(f"load, verify {verify}", []).append(taken)
            torch.distributed.barrier()
        if session.rank == 0:
            print(json.dumps(found))


def case_checkpoint(corpus: Path, rounds: int) -> Iterator[Row]:
    """How long a save of 504 MB by two ranks stops the loop, and what verifying costs."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    runs = [
        json.loads(_run([*launch, __file__, "--saving"], threads=1).splitlines()[-1])
        for _ in range(rounds)
    ]

    def typical(what: str) -> float:
        return _median(second for run in runs for second in run[what][2:])

    sync = typical("disabled, blocked")
    yield "saving 504 MB on 2 ranks, disabled: loop blocked", sync, "s"
    for mode in ("async", "async_with_pinned_mem"):
        blocked, first = typical(f"{mode}, blocked"), _median(r[f"{mode}, blocked"][0] for r in runs)
        yield f"saving, {mode}: loop blocked", blocked, "s"
        yield f"saving, {mode}: loop blocked by the first save", first, "s"
        yield f"saving, {mode}: written after", typical(f"{mode}, written"), "s"
        yield f"loop blocked, {mode} / disabled", blocked / sync, "ratio"
    off, full = typical("load, verify off"), typical("load, verify full")
    yield "loading 504 MB, verify off", off, "s"
    yield "loading, verify full / off", full / off, "ratio"


# --- data ----------------------------------------------------------------------------------------


def case_stream(corpus: Path, rounds: int) -> Iterator[Row]:
    """The stream alone on one core, and torchdata's loader over the same samples."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.set_num_threads(1)
    rows, seconds = 32, 1.5
    source = [SourceConfig("text", str(corpus / "train"))]
    stream = open_stream(source, seq_len=2048, seed=0, vocab_size=SHAPE.vocab_size)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, position):
            inputs, labels = stream.read(position, 1)
            return inputs[0], labels[0]

    loaders: dict[str, Callable[[], Iterator]] = {
        "read": lambda: (stream.read(p, rows) for p in range(0, 10**9, rows)),
        "prefetch thread": lambda: stream.prefetch(slices_of(0, rows, 0, 1)),
        "StatefulDataLoader, 0 workers": lambda: iter(StatefulDataLoader(Samples(), rows)),
        "StatefulDataLoader, 2 workers": lambda: iter(
            StatefulDataLoader(Samples(), rows, num_workers=2)
        ),
    }
    speeds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, open_loader in loaders.items():
            batches = open_loader()
            next(batches)
            done, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                done += next(batches)[0].numel()
            speeds[name].append(done / (time.perf_counter() - start) / 1e6)
            del batches
    for name, found in speeds.items():
        yield f"stream, {name}", _median(found), "million tokens/s"


def case_order(corpus: Path, rounds: int) -> Iterator[Row]:
    """Where a sample comes from, by arithmetic: the same cost for any size."""
    for samples in (10**3, 10**9):
        order = Order(0, [("a", 0.7, samples), ("b", 0.3, samples)])
        positions, times = np.arange(65_536), []
        for _ in range(rounds * 5):
            start = time.perf_counter()
            order.sample_at(positions)
            times.append((time.perf_counter() - start) / len(positions) * 1e9)
        yield f"order of {samples:.0e} samples, 2 sources", _median(times), "ns/sample"


def case_tokenizer(corpus: Path, rounds: int) -> Iterator[Row]:
    """Turning text into ids on one core."""
    import sysconfig

    from titanlite.data.bpe import train_bpe

    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]
    train_bpe(texts, 4096, corpus / "tokenizer.model")
    tokenizer = open_tokenizer(str(corpus / "tokenizer.model"))
    megabytes, speeds = sum(len(text.encode()) for text in texts) / 1e6, []
    for _ in range(rounds):
        start = time.perf_counter()
        for text in texts:
            tokenizer.encode(text)
        speeds.append(megabytes / (time.perf_counter() - start))
    yield "tokenizing with 4,096 ids, one core", _median(speeds), "MB/s"


# --- the table -----------------------------------------------------------------------------------

CASES = {
    "trainer": case_trainer,
    "fsdp": case_fsdp,
    "checkpoint": case_checkpoint,
    "stream": case_stream,
    "order": case_order,
    "tokenizer": case_tokenizer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--out", type=Path, help="write the table here too (.md; .json beside it)")
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)  # corpus, dtype, keep
    parser.add_argument("--saving", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.saving:
        saving()
        return
    if args.bare:
        folder, dtype, keep = args.bare
        print(bare_loop(Path(folder), dtype, keep == "keep"))
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = _random_corpus(Path(folder))
        rows = [row for case in args.case for row in _measured(case, corpus, args.rounds)]
    about = {
        "command": f"python scripts/benchmark.py {' '.join(sys.argv[1:])}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{CORES} cores, {_processor()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": f"{FLAVOR}, {FAMILY.count_parameters(SHAPE):,} parameters,"
        f" {BATCH} sequences of {SEQ_LEN}",
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(_markdown(about, rows), encoding="utf-8")
        args.out.with_suffix(".json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    print(_markdown(about, rows))


def _measured(case: str, corpus: Path, rounds: int) -> Iterator[Row]:
    for row in CASES[case](corpus, rounds):
        print(f"{row[0]}: {row[1]:,.3g} {row[2]}", file=sys.stderr, flush=True)
        yield row


def _markdown(about: dict[str, str], rows: list[Row]) -> str:
    lines = [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| what | median | unit |", "| --- | ---: | --- |"]
    lines += [f"| {what} | {_number(value)} | {unit} |" for what, value, unit in rows]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _random_corpus(folder: Path) -> Path:
    """Eight million random ids; what they are does not change how fast they are."""
    (folder / "train").mkdir()
    ids = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (800, 10_000))
    with ShardWriter(folder / "train" / "shard", SHAPE.vocab_size) as writer:
        for document in ids:
            writer.add(document)
        record = writer.close()
    write_manifest(folder / "train", "random", SHAPE.vocab_size, [record])
    return folder


def _bare(corpus: Path, dtype: str, keep: bool) -> float:
    command = [sys.executable, __file__, "--bare", str(corpus), dtype, "keep" if keep else "free"]
    return float(_run(command, threads=CORES).splitlines()[-1])


def _run(command: list[str], threads: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, threads))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def _median(values) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main()
