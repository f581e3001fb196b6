"""A validation set: the samples of one source, in the order of its files."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
import xxhash
from torch import Tensor

from titanlite.data.formats import TEXT, open_token_source
from titanlite.data.open_files import MIN_OPEN_FILES, OpenFiles
from titanlite.data.sample_source import (
    SourceConfig,
    StoredSamples,
    check_stored_samples,
    check_window_length,
    open_text_encoder,
)
from titanlite.data.shards import id_type_of
from titanlite.data.text import list_file_ranges, read_documents
from titanlite.data.text_files import find_files
from titanlite.data.token_source import CorpusChecks, SourceRecord, TokenSource
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.labels import IGNORE_INDEX

MAX_TEXT_BYTES = 256 << 20  # each rank tokenizes all of it when a run starts, and keeps the ids


class ValidationSet:
    """The samples of a validation source in file order; the last of `samples` may be shorter."""

    def __init__(self, source: StoredSamples, seq_len: int, tokenizer: Tokenizer | None = None):
        self.name, self.seq_len, self._source = source.name, seq_len, source
        self._tokenizer = tokenizer
        self.bos = source.bos
        self.samples = source.samples(seq_len, whole=False)

    @cached_property
    def token_bytes(self) -> Tensor | None:
        """Bytes of text that each id stands for, int64 [V] of the model; None: no tokenizer."""
        # When it is first read: while settings are checked, vocab_size may be a stand-in of 2^31.
        if self._tokenizer is None:
            return None
        counts = torch.zeros(self._source.vocab_size, dtype=torch.int64)
        lengths = [len(text) for text in self._tokenizer.token_bytes()]
        counts[: len(lengths)] = torch.tensor(lengths)[: len(counts)]
        return counts

    def read(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples [start, start + sequences): int64 [B, T] each.

        Past the end of the source, labels are IGNORE_INDEX. Raises DataError.
        """
        if self._source.is_packed:
            return self._read_windows(start, sequences)
        length, tokens = self.seq_len, self._source.tokens
        first = start * length
        ids = np.full((sequences, length + 1), IGNORE_INDEX, dtype=np.int64)
        full_sequences = max(0, min(sequences, (tokens - 1 - first) // length))
        ids[:full_sequences] = self._source.gather(
            first + np.arange(full_sequences) * length, length + 1
        )
        rest = tokens - first - full_sequences * length
        if full_sequences < sequences and rest > 1:
            ids[full_sequences, :rest] = self._source.gather(np.array([tokens - rest]), rest)
        both = torch.from_numpy(ids)
        # the embedding needs a valid id for every input
        return both[:, :-1].clamp(min=0), both[:, 1:].clone()

    def _read_windows(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        inputs = torch.zeros((sequences, self.seq_len), dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORE_INDEX)
        count = max(0, min(sequences, self.samples - start))
        read = self._source.read_samples(np.arange(start, start + count), self.seq_len)
        inputs[:count], labels[:count] = map(torch.from_numpy, read)
        return inputs, labels

    def sources_without(self, document_end_id: int) -> list[str]:
        """The set's name, if its last id is not `document_end_id`."""
        return [self.name] if self._source.lacks_end(document_end_id) else []


class TokenizedText(TokenSource):
    """The ids of all documents of text files, in the order of the files, as shards have them."""

    def __init__(self, config: SourceConfig, tokenizer: Tokenizer | None):
        """Raises DataError, or OSError."""
        encode, path = open_text_encoder(config, tokenizer), config.path
        assert tokenizer is not None, "open_text_encoder refuses it"
        ranges = list_file_ranges(find_files([path]))
        id_type, parts, size = id_type_of(tokenizer.vocab_size), [], 0
        for text in read_documents(ranges, MAX_TEXT_BYTES):
            size += len(text.encode())
            if size > MAX_TEXT_BYTES:
                raise DataError(
                    f"{path}: has more than {MAX_TEXT_BYTES >> 20} MiB of text, which every rank"
                    " would keep in memory as token ids.",
                    fix="Give fewer files, or prepare the text: titanlite prepare.",
                )
            parts.append(encode(text).astype(id_type))
        if not parts:
            raise DataError(f"{path}: contains no text.")
        self._ids = np.concatenate(parts)
        self.tokens = len(self._ids)
        self.fingerprint = xxhash.xxh3_128_hexdigest(self._ids.data)
        max_id, vocab_size = int(self._ids.max()), tokenizer.vocab_size
        self.record = SourceRecord(tokenizer.fingerprint, vocab_size, max_id, config.bos)

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start: int64 [len(starts), count]."""
        return self._ids[starts[:, None] + np.arange(count)].astype(np.int64)


def open_validation(
    config: SourceConfig,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    checks: CorpusChecks | None = None,
) -> ValidationSet:
    """Open all of a source as a validation set; raises DataError."""
    if config.format == TEXT:
        try:
            source: TokenSource = TokenizedText(config, tokenizer)
        except OSError as error:
            name, reason = error.filename or config.path, error.strerror or error
            raise DataError(f"{name}: cannot be read ({reason}).") from None
    else:
        files = OpenFiles(MIN_OPEN_FILES)  # its shards are read one after the other
        source = open_token_source(config.format, config.path, checks, files)
    check_window_length(config, source, "validation.seq_len", seq_len)
    checked = check_stored_samples(config, source, 2, vocab_size, tokenizer)
    return ValidationSet(checked, seq_len, tokenizer)
