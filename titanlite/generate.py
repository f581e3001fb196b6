"""Text from a checkpoint of any layout, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.checkpoint import Place, described_model, read_manifest, read_tensors, state_of
from titanlite.data import Tokenizer, open_tokenizer
from titanlite.errors import CheckpointError, ConfigError
from titanlite.models import KeyValueCache
from titanlite.parallelize.init import tie


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


def open_model(
    checkpoint: Place, device: torch.device, tokenizer: str | None = None
) -> tuple[nn.Module, Tokenizer]:
    """The model and tokenizer of a `step-N` folder; `tokenizer` where its file has moved."""
    manifest = read_manifest(checkpoint)
    family, shape = described_model(checkpoint, manifest)
    path = tokenizer or manifest.job["data"]["tokenizer"]
    if path is None:
        raise CheckpointError(
            f"{checkpoint}: was trained on ids alone, without data.tokenizer.",
            fix="Name the tokenizer that made them: --tokenizer PATH.",
        )
    with torch.device("meta"):
        model = family.build(shape)
    model.to_empty(device=device)
    tie(model, family.tied(shape))
    read_tensors(checkpoint, state_of(model))
    return model.eval(), open_tokenizer(path)


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
            chosen = choose(logits, sampling, generator)
        start += tokens.shape[1]
        token = int(chosen)
        if token == end:
            return
        yield token
        tokens = chosen.view(1, 1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
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


def generate_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, sampling: Sampling
) -> str:
    """What follows a text; an empty prompt starts a document."""
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    end, known = tokenizer.eos_id, tokenizer.vocab_size
    return tokenizer.decode(list(generate(model, ids, count, sampling, end=end, known=known)))
