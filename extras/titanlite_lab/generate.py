"""Generate text with a checkpoint that was saved under any layout, on one process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint import (
    SavedModel,
    model_and_optimizer_state,
    read_saved_facts,
    read_saved_model,
    read_tensors,
)
from titanlite.data import Tokenizer
from titanlite.errors import CheckpointError, ConfigError
from titanlite.models.decoder import build_caches
from titanlite.parallelize.tied import tie_parameters
from titanlite.storage import StorageFolder


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 0  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens with this total probability
    seed: int = 0

    def __post_init__(self):
        allowed = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
        }
        for name, (is_valid, requirement) in allowed.items():
            if not is_valid:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be {requirement}.")


@dataclass(frozen=True)
class TextGenerator:
    """A trained model with its tokenizer."""

    model: nn.Module
    tokenizer: Tokenizer
    bos: bool = False  # in training, every document began with BOS
    document_mask: bool = False  # in training, a document did not attend to the one before it
    published: Mapping[str, Any] = field(default_factory=dict)  # see read_saved_facts

    @property
    def end_ids(self) -> set[int]:
        """EOS, and what else ends a text of the model that the training began with."""
        more = self.published.get("eos_token_id")
        more = more if isinstance(more, list) else [more]
        return {self.tokenizer.eos_id, *(id for id in more if type(id) is int)}

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt, after the token that preceded a document's text in training.

        That is BOS, or the EOS of the document before, or nothing if training used a document
        mask without BOS. If that token is left out, the first tokens are predicted worse
        (quickstart, tokens 2 to 9: a loss of 5.29 instead of 5.04).
        """
        ids, tokenizer = self.tokenizer.encode(prompt), self.tokenizer
        if self.bos:
            return [tokenizer.bos_id, *ids]
        if self.document_mask and ids:
            return ids
        return [tokenizer.eos_id, *ids]  # also because the model needs at least one id

    def complete(self, prompt: str, max_new_tokens: int, sampling: Sampling) -> str:
        """The text that follows a prompt; after an empty prompt, a new document."""
        ids = generate(
            self.model,
            self.prompt_ids(prompt),
            max_new_tokens,
            sampling,
            ends=self.end_ids,
            vocab_size=self.tokenizer.vocab_size,
        )
        return self.tokenizer.decode(list(ids))


def load_generator(
    checkpoint: StorageFolder, device: torch.device, tokenizer: str | None = None
) -> TextGenerator:
    """Load the model and the tokenizer of a `step-N` folder.

    `tokenizer`: path of its file, for a checkpoint without a copy of it. Raises CheckpointError or
    DataError.
    """
    saved = read_saved_model(checkpoint, tokenizer)
    if saved.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint}: was trained on token ids without data.tokenizer.",
            fix="Name the tokenizer that made the ids: --tokenizer PATH.",
        )
    facts = read_saved_facts(saved)
    model = load_model(saved, device)
    return TextGenerator(model, saved.tokenizer, saved.bos, saved.document_mask, facts)


def load_model(
    saved: SavedModel, device: torch.device, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of a checkpoint with its weights, on one device; raises CheckpointError."""
    with torch.device("meta"):
        model = saved.spec.build(saved.sizes).to(dtype)
    model.to_empty(device=device)
    tie_parameters(model, saved.spec.tied_parameters(saved.sizes))
    read_tensors(saved.folder, model_and_optimizer_state(model))
    return model.eval()


def generate(
    model: nn.Module,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    ends: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, at most `max_new_tokens`; stop before an id of `ends`.

    Only ids below `vocab_size` are sampled: a model's vocabulary may be larger than its
    tokenizer's.
    """
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    capacity = len(prompt) + max_new_tokens
    check_length(model, capacity)
    caches = build_caches(layers, capacity)
    # `tokens` are those that the caches do not contain yet.
    tokens, start = torch.tensor([prompt], device=device), 0
    for _ in range(max_new_tokens):
        positions = torch.arange(start, start + tokens.shape[1], device=device)
        with torch.inference_mode():
            logits = model(tokens, positions, caches)[0, -1, :vocab_size]
            sampled = sample_token(logits, sampling, generator)
        start += tokens.shape[1]
        token = int(sampled)
        if token in ends:
            return
        yield token
        tokens = sampled.view(1, 1)


def check_length(model: nn.Module, tokens: int) -> None:
    """Raise ConfigError if a text is longer than the model's learned positions."""
    positions = getattr(model.sizes, "positions", None)
    if positions is not None and tokens > positions:
        raise ConfigError(
            f"{tokens} tokens, those of the prompt and new ones: the model has learned positions"
            f" for {positions}.",
            fix="Generate fewer tokens, or use a shorter prompt.",
        )


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Sample one id (0-d) from logits [V]."""
    if sampling.temperature == 0:
        return logits.argmax()
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        threshold = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1:
        probabilities, ids = logits.softmax(-1).sort(descending=True)
        before = probabilities.cumsum(-1) - probabilities  # 0 for the first, which always stays
        logits = logits.index_fill(0, ids[before >= sampling.top_p], -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[0]
