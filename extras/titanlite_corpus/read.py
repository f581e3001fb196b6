"""Stage "read": files, URLs, web archives and datasets -> tables of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc  # type: ignore[import-untyped]  # pyarrow has no stubs

from titanlite.data.text import (
    Document,
    ProblemHandler,
    ReadProblem,
    TextRules,
    list_file_ranges,
    raise_problem,
    read_located_documents,
)
from titanlite.data.text_files import SUFFIXES, FileRange, find_files
from titanlite.data.tokenizer import well_formed
from titanlite.errors import DataError
from titanlite.settings import Positive
from titanlite_corpus.chat.lines import CHAT_KEYS, PAIR_KEYS
from titanlite_corpus.counts import (
    SAMPLES,
    choose_samples,
    count_table,
    merge_counts,
    shorten_sample,
)
from titanlite_corpus.datasets_library import (
    DATASETS_SCHEME,
    list_dataset_ranges,
    read_dataset_rows,
)
from titanlite_corpus.documents import TABLE_BYTES, TEXT, build_table, write_tables
from titanlite_corpus.engine import report_progress
from titanlite_corpus.task import Counts, Task
from titanlite_corpus.web_pages import WEB_SUFFIXES, read_web_pages, require_web_extra

# Bytes of text per byte of a file, about; if a file has more, its task writes more tables
_EXPANSIONS = {".gz": 4, ".zst": 4, ".parquet": 3}
_MAX_SUFFIXES = 50  # of files that are not read, in the report
_ROW_BYTES = 128  # in memory of a document, besides its origin and text
_CHAT_SUFFIXES = (".jsonl", ".gz", ".zst")


@dataclass(frozen=True)
class CorpusSource:
    """One of `[[sources]]`: text that becomes one folder of shards."""

    name: str  # its folder in `out`
    inputs: list[str]  # files, folders, patterns, URLs, or "datasets://NAME?split=train"
    text_field: str = "text"  # key of each line of a .jsonl; column of a .parquet or a dataset
    kind: Literal["text", "chat", "pairs"] = "text"
    # "chat": conversations, for fine-tuning; "pairs": a chosen and a rejected answer, for DPO. Both
    # are lines of a .jsonl (docs/how-to/fine-tune.md)
    template: str = "llama3"
    # chat template: "llama3", "chatml", or the path of a tokenizer_config.json or .jinja
    answers: Literal["all", "last"] = "all"
    # of a conversation that are trained on; of pairs, it is always the last one


@dataclass(frozen=True)
class ReadConfig:
    """[read] What happens to files and lines that cannot be read."""

    on_error: Literal["refuse", "skip"] = "refuse"  # "skip": count and report them
    document_mib: Positive = 128  # longer documents are errors


def plan_reading(
    source: CorpusSource, config: ReadConfig, unread: list[Path] | None = None
) -> list[Task]:
    """Tasks that read a source, each about one table; raises DataError.

    `unread` gets the files in its folders that are not read.
    """
    return [
        Task(
            "read",
            read_part,
            {
                "source": source.name,
                "ranges": [asdict(part) for part in group],
                "rules": asdict(_text_rules(source, config)),
                "on_error": config.on_error,
                "table_bytes": TABLE_BYTES,
            },
            version=3,
        )
        for group in _group_ranges(_list_ranges(source, config, unread))
    ]


def _text_rules(source: CorpusSource, config: ReadConfig) -> TextRules:
    keys = {"text": (), "chat": CHAT_KEYS, "pairs": PAIR_KEYS}[source.kind]
    return TextRules((*keys, source.text_field)[0], config.document_mib << 20, json_fields=keys)


def count_unread(files: Iterable[Path]) -> Counts:
    """`unread` by suffix, and `samples` of the names, of files that are not read."""
    names: dict[str, list[str]] = {}
    for name in (well_formed(str(file)) for file in files):
        names.setdefault(Path(name).suffix or "without a suffix", []).append(name)
    most = sorted(names, key=lambda suffix: (-len(names[suffix]), suffix))[:_MAX_SUFFIXES]
    samples = {
        rule: [{"origin": names[suffix][n]} for n in choose_samples(rule, names[suffix])]
        for suffix in most
        for rule in [f"read.unread {suffix}"]
    }
    return {"unread": {suffix: len(names[suffix]) for suffix in most}, "samples": samples}


def _list_ranges(
    source: CorpusSource, config: ReadConfig, unread: list[Path] | None
) -> Iterator[FileRange]:
    """All ranges of a source, in the order of its inputs."""
    files = [given for given in source.inputs if not given.startswith(DATASETS_SCHEME)]
    found = find_files(files, (*SUFFIXES, *WEB_SUFFIXES), unread)
    for given in (*map(str, found), *given_datasets(source)) if source.kind != "text" else ():
        if not given.endswith(_CHAT_SUFFIXES):
            raise DataError(
                f'sources: "{source.name}": {given}: chats and pairs are read from .jsonl files.',
                fix="Convert it; docs/how-to/fine-tune.md shows the lines that are read.",
            )
    if any(str(file).endswith(WEB_SUFFIXES) for file in found):
        require_web_extra(source.name)
    # "skip": a damaged .parquet is reported by the task that reads it
    on_problem = raise_problem if config.on_error == "refuse" else lambda problem: None
    for part in list_file_ranges(found, source.text_field, on_problem):
        yield from part.split(TABLE_BYTES // _expansion(part))
    for given in given_datasets(source):
        yield from list_dataset_ranges(given)


def given_datasets(source: CorpusSource) -> list[str]:
    """The inputs that the `datasets` library opens."""
    return [given for given in source.inputs if given.startswith(DATASETS_SCHEME)]


def _expansion(part: FileRange) -> int:
    return _EXPANSIONS.get(Path(part.path).suffix, 1)


def _group_ranges(ranges: Iterable[FileRange]) -> Iterator[list[FileRange]]:
    """Ranges that make about one table: small files are combined."""
    group: list[FileRange] = []
    size = 0
    for part in ranges:
        part_size = part.bytes * _expansion(part)
        if group and size + part_size > TABLE_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += part_size
    if group:
        yield group


def read_part(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a read task: the documents of some ranges as tables."""
    ranges = [FileRange(**part) for part in arguments["ranges"]]
    rules, name = TextRules(**arguments["rules"]), arguments["source"]
    skipped = _Skipped() if arguments["on_error"] == "skip" else None
    on_problem: ProblemHandler = raise_problem if skipped is None else skipped.add
    # the report lists a source even if it has no document
    no_documents = {"sources": {name: {"documents_out": 0, "bytes_out": 0}}}
    counts: list[Counts] = [no_documents, {"file_bytes": sum(part.bytes for part in ranges)}]
    tables = _build_tables(_read(ranges, rules, on_problem), name, arguments["table_bytes"])
    write_tables(out, _remove_empty(tables, counts))
    return merge_counts([*counts, skipped.counts() if skipped else {}])


def _read(
    ranges: Sequence[FileRange], rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    for part in ranges:
        if part.path.startswith(DATASETS_SCHEME):
            yield from read_dataset_rows(part, rules, on_problem)
        elif part.path.endswith(WEB_SUFFIXES):
            yield from read_web_pages(part, rules, on_problem)
        else:
            yield from read_located_documents([part], rules, on_problem)


def _build_tables(documents: Iterable[Document], source: str, table_bytes: int) -> Iterator[Any]:
    """Tables of about `table_bytes`, at least one; documents without text are left in."""
    texts: list[str] = []
    origins: list[str] = []
    size = 0
    for text, origin in documents:
        report_progress()  # a table of web pages, or from a slow network, may take minutes
        texts.append(text)
        origins.append(origin)
        # at least the bytes of the text in most languages; an empty text has an origin, too
        text_size = len(text) * (1 if text.isascii() else 3)
        size += max(text_size, _ROW_BYTES + len(origin))
        if size >= table_bytes:
            yield _build_valid_table(texts, source, origins)
            texts, origins, size = [], [], 0
    yield _build_valid_table(texts, source, origins)


def _build_valid_table(texts: list[str], source: str, origins: list[str]) -> Any:
    try:
        return build_table(texts, source, origins)
    except UnicodeEncodeError:  # JSON may contain halves of surrogate pairs, UTF-8 may not
        return build_table(list(map(well_formed, texts)), source, list(map(well_formed, origins)))


def _remove_empty(tables: Iterable[Any], counts: list[Counts]) -> Iterator[Any]:
    """The tables, from which documents without text are removed; appends to `counts`."""
    for table in tables:
        has_text = pc.greater(pc.binary_length(table[TEXT]), 0)
        kept = table.filter(has_text)
        empty = table.num_rows - kept.num_rows
        removed = {"read.empty": {"documents": empty, "bytes": 0}} if empty else {}
        counts.append({**count_table(kept, "out"), "removed": removed})
        yield kept


class _Skipped:
    """A `ProblemHandler` that counts problems by kind, with samples of their messages."""

    def __init__(self) -> None:
        self._problems: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, problem: ReadProblem) -> None:
        report_progress()  # a page may take long to be refused
        kind, messages = problem.kind, self._problems.setdefault(problem.kind, [])
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if len(messages) < SAMPLES:
            messages.append(problem.error.message)

    def counts(self) -> Counts:
        """`skipped` by kind, and `samples` of their messages."""
        samples = {
            f"read.{kind}": [
                {"origin": text.partition(": ")[0], "text": shorten_sample(text)}
                for text in messages
            ]
            for kind, messages in self._problems.items()
        }
        return {"skipped": self._counts, "samples": samples}
