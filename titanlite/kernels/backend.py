"""By which kernel queries meet keys, and over which tokens.

All kernels compute attention exactly; they differ in speed and in rounding. Which is fastest
depends on the device, the type and the sizes, so the job's own are tried when it starts.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.documents import document_boundaries
from titanlite.kernels.flash import EagerAttention, flash_kernel_for
from titanlite.log import logger

KERNELS = {  # the best guess first: where all must be deterministic, nothing is measured
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "fa3": SDPBackend.FLASH_ATTENTION,  # which these take the place of
    "fa4": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
ADDED = ("fa3", "fa4")  # by packages of their own
ON_CPU = ("flash", "math")
FOR_DOCUMENTS = ("flash", *ADDED)  # which know of several in one sequence
FOR_PARTS = ("flash",)  # which tell what context parallel needs to merge the parts of a sequence


@dataclass(frozen=True)
class AttentionConfig:
    """[attention] By which kernel, and over which tokens."""

    backend: Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"] = "auto"
    # all are exact; auto: the fastest of those that the device can run, measured at start
    mask: Literal["causal", "document"] = "causal"
    # what a token sees: its sequence up to itself, or only its document, with positions from 0


@dataclass(frozen=True)
class AttentionShape:
    """What one rank computes at once."""

    rows: int  # sequences
    heads: int
    key_heads: int
    tokens: int
    width: int  # of a head

    def __str__(self) -> str:
        return f"{self.heads} heads and {self.key_heads} key-value heads of {self.width}"


def set_attention_kernel(
    model: nn.Module, pattern: str, kernel: str | None, documents: bool
) -> None:
    """Let every module of `pattern` use a kernel, and see documents or whole sequences."""
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern):
            module.backend = KERNELS[kernel] if kernel else None
    if documents:
        model.documents_of = document_boundaries


def choose_kernel(
    config: AttentionConfig,
    sizes: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    in_parts: bool = False,
) -> str | None:
    """The kernel of a job; None leaves it to the attention that is used. Raises ConfigError.

    All ranks must use the same one, so one rank chooses for all. `in_parts`: context parallel.
    """
    documents = config.mask == "document"
    trial = _Trial(sizes, dtype, device, documents)
    if config.backend != "auto":
        if problem := trial.problem(config.backend, fused=documents or in_parts):
            raise ConfigError(
                f'attention.backend = "{config.backend}": cannot run on {device.type} in {dtype}'
                f" with {sizes}: {problem}",
                fix='Use "auto", or another.',
                keys=("attention.backend",),
            )
        return config.backend
    if in_parts or (documents and trial.plain):
        return None
    if device.type == "cpu":  # which has one that SDPA takes by itself; unasked, because a compiled
        return None  # block that names its kernel is not found in the cache (torch 2.13)
    able = FOR_DOCUMENTS if documents else tuple(KERNELS)
    # Where runs must repeat to the bit, no clock may decide between several.
    first = torch.are_deterministic_algorithms_enabled()
    measured = trial.measure([name for name in able if name != "math"], first)
    # Scores of whole sequences in memory, and slow: only where there is nothing else.
    chosen = min(measured, key=measured.get, default="math")
    times = ", ".join(f"{name} {ms:.2f}" for name, ms in measured.items() if ms)
    said = f" (ms forward and backward: {times})" if times else ""
    logger.info("attention by %s%s", chosen, said)
    return chosen


class _Trial:
    """Attention of the sizes of a job, on random numbers, in documents of a quarter sequence."""

    def __init__(
        self, sizes: AttentionShape, dtype: torch.dtype, device: torch.device, documents: bool
    ):
        self.sizes, self.dtype, self.device, self.documents = sizes, dtype, device, documents

    @property
    def plain(self) -> bool:
        """Whether there is no kernel that merges parts, or knows documents, for this type."""
        one = torch.empty(1, 1, 1, self.sizes.width, dtype=self.dtype, device=self.device)
        return isinstance(flash_kernel_for(one), EagerAttention)

    def problem(self, name: str, fused: bool) -> str:
        """Why a kernel cannot run, or nothing."""
        if fused and self.plain:
            return "FlashAttention computes in 16 bits, on GPUs since Ampere."
        with warnings.catch_warnings(record=True) as said:  # where torch says why
            warnings.simplefilter("always")
            try:
                activate_flash_package(name)
                self._run(name)()
            except Exception as error:  # of packages that are missing or not for this device, too
                reasons = [str(warning.message).partition(" (Triggered")[0] for warning in said]
                return " ".join(dict.fromkeys([str(error), *reasons]))
            finally:
                deactivate_flash_package()
        return ""

    def measure(self, names: list[str], first: bool) -> dict[str, float]:
        """Milliseconds of each that can run, or just the `first` of them, not measured."""
        measured = {}
        for name in names:
            if self.problem(name, fused=False):
                continue
            if first:
                return {name: 0.0}
            activate_flash_package(name)
            try:
                run = self._run(name)
                run()  # loads what it needs
                measured[name] = 1e3 * min(self._seconds(run) for _ in range(3))
            finally:
                deactivate_flash_package()
        return measured

    def _run(self, name: str) -> Callable[[], None]:
        """One forward and backward by a kernel."""
        s, attend = self.sizes, CausalAttention(KERNELS[name])
        draw = torch.Generator(self.device).manual_seed(0)  # the common one stays the same on all
        options = {"dtype": self.dtype, "device": self.device, "generator": draw}
        q, k, v = (
            torch.randn(s.rows, s.tokens, heads, s.width, **options).transpose(1, 2)
            for heads in (s.heads, s.key_heads, s.key_heads)
        )
        gradient, inputs = q.clone(), [part.requires_grad_() for part in (q, k, v)]
        documents = self._documents() if self.documents else None

        def run() -> None:
            torch.autograd.grad(attend(*inputs, documents), inputs, gradient)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return run

    def _documents(self) -> Tensor:
        positions = torch.arange(self.sizes.tokens, device=self.device) % -(-self.sizes.tokens // 4)
        return document_boundaries(positions.expand(self.sizes.rows, -1))

    @staticmethod
    def _seconds(run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


# FlashAttention 3 and 4 take the place of torch's own in the whole process.


def activate_flash_package(kernel: str | None) -> None:
    """Put FlashAttention 3 or 4 in its place, on every rank; raises ImportError, RuntimeError."""
    if kernel not in ADDED:
        return
    activate_flash_attention_impl(kernel.upper())


def deactivate_flash_package() -> None:
    """Leave FlashAttention to torch."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def check_attention_config(
    config: AttentionConfig, context_degree: int, tokenizer: str | None
) -> Iterator[ConfigError]:
    """Kernels that cannot do what is asked, and documents whose ends are not known."""
    able, why = tuple(KERNELS), ""
    if config.mask == "document":
        able, why = FOR_DOCUMENTS, 'attention.mask = "document": it sees one document a sequence'
    if context_degree > 1:
        able = FOR_PARTS
        why = "context parallel: it hides the sums of scores by which parts of sequences are merged"
    if config.backend not in ("auto", *able):
        yield ConfigError(
            f'attention.backend = "{config.backend}": cannot be used under {why}.',
            fix=f'Use "auto", or {", ".join(able)}.',
            keys=("attention.backend",),
        )
    if config.mask == "document" and tokenizer is None:
        yield ConfigError(
            'attention.mask = "document": documents end with the end id of data.tokenizer, which is'
            " not set.",
            fix="Name the tokenizer that made the shards.",
            keys=("attention.mask", "data.tokenizer"),
        )
