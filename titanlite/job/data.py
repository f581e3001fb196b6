"""Open the inputs of a job: the tokenizer, the training data and the validation sets."""

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

VerifySlice = tuple[int, int]  # (rank, ranks): the ranks divide a full verification among them


def open_job_tokenizer(config: JobConfig) -> Tokenizer | None:
    """The tokenizer of [data]; None if data.tokenizer is not set."""
    return open_tokenizer(config.data.tokenizer) if config.data.tokenizer else None


def open_job_stream(
    config: JobConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    verify_slice: VerifySlice | None = None,
) -> SampleStream | None:
    """The training data; None if data.sources is empty. Raises DataError."""
    if not config.data.sources:
        return None
    return open_sample_stream(
        config.data.sources,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        checks=config.data.checks(verify_slice),
        mixture=config.data.mixture,
    )


def open_job_validation(
    config: JobConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    verify_slice: VerifySlice | None = None,
) -> list[ValidationSet]:
    """The validation sets; empty if validation is off. Raises all their errors together."""
    opened: list[ValidationSet] = []
    problems: list[UserError] = []
    for source in config.data.validation if config.validation.enable else ():
        try:
            validation_set = open_validation(
                source,
                tokenizer=tokenizer,
                checks=config.data.checks(verify_slice),
                seq_len=config.validation.seq_len,
                vocab_size=vocab_size,
                timeout_seconds=config.data.read_timeout_seconds,
            )
            opened.append(validation_set)
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    return opened
