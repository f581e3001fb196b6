"""A family in Hugging Face's format: the names of its tensors, and its config.json both ways."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor

from titanlite.errors import CheckpointError
from titanlite.models.sizes import SizesT

EXPERT_INDEX = "{expert}"  # in Hugging Face's names


@dataclass(frozen=True)
class StoredPart:
    """How Hugging Face stores a parameter, where it does not store the same tensor."""

    transposed: bool = False  # a matrix is stored as [in, out]
    index: int = 0  # which of the parameters that are concatenated along their outputs
    count: int = 1  # how many are; all have the same shape

    def stored_shape(self, shape: Sequence[int]) -> torch.Size:
        """Shape of the stored tensor that contains a parameter of `shape`."""
        rows, *columns = shape
        stored = [rows * self.count, *columns]
        return torch.Size(reversed(stored) if self.transposed else stored)

    def own_shape(self, stored: Sequence[int]) -> torch.Size:
        """Shape of the parameter in a stored tensor; inverse of `stored_shape`."""
        rows, *columns = reversed(stored) if self.transposed else stored
        return torch.Size([rows // self.count, *columns])

    def read(
        self, stored: Any, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]
    ) -> Tensor:
        """`lengths` elements from `offsets` on of a parameter of `shape`; `stored` is sliced."""
        first = [self.index * shape[0] + offsets[0], *offsets[1:]]
        part = [slice(start, start + n) for start, n in zip(first, lengths, strict=True)]
        return stored[tuple(reversed(part))].t() if self.transposed else stored[tuple(part)]


def join_parts(parts: Sequence[StoredPart], tensors: Sequence[Tensor]) -> Tensor:
    """The stored tensor of some parameters, given in any order."""
    ordered = sorted(zip(parts, tensors, strict=True), key=lambda pair: pair[0].index)
    joined = torch.cat([tensor for _, tensor in ordered]) if len(ordered) > 1 else ordered[0][1]
    return joined.t() if parts[0].transposed else joined


SAME_TENSOR = StoredPart()


@dataclass(frozen=True)
class HuggingFaceMapping(Generic[SizesT]):
    """The same architecture in Hugging Face's format."""

    architecture: str  # in config.json's `architectures`
    names: Mapping[str, str]
    # titanlite's parameter name -> Hugging Face's; `*`: layer index; `{expert}`: stacked experts
    # [E, ...] are one tensor for each expert, with its index in the name
    derived: str  # pattern of tensors in old folders that are computed from config.json
    to_config: Callable[[SizesT, int], dict[str, Any]]
    # (sizes, tokens per training sequence) -> config.json; raises CheckpointError
    from_config: Callable[[Mapping[str, Any]], SizesT]  # inverse; raises CheckpointError
    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    # names as in `names` of parameters that are not stored as the same tensor
    optional_prefix: str = ""  # of names; a folder may leave it out

    def name_of(self, name: str) -> str:
        """Hugging Face's name of one of our parameters; with `{expert}` if it is stacked."""
        index = "".join(part for part in name.split(".") if part.isdigit())
        return self.names[_without_index(name)].replace("*", index)

    def stored_as(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        """Hugging Face's names and shapes of the tensors that one of our parameters is stored in.

        Several, if ours stacks the weights of experts.
        """
        stored = self.name_of(name)
        if EXPERT_INDEX not in stored:
            return {stored: self.part_of(name).stored_shape(shape)}
        return {stored.replace(EXPERT_INDEX, str(expert)): shape[1:] for expert in range(shape[0])}

    def is_stacked(self, name: str) -> bool:
        """Whether one of our parameters is a tensor for each expert."""
        return EXPERT_INDEX in self.name_of(name)

    def part_of(self, name: str) -> StoredPart:
        """How one of our parameters is stored in the tensor of that name."""
        return self.parts.get(_without_index(name), SAME_TENSOR)


def _without_index(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


# --- config.json ----------------------------------------------------------------------------------

HEAD_KEYS = {  # fields of the sizes of most families -> keys
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
}
SAME_AS_LLAMA = {  # values without which a model is not computed as Llama's blocks are
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
UNSUPPORTED = {  # keys of many architectures that none of ours implements
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}  # not auto_map, which names code in the folder: it is never run, and `architectures` is known


@dataclass(frozen=True)
class ConfigFormat(Generic[SizesT]):
    """config.json of one architecture: which keys there are, and what a missing one means."""

    family: str  # in errors
    architecture: str
    model_type: str
    sizes: type[SizesT]
    keys: Mapping[str, str]  # field of the sizes -> key
    fixed: Mapping[str, Any]  # other keys that change the results -> the only supported value
    defaults: Mapping[str, Any]  # transformers' values of missing keys; others are required
    context: str = "max_position_embeddings"
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    # keys of the supported scaling -> their only values, with "rope_type"; empty: none
    has_head_width: bool = True  # of a head: head_dim, or dim / n_heads; false: other keys say it

    def mapping(
        self,
        names: Mapping[str, str],
        derived: str,
        to_config: Callable[[SizesT, int], dict[str, Any]] | None = None,
        from_config: Callable[[Mapping[str, Any]], SizesT] | None = None,
    ) -> HuggingFaceMapping[SizesT]:
        """The architecture there; the functions default to `write` and `read`."""

        def write(sizes: SizesT, context: int) -> dict[str, Any]:
            return self.write(sizes, **{self.context: context})

        to_config, from_config = to_config or write, from_config or self.read
        return HuggingFaceMapping(self.architecture, names, derived, to_config, from_config)

    def for_experts(self, active: Any) -> ConfigFormat[SizesT]:
        """The format for `active` experts per token: the weight of a single one is its score."""
        fixed = {**self.fixed, "norm_topk_prob": active != 1}
        return dataclasses.replace(self, fixed=fixed)

    def write(self, sizes: SizesT, **others: Any) -> dict[str, Any]:
        """config.json with the keys of transformers 4, which transformers 5 reads too."""
        config = {key: getattr(sizes, name) for name, key in self.keys.items()}
        fixed = {k: v for k, v in self.fixed.items() if v is not None and k not in UNSUPPORTED}
        if "head_dim" in config:
            config["head_dim"] = sizes.head_width
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **config,
            **fixed,
            **others,
        }

    def read(self, config: Mapping[str, Any]) -> SizesT:
        """The sizes in a config.json of transformers 4 or 5.

        Raises a CheckpointError that lists every key whose value is missing, not implemented by
        this family or contradicts others.
        """
        stated = {key: value for key, value in config.items() if value is not None}
        # to transformers, null is a missing value, except where it only asks whether a key is true
        stated |= {key: False for key in self._booleans() if config.get(key, True) is None}
        if set(_as_list(stated.get("layer_types"))) == {"full_attention"}:
            del stated["layer_types"]
        rope = _rope_of(stated)
        values = {**self.defaults, "rope_type": rope.get("type", "default"), **stated, **rope}
        scaled = bool(self.rope_scaling) and values["rope_type"] == self.rope_scaling["rope_type"]
        if "factor" in self.keys.values():
            values["factor"] = rope.get("factor") if scaled else 1.0
        fixed = {**UNSUPPORTED, "layer_types": None, **self.fixed}
        required = fixed | (dict(self.rope_scaling) if scaled else {"rope_type": "default"})
        sizes = {name: values.get(key) for name, key in self.keys.items()}
        known = self.rope_scaling.keys() | {"rope_type", "type", "rope_theta", "factor"}
        both = {key: (stated[key], rope[key]) for key in stated.keys() & rope.keys()}
        conflicts = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
        wrong = [
            *(key for key in required if values.get(key, fixed.get(key)) != required[key]),
            *(rope.keys() - known),
            *conflicts,
            *(key for name, key in self.keys.items() if not self._is_valid(name, sizes[name])),
        ]
        wrong = wrong or self._inconsistent_heads(sizes)
        if wrong:
            raise self._unsupported(wrong, values, required, conflicts)
        return self.sizes(**self._without_implied_width(sizes))

    def _booleans(self) -> set[str]:
        """The keys whose values are true or false."""
        fixed = {key for key, value in self.fixed.items() if isinstance(value, bool)}
        return fixed | {
            k for name, k in self.keys.items() if isinstance(self._default_of(name), bool)
        }

    def _without_implied_width(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """The sizes without a head width that is dim / n_heads.

        Flavors leave it out where they can, so that equal models compare equal.
        """
        implied = sizes.get("head_dim", 0) * sizes["n_heads"] == sizes["dim"]
        return sizes | {"head_dim": 0} if implied and not self._default_of("head_dim") else sizes

    def _default_of(self, name: str) -> Any:
        """Default of a field of the sizes; MISSING if it has none."""
        return next(f.default for f in dataclasses.fields(self.sizes) if f.name == name)

    def _is_valid(self, name: str, value: Any) -> bool:
        """Whether a value has the type of a field of the sizes and lies in its range."""
        default = self._default_of(name)
        kind: type = int if default is dataclasses.MISSING else type(default)
        if kind is bool or isinstance(value, bool):
            return type(value) is kind
        lowest = 0 if default == 0 or name in ("norm_eps", "route_scale") else 1
        if not isinstance(value, int | float) or not isinstance(value, int | kind):
            return False
        return lowest <= value <= 1 << 40  # JSON integers have no upper limit

    def _inconsistent_heads(self, sizes: Mapping[str, Any]) -> list[str]:
        """Keys whose values do not fit together."""
        if not self.has_head_width:
            return []
        n_heads, head_dim = sizes["n_heads"], sizes.get("head_dim")
        head_width = head_dim or sizes["dim"] / n_heads
        wrong = []
        if n_heads % sizes.get("n_kv_heads", n_heads):
            wrong += [self.keys["n_heads"], self.keys["n_kv_heads"]]
        if head_width % (2 if "rope_theta" in self.keys else 1):  # RoPE rotates pairs
            wrong += [self.keys["head_dim"]] if head_dim else _values(self.keys, "dim", "n_heads")
        return wrong

    def _unsupported(
        self,
        keys: list[str],
        values: Mapping[str, Any],
        required: Mapping[str, Any],
        conflicts: Mapping[str, tuple[Any, Any]],
    ) -> CheckpointError:
        allowed = {key: json.dumps(value) for key, value in required.items()}
        if self.rope_scaling:
            allowed["rope_type"] = f'"default" or "{self.rope_scaling["rope_type"]}"'
        supported = {key: f" (only {value} is supported)" for key, value in allowed.items()}
        shown = {key: f"{key} = {json.dumps(values.get(key)):.80}" for key in keys}  # each once
        shown |= {
            key: f"{key} = {json.dumps(both[0]):.80} and, in the table of RoPE's parameters,"
            f" {json.dumps(both[1]):.80}"
            for key, both in conflicts.items()
        }
        problems = ", ".join(text + supported.get(key, "") for key, text in shown.items())
        return CheckpointError(
            f"config.json describes a model that {self.family} does not support: {problems}."
        )


def _rope_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The table of RoPE's parameters; transformers 5 also prefers rope_scaling."""
    rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    return rope if isinstance(rope, dict) else {"rope_scaling": rope}


def _as_list(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _values(table: Mapping[str, str], *names: str) -> Sequence[str]:
    return [table[name] for name in names]
