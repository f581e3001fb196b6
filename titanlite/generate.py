"""Text from a checkpoint of any layout, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.checkpoint import model_and_optimizer_state, read_saved_model, read_tensors
from titanlite.data import Tokenizer
from titanlite.errors import CheckpointError, ConfigError
from titanlite.kernels.attention import KeyValueCache
from titanlite.parallelize.weight_init import tie_parameters
from titanlite.storage import StorageFolder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8  # 0: always the likeliest
    top_k: int = 0  # only among the k likeliest; 0: all
    top_p: float = 1.0  # only among the likeliest that together have this probability
    seed: int = 0

    def __post_init__(self):
        allowed = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
        }
        for name, (fine, words) in allowed.items():
            if not fine:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be {words}.")


@dataclass(frozen=True)
class TextGenerator:
    """A trained model with its tokenizer."""

    model: nn.Module
    tokenizer: Tokenizer
    bos: bool = False  # every document it was trained on began with BOS
    documents_apart: bool = False  # attention.mask = "document": none saw the end of the one before

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a prompt, behind what stood before a document's text in training.

        That is BOS, or else the end id of the document before. Without it, the first tokens are
        predicted worse (quickstart, tokens 2 to 9: a loss of 5.29 instead of 5.04).
        """
        ids, tokenizer = self.tokenizer.encode(prompt), self.tokenizer
        if self.bos:
            return [tokenizer.bos_id, *ids]
        if self.documents_apart and ids:
            return ids
        return [tokenizer.eos_id, *ids]  # of an empty prompt, something must come first

    def write(self, prompt: str, count: int, sampling: Sampling) -> str:
        """What follows a prompt; an empty one starts a document."""
        end, known = self.tokenizer.eos_id, self.tokenizer.vocab_size
        ids = self.prompt_ids(prompt)
        written = generate(self.model, ids, count, sampling, end=end, known=known)
        return self.tokenizer.decode(list(written))


def load_generator(
    checkpoint: StorageFolder, device: torch.device, tokenizer: str | None = None
) -> TextGenerator:
    """The model and tokenizer of a `step-N` folder, by the copies in it.

    `tokenizer`: the path of its file, where the checkpoint has no copy. Raises CheckpointError,
    or DataError.
    """
    saved = read_saved_model(checkpoint, tokenizer)
    if saved.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint}: was trained on ids alone, without data.tokenizer.",
            fix="Name the tokenizer that made them: --tokenizer PATH.",
        )
    with torch.device("meta"):
        model = saved.spec.build(saved.sizes)
    model.to_empty(device=device)
    tie_parameters(model, saved.spec.tied_parameters(saved.sizes))
    read_tensors(checkpoint, model_and_optimizer_state(model))
    return TextGenerator(model.eval(), saved.tokenizer, saved.bos, saved.document_mask)


def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    *,
    end: int | None = None,
    known: int | None = None,
) -> Iterator[int]:
    """Up to `count` ids that go on from `prompt`, one by one; stops before the id `end`.

    Only the first `known` ids are written: a model may have room for more than its tokenizer has.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    capacity = len(prompt) + count
    caches = {name: KeyValueCache(capacity) for name in model.layers}
    tokens, start = torch.tensor([prompt], device=device), 0
    for _ in range(count):
        positions = torch.arange(start, start + tokens.shape[1], device=device)
        with torch.inference_mode():
            logits = model(tokens, positions, caches)[0, -1, :known]
            chosen = sample_token(logits, sampling, generator)
        start += tokens.shape[1]
        token = int(chosen)
        if token == end:
            return
        yield token
        tokens = chosen.view(1, 1)


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One id, 0-d, drawn from logits [V]."""
    if sampling.temperature == 0:
        return logits.argmax()
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, ids = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # the probability of those likelier: the first stays
        logits = logits.index_fill(0, ids[before >= sampling.top_p], -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[0]
