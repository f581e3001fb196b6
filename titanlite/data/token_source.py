"""TokenSource: the interface between a data format and the stream of samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from titanlite.data.open_files import OpenFiles


@dataclass(frozen=True)
class SourceRecord:
    """What the files of a source record about its tokenization."""

    tokenizer: str  # fingerprint of the tokenizer
    vocab_size: int  # of that tokenizer
    max_id: int  # largest token id in the files
    bos: bool  # every document begins with the tokenizer's BOS


class TokenSource(Protocol):
    """A sequence of `tokens` token ids on disk that can be read at any position.

    To add a data format, subclass this: set `tokens` and `fingerprint`, and implement `gather`. A
    source has no state: a position always gives the same id. The caller shuffles, mixes, repeats
    epochs, and checks that ids are inside the vocabulary. Each document ends with the EOS id.
    """

    tokens: int  # number of ids; at least one
    fingerprint: str
    # Hash of the ids, independent of where the files are. Checkpoints store it, and a run resumes
    # only if it is unchanged. If hashing all ids takes too long, hash what the files record about
    # themselves, and set `content_sample` to detect replaced files.
    content_sample: str | None = None
    # hash of some blocks of the files, read when the source is opened, for checkpoints; None: none
    record: SourceRecord | None = None  # None: the files record nothing
    packed_seq_len: int | None = None
    # The samples of a packed source are its windows of this many tokens and one id more, which
    # `gather_windows` reads. None: a sample may begin at any position

    @abstractmethod
    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start: int64 [len(starts), count].

        All positions are inside [0, tokens). May be called from another thread; raises DataError.
        """
        ...

    def gather_windows(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids [N, T + 1] and labels [N, T] of windows of a packed source; int64."""
        raise TypeError(f"{type(self).__name__} has no windows")


@dataclass(frozen=True)
class CorpusChecks:
    """What to verify when a source is opened, beyond names and sizes."""

    verify: Literal["sample", "full", "off"] = "sample"
    # "sample": some blocks of every shard; "full": every byte, which needs a manifest
    verify_slice: tuple[int, int] = (0, 1)
    # (rank, ranks): "full" reads every byte of the shards [rank::ranks] only


# (path, checks, files) -> the opened source; raises DataError or OSError. All sources of a run
# share the pool `files`, which limits how many are open; a format with few files need not use it.
SourceOpener = Callable[[str, CorpusChecks, OpenFiles], TokenSource]
