"""[attention]: the kernel that computes attention, and the mask.

All kernels compute exact attention; they differ in speed and in rounding. The fastest depends on
the device, the dtype and the sizes, so a job measures its own attention at startup.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
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
from titanlite.kernels.documents import SupportsDocuments, index_documents
from titanlite.kernels.flash import EagerAttention, flash_kernel_for, sdpa
from titanlite.log import logger

KERNELS = {  # in the order in which a deterministic run tries them: it uses the first that works
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "fa3": SDPBackend.FLASH_ATTENTION,  # FlashAttention 3 and 4 replace torch's own
    "fa4": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
FLASH_PACKAGES = ("fa3", "fa4")  # installed as packages of their own
CPU_KERNELS = ("flash", "math")
# For documents of any length, and sinks. cuDNN has no windows, and a plan for each set of documents
DOCUMENT_KERNELS = ("flash", *FLASH_PACKAGES)
# Return the log-sum-exp that merging partial results needs.
CONTEXT_PARALLEL_KERNELS = ("flash", "cudnn", *FLASH_PACKAGES)


@dataclass(frozen=True)
class AttentionConfig:
    """[attention] The attention kernel and the attention mask."""

    backend: Literal["auto", "cudnn", "flash", "efficient", "math", "fa3", "fa4"] = "auto"
    # kernel, all are exact; auto: the fastest that the device can run, measured at startup
    mask: Literal["causal", "document"] = "causal"
    # causal: a token attends to its sequence up to itself; document: only within its document,
    # whose positions start at 0
    linear_backend: Literal["torch", "fla"] = "torch"
    # linear attention: by matmuls in fp32, or the Triton kernels of the package fla-core


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the attention that one rank computes in one call."""

    batch: int  # sequences
    n_heads: int
    n_kv_heads: int
    seq_len: int
    head_dim: int
    windows: tuple[int, ...] = (0,)  # of the blocks, each once; see CausalAttention
    sinks: bool = False  # of CausalAttention

    def __str__(self) -> str:
        return f"{self.n_heads} heads and {self.n_kv_heads} key-value heads of {self.head_dim}"


def set_attention_kernel(
    model: nn.Module, pattern: str, kernel: str | None, documents: bool
) -> None:
    """Set the kernel of every CausalAttention that matches `pattern`, and the document mask.

    `kernel` None lets SDPA choose. Raises ConfigError where the model does not support the mask.
    """
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern):
            assert isinstance(module, CausalAttention), f"{name} is not a CausalAttention"
            module.use_backend(KERNELS[kernel] if kernel else None)
    if not documents:
        return
    if not isinstance(model, SupportsDocuments):
        raise ConfigError(
            f'attention.mask = "document": {type(model).__name__} does not support it.',
            fix='Use "causal".',
        )
    model.use_document_mask(index_documents)


def choose_kernel(
    config: AttentionConfig,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    context_degree: int = 1,
) -> str | None:
    """The kernel of a job, which is logged; None: SDPA chooses, or there is only `EagerAttention`.

    All ranks must use the same kernel, so one rank chooses for all. Raises ConfigError.
    """
    needs_lse = config.mask == "document" or context_degree > 1 or shape.sinks
    allowed = _allowed(config, context_degree, shape.sinks)
    trial = _KernelTrial(shape, dtype, device, config.mask == "document", context_degree)
    if config.backend != "auto":
        if reason := trial.failure(config.backend, needs_lse):
            raise ConfigError(
                f'attention.backend = "{config.backend}": cannot run on {device.type} in {dtype}'
                f" with {shape}: {reason}",
                fix=f'Use "auto", or another of {", ".join(allowed)}.',
            )
        logger.info("attention kernel: %s", config.backend)
        return config.backend
    if needs_lse and trial.is_eager:
        logger.info("attention kernel: matmuls and a softmax in fp32")
        return None
    if device.type == "cpu":
        # SDPA chooses the flash kernel itself. It is not named here, because a compiled block that
        # names its kernel is not found in the compiler's cache (torch 2.13).
        return None
    # Measured times vary between runs, so a deterministic run must not choose by them.
    measure = not torch.are_deterministic_algorithms_enabled()
    milliseconds = trial.measure([name for name in allowed if name != "math"], measure)
    # "math" is slow and stores the scores of whole sequences: only where nothing else works.
    chosen = min(milliseconds, key=lambda name: milliseconds[name], default="math")
    times = ", ".join(f"{name} {ms:.2f}" for name, ms in milliseconds.items() if ms)
    logger.info(
        "attention kernel: %s%s", chosen, f" (ms forward and backward: {times})" if times else ""
    )
    return chosen


def _allowed(config: AttentionConfig, context_degree: int, sinks: bool) -> tuple[str, ...]:
    """The kernels that support the mask, sinks, and context parallel if the degree is above 1."""
    if config.mask == "document" or sinks:  # these support context parallel too
        return DOCUMENT_KERNELS
    return CONTEXT_PARALLEL_KERNELS if context_degree > 1 else tuple(KERNELS)


@dataclass(frozen=True)
class _KernelTrial:
    """Runs a job's attention on random inputs; documents are a quarter of a sequence."""

    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device
    documents: bool
    context_degree: int = 1

    @property
    def is_eager(self) -> bool:
        """Whether no kernel for this dtype and device returns the log-sum-exp."""
        q = torch.empty(1, 1, 1, self.shape.head_dim, dtype=self.dtype, device=self.device)
        return isinstance(flash_kernel_for(q), EagerAttention)

    def failure(self, name: str, needs_lse: bool) -> str:
        """Why a kernel cannot run; an empty string if it can."""
        if needs_lse and self.is_eager:
            return (
                "FlashAttention requires a 16-bit dtype, a GPU of Ampere or later, and heads of at"
                " most 256 elements, a multiple of 8."
            )
        with warnings.catch_warnings(record=True) as caught:  # torch's reasons are warnings
            warnings.simplefilter("always")
            try:
                self._milliseconds(name, runs=0)
            except Exception as error:  # any: the package is missing, the device is not supported
                reasons = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
                return " ".join(dict.fromkeys([str(error), *reasons]))
        return ""

    def measure(self, names: list[str], measure: bool = True) -> dict[str, float]:
        """Milliseconds of each kernel that can run; without `measure`: {the first: 0.0}."""
        milliseconds: dict[str, float] = {}
        for name in names:
            if not self.failure(name, needs_lse=False):
                milliseconds[name] = self._milliseconds(name, runs=3) if measure else 0.0
                if not measure:
                    break
        return milliseconds

    def _milliseconds(self, name: str, runs: int) -> float:
        """Of the fastest of `runs` forwards and backwards of a kernel, after one that loads it."""
        seconds = []
        try:
            activate_flash_package(name)
            run = self._runner(name)
            for _ in range(1 + runs):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        finally:
            deactivate_flash_package()
        return 1e3 * min(seconds[1:], default=0.0)

    def _runner(self, name: str) -> Callable[[], None]:
        """A function that runs one forward and backward of a kernel for each window."""
        shape = self.shape
        sinks = shape.n_heads * shape.sinks
        attends = [CausalAttention(KERNELS[name], window, sinks) for window in shape.windows]
        attends = [attend.to(self.device, self.dtype) for attend in attends]
        # a generator of its own: the default one must stay in the same state on all ranks
        generator = torch.Generator(self.device).manual_seed(0)
        inputs = [
            torch.randn(
                (shape.batch, shape.seq_len // self.context_degree, heads, shape.head_dim),
                dtype=self.dtype,
                device=self.device,
                generator=generator,
            ).transpose(1, 2)
            for heads in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
        ]
        # In memory as in training, [B, T, H, K] in that order. cuDNN's backward keeps what it built
        # for the first gradient, and looks it up by the strides of q, k and v alone (torch 2.11,
        # MHACacheKeyWrapper in MHA.cpp): after a gradient in another order, that of q was wrong.
        grad = inputs[0].clone()
        if self.context_degree > 1:
            return partial(self._run_tiles, name, inputs, grad)
        for tensor in inputs:
            tensor.requires_grad_()
        documents = None
        if self.documents:
            positions = torch.arange(shape.seq_len) % -(-shape.seq_len // 4)
            documents = index_documents(positions.expand(shape.batch, -1)).to(self.device)

        def run() -> None:
            for attend in attends:
                torch.autograd.grad(attend(*inputs, documents), inputs, grad)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        return run

    def _run_tiles(self, name: str, inputs: list[Tensor], grad: Tensor) -> None:
        """Two tiles of context parallel: a causal one, and one with half of the keys."""
        if name == "cudnn":  # only SDPA checks what cuDNN supports, and whether it may be used
            q, k, v = (tensor[:, :, :64] for tensor in inputs)  # few tokens, not to be timed
            sdpa(q, k, v, KERNELS[name], is_causal=True)
        (q, *keys_values), kernel = inputs, flash_kernel_for(inputs[0], name == "cudnn")
        for causal in (True, False):
            n_keys = q.shape[2] if causal else q.shape[2] // 2
            keys, values = (tensor[:, :, :n_keys] for tensor in keys_values)
            out, lse = kernel.forward(q, keys, values, causal)
            grads = kernel.backward(grad, q, keys, values, out, lse, causal)
            if not all(tensor.isfinite().all() for tensor in (lse, *grads)):  # waits for the device
                raise RuntimeError("its results are not finite")


# FlashAttention 3 and 4 replace torch's own FlashAttention in the whole process.


def activate_flash_package(kernel: str | None) -> None:
    """Activate FlashAttention 3 or 4 in this process; raises ImportError, RuntimeError.

    Does nothing for the kernels that come with torch.
    """
    if kernel in FLASH_PACKAGES:
        activate_flash_attention_impl(kernel.upper())


def deactivate_flash_package() -> None:
    """Restore torch's own FlashAttention."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def check_attention_config(
    config: AttentionConfig, context_degree: int, tokenizer: str | None, sinks: bool = False
) -> Iterator[ConfigError]:
    """Reject a kernel that does not support the mask, `sinks` or context parallel, and a document
    mask without a tokenizer."""
    supported = _allowed(config, context_degree, sinks)
    feature, reason = 'attention.mask = "document"', "it has no variable-length support"
    if sinks:
        feature, reason = "attention sinks", "titanlite has no gradient of them for it"
    elif config.mask != "document":
        feature = "context parallel"
        reason = "it does not return the log-sum-exp that merges partial results"
    if config.backend not in ("auto", *supported):
        yield ConfigError(
            f'attention.backend = "{config.backend}": cannot be used with {feature}: {reason}.',
            fix=f'Use "auto", or {", ".join(supported)}.',
        )
    if config.linear_backend == "fla" and context_degree > 1:
        yield ConfigError(
            'attention.linear_backend = "fla": cannot be used with context parallel, whose states'
            " the kernels would round.",
            fix='Use "torch".',
        )
    if config.mask == "document" and tokenizer is None:
        yield ConfigError(
            'attention.mask = "document": documents end with the EOS token of data.tokenizer, which'
            " is not set.",
            fix="Set data.tokenizer to the tokenizer that encoded the data.",
        )
