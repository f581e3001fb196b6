"""Text files -> shards in `out/train` and `out/validation`, on all cores, restartable.

The inputs are divided into pieces, whatever the number of workers; each piece becomes one training
and one validation shard. A finished piece leaves a record in `out/.unfinished`, so that a second
run does only the remaining pieces. The result has the same bytes as that of an uninterrupted run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from titanlite.data.manifest import ShardRecord, is_shard_intact
from titanlite.data.open_tokenizer import open_tokenizer, tokenizer_from_bytes
from titanlite.data.shards import open_corpus
from titanlite.data.text import MAX_DOCUMENT_BYTES, list_file_ranges, read_documents
from titanlite.data.text_files import FileRange, find_files
from titanlite.data.tokenizer import BYTES, Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json, write_file_atomically
from titanlite.log import pluralize
from titanlite_corpus.engine import STALL_SECONDS, EngineCall, LocalEngine, report_progress
from titanlite_corpus.hashing import hash_json
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest
from titanlite_corpus.sides import TRAIN, VALIDATION, is_held_out

_UNFINISHED, _DONE = ".unfinished", "prepared.json"
_FORMAT = 1  # part of every key; increase it when the shards of a piece change
_MIN_PIECE_BYTES = 8 << 20
# Approximate number of pieces of a large corpus: few, as every rank opens every shard, but enough
# for the cores of most machines.
_PIECES = 256


@dataclass(frozen=True)
class PrepareSettings:
    """How text becomes shards."""

    validation_share: float = 0.01  # fraction of the documents that goes to validation
    bos: bool = False  # begin each document with the tokenizer's BOS
    workers: int | None = None  # processes; None: all cores. Does not change the result.
    piece_bytes: int | None = None  # of the inputs, per shard; None: by their total size
    document_bytes: int = MAX_DOCUMENT_BYTES  # longer documents are refused
    stall_seconds: float = STALL_SECONDS
    # stop if no worker reads a document for so long; without effect with one worker or one piece


@dataclass(frozen=True)
class PreparedCorpus:
    """Result of `prepare_corpus`."""

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
    """The part of the inputs that one worker turns into a training and a validation shard."""

    name: str
    key: str  # hash of everything its shards depend on
    ranges: list[FileRange]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.ranges)


@dataclass(frozen=True)
class _Task:
    """What the shards of all pieces are made with."""

    tokenizer: Tokenizer
    out: Path
    settings: PrepareSettings


Progress = Callable[[int, int], None]  # (bytes done, bytes in total)


def prepare_corpus(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    settings: PrepareSettings | None = None,
    progress: Progress = lambda done, total: None,
) -> PreparedCorpus:
    """Write the shards of all text in `inputs`; raises DataError.

    A hash of its text decides whether a document goes to validation, so copies of one document are
    never in both training and validation data.
    """
    started, settings = time.monotonic(), settings or PrepareSettings()
    task = _Task(tokenizer, Path(out), settings)
    _check_settings(settings, tokenizer)
    ranges = list_file_ranges(find_files(inputs))
    pieces = _divide_into_pieces(ranges, _recipe(task), settings.piece_bytes)
    plan, total = hash_json([piece.key for piece in pieces]), sum(piece.bytes for piece in pieces)
    if _is_finished(task.out, plan):
        todo: list[_Piece] = []
        progress(total, total)
    else:
        records = {piece.name: record for piece in pieces if (record := _read_record(task, piece))}
        todo = [piece for piece in pieces if piece.name not in records]
        done = total - sum(piece.bytes for piece in todo)
        progress(done, total)
        for piece, record in _write_pieces(todo, task):
            records[piece.name] = record
            done += piece.bytes
            progress(done, total)
        _commit(task, plan, [records[piece.name] for piece in pieces])
    counts = json.loads((task.out / _DONE).read_bytes())["counts"]
    return PreparedCorpus(
        **counts,
        input_bytes=total,
        encoded_bytes=sum(piece.bytes for piece in todo),
        pieces=len(pieces),
        reused_pieces=len(pieces) - len(todo),
        seconds=time.monotonic() - started,
    )


def _check_settings(settings: PrepareSettings, tokenizer: Tokenizer) -> None:
    share = settings.validation_share
    if not 0 <= share < 1:
        raise DataError(f"validation_share = {share}: must be at least 0 and below 1.")
    if settings.bos and not tokenizer.has_bos:
        raise DataError(
            f'tokenizer "{tokenizer.name}": has no BOS of its own, only an EOS.',
            fix="Leave out --bos; each document then follows the EOS of the one before.",
        )


# --- pieces --------------------------------------------------------------------------------------


def _recipe(task: _Task) -> str:
    """What the shards depend on, besides the inputs."""
    settings = task.settings
    bos = " bos" if settings.bos else ""
    return f"{_FORMAT} {task.tokenizer.fingerprint} {settings.validation_share!r}{bos}"


def _divide_into_pieces(
    ranges: Iterable[FileRange], recipe: str, piece_bytes: int | None
) -> list[_Piece]:
    """Pieces of about equal size: large files are divided, small ones are combined."""
    ranges = list(ranges)
    total = sum(part.bytes for part in ranges)
    limit = piece_bytes or max(_MIN_PIECE_BYTES, total // _PIECES)
    groups: list[list[FileRange]] = [[]]
    free = limit
    for part in (part for file in ranges for part in file.split(limit)):
        if groups[-1] and part.bytes > free:
            groups.append([])
            free = limit
        groups[-1].append(part)
        free -= part.bytes
    return [
        _Piece(f"{number:06}", hash_json([recipe, *map(asdict, group)]), group)
        for number, group in enumerate(groups)
    ]


def _read_record(task: _Task, piece: _Piece) -> dict[str, Any] | None:
    """The record that an earlier run wrote of this piece, if its shards are still intact."""
    folder = task.out / _UNFINISHED
    try:
        record = parse_json((folder / f"{piece.name}.json").read_bytes())
    except (OSError, ValueError):
        return None
    if record.get("key") != piece.key:
        return None
    shards = [(side, ShardRecord(**shard)) for side, shard in record["shards"].items()]
    return record if all(is_shard_intact(folder / side, shard) for side, shard in shards) else None


def _write_piece(
    piece: _Piece, out: Path, settings: PrepareSettings, name: str, content: bytes | None
) -> dict[str, Any]:
    """Write the shards of a piece, then its record. `content`: of the tokenizer's file."""
    tokenizer, folder = _open_once(name, content), out / _UNFINISHED
    begin, end = [tokenizer.bos_id] if settings.bos else [], [tokenizer.eos_id]
    with (
        ShardWriter(folder / TRAIN / piece.name, tokenizer.vocab_size) as train,
        ShardWriter(folder / VALIDATION / piece.name, tokenizer.vocab_size) as validation,
    ):
        for text in read_documents(piece.ranges, settings.document_bytes):
            writer = validation if is_held_out(text, settings.validation_share) else train
            writer.add(begin + tokenizer.encode(text) + end)
            report_progress()
        shards = {TRAIN: asdict(train.close()), VALIDATION: asdict(validation.close())}
    record = {"key": piece.key, "shards": shards}
    write_file_atomically(folder / f"{piece.name}.json", json.dumps(record).encode())
    return record


@lru_cache(maxsize=1)
def _open_once(name: str, content: bytes | None) -> Tokenizer:
    """The tokenizer of a worker, for all its pieces."""
    return open_tokenizer(BYTES) if content is None else tokenizer_from_bytes(content, name)


def _write_pieces(pieces: Sequence[_Piece], task: _Task) -> Iterator[tuple[_Piece, dict[str, Any]]]:
    """Write all pieces in parallel; yields each with its record as it is finished."""
    settings, tokenizer = task.settings, task.tokenizer
    content = next(iter(tokenizer.files.values()), None)
    shared = (task.out, settings, tokenizer.name, content)
    calls = [EngineCall(_write_piece, (piece, *shared), piece.ranges[0].path) for piece in pieces]
    engine = LocalEngine(settings.workers, settings.stall_seconds)
    for index, record in engine.run(calls):
        yield pieces[index], record


# --- commit --------------------------------------------------------------------------------------


def _is_finished(out: Path, plan: str) -> bool:
    """Whether `out` has the result of this plan; raises DataError if it has another result."""
    done, uncommitted = out / _DONE, out / _UNFINISHED / _DONE
    if not done.exists() and uncommitted.exists() and _read_plan(uncommitted) == plan:
        _publish(out)  # an earlier run was stopped between its last renames
    present = [out / side for side in (TRAIN, VALIDATION) if (out / side).exists()]
    if present and done.exists() and _read_plan(done) == plan:
        for folder in present:
            open_corpus(folder)  # raises if a file was damaged since
        return True
    if present:
        raise DataError(
            f"{present[0]}: already exists, made from other inputs or with other settings.",
            fix="Choose another output folder, or remove this one.",
        )
    return False


def _read_plan(path: Path) -> str:
    try:
        return parse_json(path.read_bytes())["plan"]
    except (ValueError, KeyError, TypeError):
        return ""


def _commit(task: _Task, plan: str, records: Sequence[dict[str, Any]]) -> None:
    """Write the manifests, then rename the folders, then `prepared.json`."""
    folder, tokenizer, settings = task.out / _UNFINISHED, task.tokenizer, task.settings
    counts: dict[str, int] = {}
    for side in (TRAIN, VALIDATION):
        shards = [ShardRecord(**record["shards"][side]) for record in records]
        shards = [shard for shard in shards if shard.documents]
        _remove_other_files(folder / side, {shard.name for shard in shards})
        manifest = write_corpus_manifest(
            folder / side, tokenizer.fingerprint, tokenizer.vocab_size, shards, bos=settings.bos
        )
        prefix = "" if side == TRAIN else "validation_"
        counts[f"{prefix}documents"] = manifest.documents
        counts[f"{prefix}tokens"] = manifest.tokens
    _refuse_empty(counts, settings.validation_share)
    if settings.validation_share == 0:
        shutil.rmtree(folder / VALIDATION)
    done = {"plan": plan, "counts": counts}
    write_file_atomically(folder / _DONE, (json.dumps(done) + "\n").encode())
    _publish(task.out)


def _remove_other_files(folder: Path, names: set[str]) -> None:
    """Keep only the shards `names`; remove empty ones and files of other plans or killed runs."""
    for file in folder.iterdir():
        if file.suffix not in (".bin", ".idx") or file.stem not in names:
            file.unlink()


def _refuse_empty(counts: dict[str, int], validation_share: float) -> None:
    train, held_out = counts["documents"], counts["validation_documents"]
    if train + held_out == 0:
        raise DataError("the inputs contain no text.", fix="Give files that contain some.")
    if train == 0 or (held_out == 0 and validation_share > 0):
        side = TRAIN if train == 0 else VALIDATION
        raise DataError(
            f"validation_share = {validation_share} of {pluralize(train + held_out, 'document')}"
            f" leaves none for {side}.",
            fix="Use another share (0: no validation), or text in more documents"
            " (a .txt is one; a .jsonl has one per line).",
        )


def _publish(out: Path) -> None:
    """Rename the finished folders to their final names, then remove `.unfinished`."""
    folder = out / _UNFINISHED
    for side in (VALIDATION, TRAIN):
        if (folder / side).exists():
            os.rename(folder / side, out / side)
    os.replace(folder / _DONE, out / _DONE)
    shutil.rmtree(folder)
