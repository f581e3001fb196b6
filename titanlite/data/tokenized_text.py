"""A validation set of text: tokenized when it is opened, and kept in memory."""

from __future__ import annotations

import numpy as np
import xxhash

from titanlite.data.sample_source import SourceConfig, open_text_encoder
from titanlite.data.shards import id_type_of
from titanlite.data.text import find_files, list_file_ranges, read_documents
from titanlite.data.token_source import CorpusChecks, SourceRecord, TokenSource
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError

MAX_TEXT_BYTES = 256 << 20  # each rank tokenizes all of it when a run starts, and keeps the ids


class TokenizedText(TokenSource):
    """The ids of all documents of text files, in the order of the files, as shards have them."""

    def __init__(self, config: SourceConfig, tokenizer: Tokenizer | None, checks: CorpusChecks):
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
                    fix="Give fewer files, or prepare the text: scripts/prepare_data.py.",
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


def open_tokenized_text(
    config: SourceConfig, tokenizer: Tokenizer | None, checks: CorpusChecks | None
) -> TokenizedText:
    """Tokenize the text files of a validation set; raises DataError."""
    try:
        return TokenizedText(config, tokenizer, checks or CorpusChecks())
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or config.path}: cannot be read ({reason}).") from None
