"""What a job reads: its tokenizer, its samples, its held-out texts."""

from __future__ import annotations

from titanlite.data import (
    Stream,
    Tokenizer,
    ValidationSet,
    open_stream,
    open_tokenizer,
    open_validation,
)
from titanlite.errors import UserError
from titanlite.job.config import JobConfig
from titanlite.settings import raise_together


def tokenizer_of(config: JobConfig) -> Tokenizer | None:
    return open_tokenizer(config.data.tokenizer) if config.data.tokenizer else None


def stream_of(config: JobConfig, vocab_size: int, tokenizer) -> Stream | None:
    if not config.data.sources:
        return None
    return open_stream(
        config.data.sources,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
    )


def texts_of(config: JobConfig, vocab_size: int, tokenizer) -> list[ValidationSet]:
    texts, problems = [], []
    for source in config.data.validation if config.validation.enable else ():
        try:
            options = {"seq_len": config.validation.seq_len, "vocab_size": vocab_size}
            texts.append(open_validation(source, tokenizer=tokenizer, **options))
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    return texts
