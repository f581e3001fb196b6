"""Move finished shards to `out/SOURCE/train` and `out/SOURCE/validation`; write `out/corpus.json`.

The shards are links to files of the work folder, so they need no space of their own while both
exist, and remain when the work is removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from titanlite.data.manifest import ShardRecord, shard_paths
from titanlite.data.shards import open_corpus
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.files import parse_json, write_file_atomically
from titanlite_corpus.packing.stage import SHARD
from titanlite_corpus.shard_writer import write_corpus_manifest

RECORD_FILE = "corpus.json"  # in `out`; written last
_STAGED, _REPLACED = ".staged", ".replaced"  # in the work folder


@dataclass(frozen=True)
class SideShards:
    """The finished shards of one side of a source."""

    shards: Sequence[tuple[Path, ShardRecord]]  # each with the folder that it is in
    bos: bool  # every document begins with BOS
    packed_seq_len: int = 0  # of the windows; 0: not packed
    pairs: bool = False  # the documents of a window are pairs of answers


Shards = Mapping[tuple[str, str], SideShards]


@dataclass(frozen=True)
class PublishedSide:
    """The content of one folder of shards."""

    source: str
    side: str
    shards: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class PublishedCorpus:
    """The content of `corpus.json`."""

    plan: str  # hash of all that the corpus depends on
    complete: bool
    sides: list[PublishedSide]


def find_published(
    out: Path, plan: str, sources: Sequence[str], replace_other: bool
) -> PublishedCorpus | None:
    """The corpus in `out` if it is that of `plan`.

    Raises DataError if there is another, unless `replace_other`, or if files were damaged.
    """
    record = _read_published(out)
    if record is None:
        for name in sources:
            if (out / name).exists() and not replace_other:
                raise _exists_error(out / name)
        return None
    if not record.complete:
        return None
    if record.plan != plan:
        if not replace_other:
            raise _exists_error(out)
        return None
    for side in record.sides:
        # raises if a file was damaged since
        open_corpus(out / side.source / side.side, packed=None)
    return record


def _exists_error(path: Path) -> DataError:
    return DataError(
        f"{path}: already has a corpus, made from other inputs or with another recipe.",
        fix="Choose another `out`, or replace it: --replace. Runs that read it cannot resume then.",
    )


def _read_published(out: Path) -> PublishedCorpus | None:
    try:
        table = parse_json((out / RECORD_FILE).read_bytes())
        sides = [PublishedSide(**side) for side in table["sides"]]
        return PublishedCorpus(table["plan"], table["complete"], sides)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{out / RECORD_FILE}: cannot be read ({error}).", fix="Choose another `out`."
        ) from None


def publish(
    out: Path, work: Path, plan: str, shards: Shards, tokenizer: Tokenizer
) -> PublishedCorpus:
    """Move the shards of all sources to `out`, in place of what an earlier recipe left there."""
    staged = work / _STAGED
    shutil.rmtree(staged, ignore_errors=True)
    sides = [
        _stage(staged / name / side, content, tokenizer, PublishedSide(name, side, 0, 0, 0))
        for (name, side), content in shards.items()
    ]
    known = _read_published(out)
    old = {side.source for side in known.sides} if known else set()
    names = {side.source for side in sides}
    # While `complete` is false, the folders of all these sources may be replaced.
    present = [PublishedSide(name, "", 0, 0, 0) for name in sorted(old | names)]
    _write_published(out, PublishedCorpus(plan, False, present))
    for name in sorted(old | names):
        _replace_folder(out / name, staged / name, work / _REPLACED)
    published = PublishedCorpus(plan, True, sides)
    _write_published(out, published)
    shutil.rmtree(staged, ignore_errors=True)
    return published


def _stage(
    folder: Path,
    content: SideShards,
    tokenizer: Tokenizer,
    side: PublishedSide,
) -> PublishedSide:
    """Link the shards that have documents into a folder, and write its manifest."""
    folder.mkdir(parents=True)
    records: list[ShardRecord] = []
    for work, record in (entry for entry in content.shards if entry[1].documents):
        name = f"{len(records):06}"
        files = zip(shard_paths(work / SHARD), shard_paths(folder / name), strict=True)
        for source, target in files:
            _link(source, target)
        records.append(replace(record, name=name))
    manifest = write_corpus_manifest(
        folder,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        records,
        bos=content.bos,
        packed_seq_len=content.packed_seq_len,
        pairs=content.pairs,
    )
    return replace(side, shards=len(records), documents=manifest.documents, tokens=manifest.tokens)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _replace_folder(target: Path, new: Path, replaced: Path) -> None:
    """Rename `new` to `target`, after removing what is there; a missing `new` removes only."""
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(target, replaced)
        shutil.rmtree(replaced)
    if new.exists():
        os.rename(new, target)


def _write_published(out: Path, record: PublishedCorpus) -> None:
    write_file_atomically(out / RECORD_FILE, (json.dumps(asdict(record), indent=1) + "\n").encode())
