"""What the rest of the house may ask of a model family: facts as data, and a plain module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from torch import nn

from titanlite.errors import ConfigError
from titanlite.settings import Positive, Range, Supported


@dataclass(frozen=True)
class ModelConfig:
    """[model] Which architecture to train; a field set here overrides the flavor's."""

    name: Literal["llama3"] = "llama3"  # the model family
    flavor: str = "debugmodel"  # a size of that family
    converters: Annotated[
        list[str], Supported(([], ["quantize.linear.float8"]), "Any other converter")
    ] = dataclasses.field(default_factory=list)
    # torchtitan's switch of Float8, here another way to say recipe_name = "tensorwise"
    print_after_conversion: bool = False  # log the module tree once it is parallelized
    dim: Positive | None = None  # width of the residual stream
    n_layers: Positive | None = None  # blocks
    n_heads: Positive | None = None  # query heads a block
    n_kv_heads: Positive | None = None  # key-value heads a block; divides n_heads
    head_dim: Positive | None = None  # width of a head; dim / n_heads where unset
    hidden_dim: Positive | None = None  # width of the feed-forward
    vocab_size: Positive | None = None  # token ids the model knows
    norm_eps: Annotated[float, Range(0)] | None = None  # added under the root of RMSNorm
    rope_theta: Annotated[float, Range(1)] | None = None  # base wavelength of RoPE
    rope_scaling_factor: Annotated[float, Range(1)] | None = None
    # Llama 3.1's stretch of long wavelengths; 1 turns it off
    qk_norm: bool | None = None  # RMSNorm on every query and key head
    tied_embeddings: bool | None = None  # the output layer is the embedding


@dataclass(frozen=True)
class HuggingFaceMapping:
    """The same architecture in Hugging Face's words."""

    architecture: str  # what config.json calls it
    names: Mapping[str, str]  # our parameter -> theirs; `*` is the same number in both
    derived: str  # pattern of what old folders hold beside parameters, and config.json tells too
    to_config: Callable[[Any, int], dict[str, Any]]
    # (shape, tokens it was trained on at once) -> config.json; raises CheckpointError
    from_config: Callable[[Mapping[str, Any]], Any]  # and back; raises CheckpointError

    def name_of(self, name: str) -> str:
        """Their name of a parameter of ours."""
        number = "".join(part for part in name.split(".") if part.isdigit())
        return self.names[re.sub(r"\.\d+\.", ".*.", name)].replace("*", number)


@dataclass(frozen=True)
class ModelSpec:
    """One model family. `shape` below is the family's own frozen dataclass of sizes."""

    name: str
    flavors: Mapping[str, Any]  # flavor -> shape
    build: Callable[[Any], nn.Module]
    tp_plan: Mapping[str, str]  # module pattern -> how tensor parallelism splits it, in words
    init_roles: Mapping[str, str]  # parameter pattern -> how it starts, in words; the first match holds
    blocks_path: str  # the ModuleDict that holds the repeated blocks
    attention_pattern: str  # pattern of the modules that take q, k, v [B, H, T, K] to causal attention
    output_path: str  # the module that is the output layer and the loss, a models.loss.Output
    count_parameters: Callable[[Any], int]
    count_block_parameters: Callable[[Any], int]
    activations_per_block: Callable[[Any], int]
    # numbers a token that a block keeps for backward, where nothing is computed again
    flops_per_token: Callable[..., float]  # (shape, seq_len, full_attention=False)
    module_flops: Callable[[Any, int], dict[str, float]]
    # (shape, seq_len) -> FLOPs a token of each module, in the order in which they run
    tied_parameters: Callable[[Any], list[tuple[str, str]]]  # (parameter, the one it is the same as)
    hugging_face: HuggingFaceMapping

    def sizes_of(self, section: ModelConfig) -> Any:
        """The sizes a [model] section asks for; raises ConfigError."""
        if section.flavor not in self.flavors:
            raise ConfigError(
                f'model.flavor = "{section.flavor}": must be one of {", ".join(self.flavors)}.',
                keys=("model.flavor",),
            )
        sizes = self.flavors[section.flavor]
        names = {field.name for field in dataclasses.fields(sizes)}
        given = {
            field.name: value
            for field in dataclasses.fields(section)
            if field.name in names and (value := getattr(section, field.name)) is not None
        }
        return dataclasses.replace(sizes, **given)


def first_match(facts: Mapping[str, str], name: str) -> str | None:
    """The word of the first pattern that fits a name; `*` stands for anything."""
    return next((word for pattern, word in facts.items() if fnmatchcase(name, pattern)), None)
