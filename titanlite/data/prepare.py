"""Text -> shards: `out/train` and `out/validation`, on all cores, and restartable.

The inputs are cut into pieces that depend on nothing but the inputs; a piece becomes one shard on
each side. A finished piece leaves a record in `out/.unfinished`, so a second run does only what
the first had left, and the result is the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import xxhash

from titanlite.data.manifest import ShardRecord, is_intact, write_corpus_manifest, write_whole
from titanlite.data.shards import ShardWriter, open_corpus
from titanlite.data.text import (
    DOCUMENT_BYTES,
    FileRange,
    find_files,
    list_file_ranges,
    read_documents,
)
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json
from titanlite.log import logger

TRAIN, VALIDATION = "train", "validation"

_UNFINISHED, _DONE = ".unfinished", "prepared.json"
_FORMAT = 1  # in every key: a change of what a piece contains must not find the old ones
_LEAST_PIECE_BYTES = 8 << 20
_MOST_PIECES = 256  # every shard is opened by every rank; still more than most machines' cores
STALL_SECONDS = 600.0  # for one document, or for a disk that does not answer


@dataclass(frozen=True)
class PreparedCorpus:
    """What came of it."""

    documents: int
    tokens: int
    validation_documents: int
    validation_tokens: int
    input_bytes: int
    encoded_bytes: int  # of the inputs, in this run
    pieces: int
    reused_pieces: int
    seconds: float


@dataclass(frozen=True)
class _Piece:
    """A stretch of the inputs that one worker turns into one shard a side."""

    name: str
    key: str  # of all that its bytes depend on
    parts: list[FileRange]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class _Task:
    """What a worker is given beside its pieces."""

    tokenizer: Tokenizer
    out: Path
    share: float  # of the documents that go to validation
    bos: bool  # each document begins with BOS
    document_bytes: int


Progress = Callable[[int, int], None]  # bytes done, bytes in all


def prepare_corpus(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    validation_share: float = 0.01,
    *,
    bos: bool = False,
    workers: int | None = None,
    piece_bytes: int | None = None,
    follow_symlinks: bool = False,
    document_bytes: int = DOCUMENT_BYTES,
    stall_seconds: float = STALL_SECONDS,
    progress: Progress = lambda done, of: None,
) -> PreparedCorpus:
    """Write the shards of all text in `inputs`; raises DataError.

    A document goes to validation by a hash of what it says, so one that occurs twice is never on
    both sides. `bos`: each document begins with the tokenizer's BOS. `workers` is all cores by
    default and changes nothing but the time. Longer documents than `document_bytes` are refused,
    and workers that read nothing for `stall_seconds` are ended.
    """
    started, out = time.monotonic(), Path(out)
    if not 0 <= validation_share < 1:
        raise DataError(f"validation_share = {validation_share}: must be at least 0 and below 1.")
    if bos and not tokenizer.has_bos:
        raise DataError(
            f'tokenizer "{tokenizer.name}": has no BOS of its own, only an end id.',
            fix="Leave the option out; documents then follow the end of the one before.",
        )
    parts = list_file_ranges(find_files(inputs, follow_symlinks))
    made_by = f"{_FORMAT} {tokenizer.fingerprint} {validation_share!r}{' bos' if bos else ''}"
    pieces = _cut(parts, made_by, piece_bytes)
    plan, total = _digest([piece.key for piece in pieces]), sum(piece.bytes for piece in pieces)
    if not _finished(out, plan):
        done = {piece.name: record for piece in pieces if (record := _recorded(out, piece))}
        reused = len(done)
        todo = [piece for piece in pieces if piece.name not in done]
        left = sum(piece.bytes for piece in todo)
        progress(total - left, total)
        task = _Task(tokenizer, out, validation_share, bos, document_bytes)
        for piece, record in _work(todo, task, workers, stall_seconds):
            done[piece.name] = record
            left -= piece.bytes
            progress(total - left, total)
        _commit(out, plan, [done[piece.name] for piece in pieces], tokenizer, validation_share, bos)
    else:
        reused, todo = len(pieces), []
        progress(total, total)
    counts = json.loads((out / _DONE).read_bytes())["counts"]
    return PreparedCorpus(
        **counts,
        input_bytes=total,
        encoded_bytes=sum(piece.bytes for piece in todo),
        pieces=len(pieces),
        reused_pieces=reused,
        seconds=time.monotonic() - started,
    )


# --- pieces --------------------------------------------------------------------------------------


def _cut(parts: Iterable[FileRange], made_by: str, piece_bytes: int | None) -> list[_Piece]:
    """The parts in pieces of about equal size: large files in several, small ones together."""
    parts = list(parts)
    total = sum(part.bytes for part in parts)
    limit = piece_bytes or max(_LEAST_PIECE_BYTES, total // _MOST_PIECES)
    groups: list[list[FileRange]] = [[]]
    room = limit
    for part in (smaller for part in parts for smaller in part.split(limit)):
        if groups[-1] and part.bytes > room:
            groups.append([])
            room = limit
        groups[-1].append(part)
        room -= part.bytes
    keys = [_digest([made_by, *(asdict(part) for part in group)]) for group in groups]
    return [_Piece(f"{i:06}", key, group) for i, (key, group) in enumerate(zip(keys, groups))]


def _digest(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _recorded(out: Path, piece: _Piece) -> dict | None:
    """What an earlier run wrote of this piece, if all of it is still there and whole."""
    folder = out / _UNFINISHED
    try:
        record = parse_json((folder / f"{piece.name}.json").read_bytes())
    except (OSError, ValueError):
        return None
    if record.get("key") != piece.key:
        return None
    shards = [(side, ShardRecord(**shard)) for side, shard in record["shards"].items()]
    return record if all(is_intact(folder / side, shard) for side, shard in shards) else None


def _write_piece(piece: _Piece, task: _Task, went_on: Callable[[], None]) -> dict:
    """The shards of a piece, then its record; calls `went_on` with every document."""
    tokenizer, folder = task.tokenizer, task.out / _UNFINISHED
    begin, end = [tokenizer.bos_id] if task.bos else [], [tokenizer.eos_id]
    with (
        ShardWriter(folder / TRAIN / piece.name, tokenizer.vocab_size) as train,
        ShardWriter(folder / VALIDATION / piece.name, tokenizer.vocab_size) as validation,
    ):
        for text in read_documents(piece.parts, task.document_bytes):
            writer = validation if _held_out(text, task.share) else train
            writer.add(begin + tokenizer.encode(text) + end)
            went_on()
        written = {TRAIN: asdict(train.close()), VALIDATION: asdict(validation.close())}
    record = {"key": piece.key, "shards": written}
    write_whole(folder / f"{piece.name}.json", json.dumps(record).encode())
    return record


def _held_out(text: str, share: float) -> bool:
    digest = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
    return digest < share * 2**64


# --- workers -------------------------------------------------------------------------------------

_given: tuple[_Task, Any]  # to this worker process, once: the task, and counts by piece


def _work(
    pieces: Sequence[_Piece], task: _Task, workers: int | None, stall_seconds: float
) -> Iterator[tuple[_Piece, dict]]:
    """Every piece with its record, as they are finished."""
    workers = min(workers or _cores(), len(pieces))
    if workers <= 1:
        for piece in pieces:
            yield piece, _write_piece(piece, task, went_on=lambda: None)
        return
    others, context = multiprocessing.active_children(), _start_method()
    # One writer for each count, and no lock that a killed worker could keep.
    counts = context.RawArray("Q", len(pieces))
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(task, counts))
    try:
        running = {pool.submit(_write_given, piece, n): piece for n, piece in enumerate(pieces)}
        for future in _as_completed(running, lambda: sum(counts), stall_seconds):
            yield running.pop(future), future.result()
    except _Stalled:
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()  # else Python would wait for them at its exit
        names = sorted({part.path for piece in running.values() for part in piece.parts})
        raise DataError(
            f"no worker has read anything for {stall_seconds:g} s, and {len(running)} of"
            f" {len(pieces)} pieces are not finished; the first file of them is {names[0]}.",
            fix="Check that the disk answers, then run the same command again: what is finished is"
            " kept. --stall-seconds allows more.",
        ) from None
    except BrokenProcessPool:
        raise DataError(
            "a worker was killed, perhaps for its memory.",
            fix="Run the same command again, with fewer workers; what is finished is kept.",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


class _Stalled(Exception):
    """No worker went on for too long."""


def _as_completed(
    futures: Iterable[Future], count: Callable[[], int], stall_seconds: float
) -> Iterator[Future]:
    """Futures as they end; raises _Stalled when `count()` stays the same for too long."""
    left, last, since, warned = set(futures), count(), time.monotonic(), False
    while left:
        ended, left = wait_for(left, timeout=stall_seconds / 20, return_when=FIRST_COMPLETED)
        yield from ended
        still = time.monotonic() - since
        if ended or count() != last:
            last, since, warned = count(), time.monotonic(), False
        elif still > stall_seconds:
            raise _Stalled
        elif still > stall_seconds / 5 and not warned:
            warned = True
            logger.warning(
                "no worker has read anything for %.0f s; the limit is %.0f s", still, stall_seconds
            )


def _start_method() -> multiprocessing.context.BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not once a worker
    return context


def _begin(*given) -> None:
    global _given
    _given = given
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)  # the pool's own pipes would keep us waiting for ever after a kill -9

    threading.Thread(target=end_with_parent, daemon=True).start()


def _write_given(piece: _Piece, number: int) -> dict:
    task, counts = _given

    def went_on() -> None:
        counts[number] += 1

    return _write_piece(piece, task, went_on)


def _cores() -> int:
    """The cores that this process may use, which in a container are fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- commit --------------------------------------------------------------------------------------


def _finished(out: Path, plan: str) -> bool:
    """Whether `out` holds the result of this plan already; raises DataError if of another."""
    done, drafted = out / _DONE, out / _UNFINISHED / _DONE
    if not done.exists() and drafted.exists() and _plan_of(drafted) == plan:
        _move(out)  # an earlier run was stopped between its last renames
    there = [out / side for side in (TRAIN, VALIDATION) if (out / side).exists()]
    if there and done.exists() and _plan_of(done) == plan:
        for folder in there:
            open_corpus(folder)  # refuses what was cut short since
        return True
    if there:
        raise DataError(
            f"{there[0]}: is there already, made of other inputs, another tokenizer or share.",
            fix="Give another folder, or remove it.",
        )
    return False


def _plan_of(path: Path) -> str:
    try:
        return parse_json(path.read_bytes())["plan"]
    except (ValueError, KeyError, TypeError):
        return ""


def _commit(
    out: Path, plan: str, records: Sequence[dict], tokenizer: Tokenizer, share: float, bos: bool
) -> None:
    """Manifests first, then the folders under their names, then the word that all is done."""
    folder, counts = out / _UNFINISHED, {}
    for side in (TRAIN, VALIDATION):
        shards = [ShardRecord(**record["shards"][side]) for record in records]
        kept = [shard for shard in shards if shard.documents]
        _clear(folder / side, {shard.name for shard in kept})
        made_by = (tokenizer.fingerprint, tokenizer.vocab_size)
        manifest = write_corpus_manifest(folder / side, *made_by, kept, bos=bos)
        prefix = "" if side == TRAIN else "validation_"
        counts[f"{prefix}documents"] = manifest.documents
        counts[f"{prefix}tokens"] = manifest.tokens
    _refuse_empty(counts, share)
    if share == 0:
        shutil.rmtree(folder / VALIDATION)
    done = {"plan": plan, "counts": counts}
    write_whole(folder / _DONE, (json.dumps(done) + "\n").encode())
    _move(out)


def _clear(folder: Path, kept: set[str]) -> None:
    """Remove empty shards, and what was left by another plan or a killed worker."""
    for file in folder.iterdir():
        if file.suffix not in (".bin", ".idx") or file.stem not in kept:
            file.unlink()


def _refuse_empty(counts: dict[str, int], share: float) -> None:
    train, held_out = counts["documents"], counts["validation_documents"]
    if train + held_out == 0:
        raise DataError("the inputs hold no text.", fix="Give files that have some.")
    if train == 0 or (held_out == 0 and share > 0):
        side = TRAIN if train == 0 else VALIDATION
        raise DataError(
            f"validation_share = {share} of {train + held_out} documents leaves none for {side}.",
            fix="Give another share (0: no validation), or text in more documents"
            " (a .txt is one; a .jsonl has one a line).",
        )


def _move(out: Path) -> None:
    folder = out / _UNFINISHED
    for side in (VALIDATION, TRAIN):
        if (folder / side).exists():
            os.rename(folder / side, out / side)
    os.replace(folder / _DONE, out / _DONE)
    shutil.rmtree(folder)
