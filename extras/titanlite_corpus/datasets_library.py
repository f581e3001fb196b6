"""Whatever the Hugging Face `datasets` library opens: inputs "datasets://NAME?split=train".

The query has the arguments of `datasets.load_dataset`: `name`, `split`, `revision`, `data_dir`,
`data_files`. NAME is that of a dataset on the hub, of a folder, or of a format such as "csv".
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from gzip import BadGzipFile
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import xxhash

from titanlite.data.text import Document, ProblemHandler, ReadProblem, TextRules
from titanlite.data.text_files import FileRange, too_long_error
from titanlite.data.urls import storage_errors
from titanlite.errors import ConfigError, DataError, UserError
from titanlite_corpus.documents import TABLE_BYTES
from titanlite_corpus.extras import import_extra

DATASETS_SCHEME = "datasets://"
_ARGUMENTS = ("name", "split", "revision", "data_dir", "data_files")


def list_dataset_ranges(url: str) -> list[FileRange]:
    """One range for each part of a dataset that can be read separately; raises DataError."""
    arguments = _parse_url(url)
    library = _import_library(url)
    try:
        builder = library.load_dataset_builder(
            **{k: arguments[k] for k in arguments if k != "split"}
        )
        files = builder.config.data_files or {}
        metadata = {str(split): list(files[split].origin_metadata) for split in files}
        identity = f"{url} {builder.hash} {builder.config_id} {metadata}"
        parts = _open_dataset(url).num_shards
    except Exception as error:  # the library raises errors of many classes
        raise _not_opened_error(url, error) from None
    version = xxhash.xxh3_64_intdigest(identity.encode()) >> 1
    return [FileRange(url, parts, version, n, n + 1, TABLE_BYTES) for n in range(parts)]


def read_dataset_rows(
    part: FileRange, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    """The rows of the parts [start, end) of a dataset; `on_problem` gets what cannot be read.

    Raises StorageError if the library cannot fetch a part.
    """
    row = 0
    try:
        for number in range(part.start, part.end):
            shard = _open_dataset(part.path).shard(num_shards=part.file_bytes, index=number)
            for row, values in enumerate(shard, 1):
                location = f"{part.path}:{number}:{row}"
                text = values.get(rules.text_field)
                if not isinstance(text, str | None) or rules.text_field not in values:
                    known = ", ".join(values)
                    message = f'{location}: has no "{rules.text_field}" that is text, only {known}.'
                    on_problem(ReadProblem("not_json", DataError(message)))
                elif text and len(text.encode("utf-8", "surrogatepass")) > rules.max_bytes:
                    on_problem(ReadProblem("too_long", too_long_error(location, rules.max_bytes)))
                else:
                    yield Document(text or "", location)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the library raises errors of many classes
        location = f"{part.path}, after row {row}"
        if not _is_damage(error):
            with storage_errors(location):
                raise
        on_problem(ReadProblem("damaged", _not_opened_error(location, error)))


def _is_damage(error: Exception) -> bool:
    """Whether an error says that content is damaged; any other may be storage that fails."""
    # Arrow raises ArrowInvalid, a ValueError, or a plain OSError without a number; an OSError of
    # the network is of a subclass or has a number
    from_arrow = type(error) is OSError and error.errno is None
    return from_arrow or isinstance(error, ValueError | EOFError | BadGzipFile | zlib.error)


@lru_cache(maxsize=1)
def _open_dataset(url: str) -> Any:
    arguments = _parse_url(url)
    return _import_library(url).load_dataset(**arguments, streaming=True)


def _parse_url(url: str) -> dict[str, Any]:
    """The arguments of `load_dataset`; raises ConfigError."""
    parts = urlsplit(url)
    # The format "pandas" unpickles files; a chain of URLs can redirect to any file.
    if "::" in unquote(url) or parts.netloc == "pandas":
        raise ConfigError(f"{url}: chains of URLs (a::b) and pickles are not opened.")
    arguments: dict[str, Any] = {"split": "train"}
    for key, value in parse_qsl(parts.query):
        if key not in _ARGUMENTS:
            raise ConfigError(
                f"{url}: unknown argument {key}.", fix=f"Arguments are {', '.join(_ARGUMENTS)}."
            )
        arguments[key] = value
    return {"path": unquote(parts.netloc + parts.path), **arguments}


def _import_library(url: str) -> Any:
    datasets = import_extra("datasets", "hf", f"{url}:")
    datasets.disable_progress_bars()
    return datasets


def _not_opened_error(location: str, error: Exception) -> DataError:
    if isinstance(error, UserError):
        return DataError(error.message, error.fix)
    return DataError(f"{location}: cannot be read ({type(error).__name__}: {error}).")
