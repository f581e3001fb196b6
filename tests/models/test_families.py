"""A second model family is one spec and one line; what it does not have is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from titanlite.errors import ConfigError, UserError, format_error
from titanlite.job import read_job
from titanlite.models import FAMILIES, LLAMA3, Llama, Llama3Sizes, ModelConfig
from titanlite.settings import build_dataclass


@dataclass(frozen=True)
class TinySizes:
    """Fewer sizes than Llama 3: no head_dim, no qk_norm, nothing about RoPE."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int

    tied_embeddings = False

    @property
    def head_width(self) -> int:
        return self.dim // self.n_heads

    def as_llama(self) -> Llama3Sizes:
        return Llama3Sizes(**dataclasses.asdict(self))


def check_tiny_sizes(sizes: TinySizes) -> Iterator[ConfigError]:
    if sizes.n_layers > 3:
        yield ConfigError(f"model.n_layers = {sizes.n_layers}: tiny has at most 3.")


TINY = replace(
    LLAMA3,
    name="tiny",
    flavors={"mini": TinySizes(32, 2, 4, 2, 48, vocab_size=61)},
    build=lambda sizes: Llama(sizes.as_llama()),
    check_sizes=check_tiny_sizes,
)


@pytest.fixture
def tiny(monkeypatch):
    """The family in FAMILIES, as one more line would add it."""
    monkeypatch.setitem(FAMILIES, "tiny", TINY)


def read_tiny(run_toml, *argv: str):
    arguments = ["--model.name", "tiny", "--model.flavor", "mini", *argv]
    return read_job(["--job.config_file", str(run_toml), *arguments], 1)


def refusal(run_toml, *argv: str) -> str:
    with pytest.raises(UserError) as raised:
        read_tiny(run_toml, *argv)
    return format_error(raised.value)


def test_a_family_in_the_dictionary_can_be_configured(run_toml, tiny):
    job = read_tiny(run_toml)
    assert job.spec is TINY
    # the flavor's, and the file's overrides
    assert job.sizes == TinySizes(32, 2, 4, 2, 64, vocab_size=258)
    assert job.spec.build(job.sizes)(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 258)


def test_an_unknown_family_is_refused_with_the_known_ones(tiny):
    _, (error,) = build_dataclass(ModelConfig, {"name": "tinny"})
    assert str(error).endswith(' | "tiny". Did you mean "tiny"?')
    assert '"llama3" | "qwen3" | ' in str(error)


def test_without_the_line_the_family_is_refused(run_toml):
    assert 'model.name = tiny: must be "llama3" | ' in refusal(run_toml)


def test_a_size_that_the_family_does_not_have_is_refused(run_toml, tiny):
    """It was ignored, so the model was not the one that the configuration describes."""
    message = refusal(run_toml, "--model.head_dim", "16", "--model.qk_norm", "true")
    for key, value in (("head_dim", "16"), ("qk_norm", "true")):
        assert (
            f'model.{key} = {value}: is not a key of model.name = "tiny". Remove it; this name has'
            " dim, n_layers, n_heads, n_kv_heads, hidden_dim, vocab_size. Those with"
            f" {key}: llama3, " in message
        )


def test_a_family_checks_its_own_sizes(run_toml, tiny):
    assert "tiny has at most 3" in refusal(run_toml, "--model.n_layers", "4")
