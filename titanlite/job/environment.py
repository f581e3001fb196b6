"""Checks of what a configuration needs on this machine: its data, device and compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from titanlite.data import TEXT, SampleStream, Tokenizer, ValidationSet, check_bos
from titanlite.distributed.process_group import choose_device
from titanlite.errors import ConfigError, UserError, UserErrors
from titanlite.job.config import JobConfig
from titanlite.job.data import open_job_stream, open_job_tokenizer, open_job_validation
from titanlite.job.option_checks import check_optimizer_device
from titanlite.kernels.backend import CPU_KERNELS
from titanlite.models import ModelSizes
from titanlite.parallelize.compile import check_compiler
from titanlite.parallelize.float8 import check_float8_device, find_gpu
from titanlite.runtime.membership import check_launcher


def check_environment(config: JobConfig, sizes: ModelSizes | None) -> Iterator[UserError]:
    """Yield the problems of the device, the compiler and the files that the configuration names.

    `sizes`: of the model; None: not known, because of other problems.
    """
    if config.job.check_ranks and not config.job.check:
        yield ConfigError(
            f"job.check_ranks = {config.job.check_ranks}: a run uses the ranks that torchrun"
            " starts.",
            fix="Remove it, or set job.check = true, which only checks the job.",
        )
    yield from check_launcher(config.elastic)
    yield from _check_device(config)
    yield from check_compiler(config.compile, config.compiles_optimizer, device_type(config))
    yield from _check_data(config, sizes)


def _check_device(config: JobConfig) -> Iterator[UserError]:
    """Reject a device that is missing, and options that it does not support."""
    if config.job.check_ranks is None:  # otherwise the job is for another machine
        try:
            device = choose_device(config.job.device)
        except ConfigError as error:
            yield error
            return
        gpu = find_gpu(device)
        compiles_blocks = config.compile.compiles("model") and config.compile.backend == "inductor"
        yield from check_float8_device(config.float8, gpu, compiles_blocks)
        if not config.training.enable_cpu_offload:  # otherwise the optimizer runs on the CPU
            yield from check_optimizer_device(config.optimizer, gpu)
        if device.type == "cpu":
            yield from _check_cpu_options(config)


def _check_cpu_options(config: JobConfig) -> Iterator[ConfigError]:
    """Reject options that need a GPU."""
    if config.parallelism.enable_async_tensor_parallel:
        yield ConfigError(
            "parallelism.enable_async_tensor_parallel = true: requires GPUs with peer-to-peer"
            " memory access, and this job runs on CPUs.",
            fix="Remove parallelism.enable_async_tensor_parallel.",
        )
    if config.attention.backend not in ("auto", *CPU_KERNELS):
        yield ConfigError(
            f'attention.backend = "{config.attention.backend}": requires a GPU, and this job runs'
            " on CPUs.",
            fix=f'Use "auto", or {", ".join(CPU_KERNELS)}.',
        )
    if config.profiling.enable_memory_snapshot:
        yield ConfigError(
            "profiling.enable_memory_snapshot = true: torch records the allocations of GPUs only,"
            " and this job runs on CPUs.",
            fix="Remove profiling.enable_memory_snapshot; peak_memory_gib in metrics.jsonl is the"
            " peak of the whole process.",
        )


def device_type(config: JobConfig) -> str:
    """ "cuda" or "cpu"; does not fail where the device is missing."""
    cuda = config.job.device != "cpu" and torch.cuda.is_available()
    return "cuda" if cuda else "cpu"


def _check_data(config: JobConfig, sizes: ModelSizes | None) -> Iterator[UserError]:
    """Open the tokenizer and every corpus, and yield the problems."""
    if not config.data.sources:
        yield ConfigError(
            "data.sources: is empty: there is nothing to train on.",
            fix='Write sources = [{ name = "text", path = "corpus/train" }] in [data];'
            " titanlite prepare makes such a folder.",
        )
    if config.validation.enable and not config.data.validation:
        yield ConfigError(
            "validation.enable = true: data.validation is empty.",
            fix='Write validation = [{ name = "text", path = "corpus/validation" }] in [data].',
        )
    names = [source.name for source in config.data.validation]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield ConfigError(
            f"data.validation: several sets have the name {', '.join(repeated)}.",
            fix="Give each set its own name: it labels the set's metrics.",
        )
    tokenizer, vocab_size = None, sizes.vocab_size if sizes else 2**31
    try:
        tokenizer = open_job_tokenizer(config)
    except UserError as error:
        yield from _with_key("data.tokenizer", error)
        if any(s.format == TEXT for s in (*config.data.sources, *config.data.validation)):
            return  # text cannot be opened without it
    if tokenizer and tokenizer.vocab_size > vocab_size:
        yield ConfigError(
            f"model.vocab_size = {vocab_size}: is less than the {tokenizer.vocab_size} ids of"
            " data.tokenizer.",
            fix=f"Set model.vocab_size = {tokenizer.vocab_size} or more.",
        )
        vocab_size = tokenizer.vocab_size  # so that the corpora do not report it again
    corpora: dict[str, SampleStream | ValidationSet] = {}  # by their names in messages
    try:
        if config.data.sources:
            corpora["data.sources"] = open_job_stream(config, vocab_size, tokenizer)
    except UserError as error:
        yield from _with_key("data.sources", error)
    try:
        for validation_set in open_job_validation(config, vocab_size, tokenizer):
            corpora[f"data.validation {validation_set.name}"] = validation_set
    except UserError as error:
        yield from _with_key("data.validation", error)
    if tokenizer and config.attention.mask == "document":
        yield from _check_document_ends(corpora.values(), tokenizer)
    try:
        check_bos({name: corpus.bos for name, corpus in corpora.items()})
    except UserError as error:
        yield error


def _check_document_ends(
    corpora: Iterable[SampleStream | ValidationSet], tokenizer: Tokenizer
) -> Iterator[ConfigError]:
    """Reject corpora whose last document does not end with the tokenizer's end-of-document id."""
    for corpus in corpora:
        for name in corpus.sources_without(tokenizer.eos_id):
            yield ConfigError(
                f'attention.mask = "document": the last id of "{name}" is not the end-of-document'
                f" id {tokenizer.eos_id}, so its document boundaries are unknown.",
                fix="Prepare the corpus with this id after every document (Megatron-LM:"
                ' --append-eod), or set attention.mask = "causal".',
            )


def _with_key(key: str, error: UserError) -> Iterator[ConfigError]:
    """The problems of an error, each preceded by the key that it belongs to."""
    for problem in error.problems if isinstance(error, UserErrors) else [error]:
        yield ConfigError(f"{key}: {problem.message}", fix=problem.fix)
