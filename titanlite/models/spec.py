"""What other packages need to know about a model family: a plain module, and facts as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Generic, Literal

from torch import nn

from titanlite.errors import ConfigError
from titanlite.models.config_json import HuggingFaceMapping
from titanlite.models.counts import ModelCounts, count_model, flops_of_block
from titanlite.models.mtp import EMBEDDING_COPY
from titanlite.models.router import NO_BALANCING, ExpertSizes, LoadBalancing, check_expert_sizes
from titanlite.models.sizes import SizesT, prediction_layers
from titanlite.settings import KeyedSection, OneOf


def _family_names() -> Iterable[str]:
    from titanlite.models import FAMILIES  # which imports this module

    return FAMILIES


Converter = Literal["quantize.linear.float8", "quantize.grouped_mm.float8"]


@dataclass(frozen=True)
class ModelConfig(KeyedSection):
    """[model] The architecture to train; further keys are the sizes of the family.

    A size that is set overrides the flavor's.
    """

    KEY: ClassVar[str] = "name"
    UNSET: ClassVar[str] = "that of the flavor"
    REPLACED: ClassVar[dict[str, str]] = {  # keys that other keys replace before this is built
        "from": "Hugging Face folder, whose config.json gives the family and all sizes; other keys"
        " of [model] override them"
    }
    name: Annotated[str, OneOf(_family_names)] = "llama3"  # model family
    flavor: str = "debugmodel"  # named set of sizes of that family
    initialization: Literal["titanlite", "torchtitan"] = "titanlite"
    # standard deviations of the initial weights: the family's, or torchtitan's
    converters: list[Converter] = dataclasses.field(default_factory=list)
    # torchtitan's switches: the first is the same as quantize.linear.float8.recipe_name =
    # "tensorwise"; without the second, quantize.grouped_mm.float8 has no effect
    print_after_conversion: bool = False  # log the module tree after parallelization

    @classmethod
    def choices(cls) -> Mapping[str, type]:
        from titanlite.models import FAMILIES  # which imports this module

        return {name: type(next(iter(spec.flavors.values()))) for name, spec in FAMILIES.items()}


PARAMETER_ROLE_NAMES = {
    # what a parameter does; optimizers and muP have rules for each role
    "embedding": "rows that are looked up by token id, [V, D]",
    "hidden": "matrix between hidden states, [out, in]",
    "query": "hidden matrix that projects to the queries",
    "output": "matrix from hidden states to logits, [V, D]",
    "gain": "vector that multiplies or is added to each channel",
    "query_bias": "vector that is added to the queries",
    "query_gain": "gain of the normalized queries",
    "output_gain": "gain or bias of the hidden states that the output matrix reads",
}


@dataclass(frozen=True)
class ModelSpec(Generic[SizesT]):
    """One model family: how to build its module, and facts about it.

    The module maps tokens [B, T] to logits [B, T, V], or, called with `labels`, to their summed
    loss; `forward` takes what `Llama.forward` takes, and the module has its sizes as `.sizes`. A
    pipeline stage replaces the modules that it does not own with None, and removes blocks.
    """

    name: str
    flavors: Mapping[str, SizesT]
    build: Callable[[SizesT], nn.Module]
    tp_plan: Mapping[str, str]  # module name pattern -> tensor-parallel role; first match applies
    init_roles: Mapping[str, str]
    # parameter name pattern -> role in parallelize/weight_init.py; the first match applies
    parameter_roles: Mapping[str, str]
    # parameter name pattern -> one of PARAMETER_ROLE_NAMES; the first match applies
    hugging_face: HuggingFaceMapping[SizesT]
    check_sizes: Callable[[SizesT], Iterator[ConfigError]] = lambda sizes: iter(())
    # reject sizes that do not fit together; those of experts are checked for every family
    blocks_path: str = "layers"  # the nn.ModuleDict of transformer blocks, keyed by index
    attention_pattern: str = "layers.*.attention.attend"  # of the names of CausalAttention modules
    output_path: str = "output"  # the OutputLayer
    attention_sinks: bool = False  # of CausalAttention, which few kernels can compute
    head_projections: Sequence[str] = ()
    # name patterns of the linear layers to heads of `head_width` features: queries, keys, values
    load_balancing: Callable[[SizesT], LoadBalancing] = lambda sizes: NO_BALANCING
    # unless [experts] says otherwise
    init_std: float = 0.02  # of initial weights, by `init_roles`; as GPT-2 and most models since
    flavor_hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # flavors of torchtitan that are other models here -> what to use

    def tied_parameters(self, sizes: SizesT) -> list[tuple[str, str]]:
        """Pairs of parameter names; the first is the same parameter as the second."""
        output = f"{self.output_path}.weight"
        return [(output, "tok_embeddings.weight")] if sizes.tied_embeddings else []

    def prediction_modules(self, sizes: SizesT) -> list[str]:
        """Modules of multi-token prediction, which the last of several pipeline stages has."""
        indices = range(sizes.n_layers, sizes.n_layers + prediction_layers(sizes))
        return [EMBEDDING_COPY, *(f"{self.blocks_path}.{n}" for n in indices)] if indices else []

    def stage_copies(self, sizes: SizesT) -> list[tuple[str, str]]:
        """Pairs as in `tied_parameters`, of which the first exists in a pipeline stage only."""
        pair = (f"{EMBEDDING_COPY}.weight", "tok_embeddings.weight")
        return [pair] if prediction_layers(sizes) else []

    def stored_copies(self, sizes: SizesT) -> list[tuple[str, str]]:
        """Pairs as in `tied_parameters`, of which the first exists in Hugging Face folders only."""
        blocks, stored = self.prediction_modules(sizes)[1:], self.hugging_face.names
        names = [f"{path}.weight" for path in ("tok_embeddings", self.output_path)]
        copied = [name for name in names if f"{self.blocks_path}.*.{name}" in stored]
        return [(f"{block}.{name}", name) for block in blocks for name in copied]

    def experts(self, sizes: SizesT) -> ExpertSizes | None:
        """The experts of the blocks that have a MixtureOfExperts; None: no block has one."""
        return getattr(sizes, "experts", None)

    def find_size_problems(self, sizes: SizesT) -> Iterator[ConfigError]:
        """What `check_sizes` rejects, and numbers of experts that do not fit together."""
        yield from self.check_sizes(sizes)
        if (experts := self.experts(sizes)) is not None:
            yield from check_expert_sizes(experts)

    def counts(self, sizes: SizesT) -> ModelCounts:
        """What the module consists of."""
        return count_model(self.build, sizes, self.blocks_path)  # type: ignore[arg-type]  # frozen

    def count_parameters(self, sizes: SizesT) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        return self.counts(sizes).parameters

    def flops_per_token(self, sizes: SizesT, seq_len: int, full_attention: bool = False) -> float:
        """Forward and backward FLOPs per token of the model, see `flops_of_block`."""
        blocks = self.counts(sizes).blocks
        total = sum(flops_of_block(block, sizes, seq_len, full_attention) for block in blocks)
        return total + 6 * sizes.vocab_size * sizes.dim * (1 + prediction_layers(sizes))

    def module_flops(self, sizes: SizesT, seq_len: int) -> dict[str, float]:
        """Forward and backward FLOPs per token of each module, in execution order.

        Modules without matmuls count their element-wise operations: an embedding copies a row and
        adds its gradient; the loss, which is part of the output layer, takes about ten per logit.
        Multi-token prediction counts as part of the output layer, as it is on the same stage.
        """
        counts = self.counts(sizes)
        costs = {"tok_embeddings": 2.0 * sizes.dim}
        if counts.has_positions:
            costs["pos_embeddings"] = 2.0 * sizes.dim
        blocks = [flops_of_block(block, sizes, seq_len, False) for block in counts.blocks]
        for index, cost in enumerate(blocks[: sizes.n_layers]):
            costs[f"{self.blocks_path}.{index}"] = cost
        output = sizes.vocab_size * (6 * sizes.dim + 10) * (1 + prediction_layers(sizes))
        further = sum(blocks[sizes.n_layers :])
        return {**costs, "norm": 10.0 * sizes.dim, self.output_path: output + further}

    def sizes_of(self, config: ModelConfig) -> SizesT:
        """The flavor's sizes with the overrides of a [model] section of this family.

        Raises ConfigError for an unknown flavor.
        """
        if config.flavor not in self.flavors:
            raise ConfigError(
                f'model.flavor = "{config.flavor}": must be one of {", ".join(self.flavors)}.',
                fix=self.flavor_hints.get(config.flavor, ""),
            )
        sizes = self.flavors[config.flavor]
        names = [field.name for field in dataclasses.fields(sizes)]
        values = {name: getattr(config, name, None) for name in names}
        changes = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(sizes, **changes)


def first_match(roles: Mapping[str, str], name: str) -> str | None:
    """The role of the first pattern that matches a name; `*` matches any text."""
    return next((role for pattern, role in roles.items() if fnmatchcase(name, pattern)), None)
