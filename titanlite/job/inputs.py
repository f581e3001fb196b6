"""What a job reads: its tokenizer, its samples, its held-out texts."""

from __future__ import annotations

from titanlite.data import (
    SampleStream,
    Tokenizer,
    ValidationSet,
    open_sample_stream,
    open_tokenizer,
    open_validation,
)
from titanlite.errors import UserError
from titanlite.job.config import JobConfig
from titanlite.settings import raise_together


def open_job_tokenizer(config: JobConfig) -> Tokenizer | None:
    return open_tokenizer(config.data.tokenizer) if config.data.tokenizer else None


def open_job_stream(
    config: JobConfig, vocab_size: int, tokenizer, part: tuple[int, int] | None = None
) -> SampleStream | None:
    """The training data; `part` (n, of) of its shards is read in full where the job asks for it."""
    if not config.data.sources:
        return None
    return open_sample_stream(
        config.data.sources,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        checks=config.data.checks(part),
    )


def open_job_validation(
    config: JobConfig, vocab_size: int, tokenizer, part: tuple[int, int] | None = None
) -> list[ValidationSet]:
    """The held-out texts; `part` as for `open_job_stream`."""
    texts, problems, checks = [], [], config.data.checks(part)
    for source in config.data.validation if config.validation.enable else ():
        try:
            options = {"seq_len": config.validation.seq_len, "vocab_size": vocab_size}
            options |= {"timeout_seconds": config.data.read_timeout_seconds}
            texts.append(open_validation(source, tokenizer=tokenizer, checks=checks, **options))
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    return texts
