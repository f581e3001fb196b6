"""The data formats that a source can have, by name."""

from __future__ import annotations

from titanlite.data.open_files import OpenFiles
from titanlite.data.packed import open_packed
from titanlite.data.remote_shards import open_shards
from titanlite.data.token_source import CorpusChecks, SourceOpener, TokenSource
from titanlite.errors import DataError

TEXT = "text"
# of text files, which is not opened here: training data are tokenized while they are read
# (text_source.py), a validation set when it is opened (validation_set.py)

FORMATS: dict[str, SourceOpener] = {
    "megatron": open_shards,  # .bin/.idx shards, as titanlite prepare writes them
    "packed": open_packed,  # the same, of windows in which documents are packed by best fit
}


def open_token_source(
    format: str, path: str, checks: CorpusChecks | None = None, files: OpenFiles | None = None
) -> TokenSource:
    """Open the files at `path` as a source of the given format; raises DataError."""
    if format not in FORMATS:
        raise DataError(
            f'{path}: format = "{format}" is not a known data format.',
            fix=f"Use {' or '.join([*FORMATS, TEXT])}.",
        )
    try:
        source = FORMATS[format](path, checks or CorpusChecks(), files or OpenFiles())
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or path}: cannot be read ({reason}).") from None
    if source.tokens < 1:
        raise DataError(f"{path}: contains no tokens.")
    return source
