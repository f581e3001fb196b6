"""A family in Hugging Face's format: the names of its tensors, and its config.json both ways."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Generic

import torch
from torch import Tensor

from titanlite.errors import CheckpointError
from titanlite.models.rope import yarn_factor
from titanlite.models.sizes import MAX_LAYERS, SizesT, is_every
from titanlite.settings import type_hints
from titanlite.settings.values import ValueRefused, convert

EXPERT_INDEX = "{expert}"  # in Hugging Face's names
MULTIMODAL_PREFIX = "model.language_model."  # there, of what is "model." in a text model


@dataclass(frozen=True)
class StoredPart:
    """How Hugging Face stores a parameter, where it does not store the same tensor."""

    transposed: bool = False  # a matrix is stored as [in, out]
    index: int = 0  # which of the parameters that are concatenated along their outputs
    unit_columns: bool = False  # [D, W] is stored as [D, 1, W], as by a depthwise nn.Conv1d
    outputs: int = 0  # the dimension of the parameter's outputs; 1 behind that of experts

    def stored_shape(self, shape: Sequence[int], outputs: int) -> torch.Size:
        """Shape of the stored tensor that contains a parameter of `shape`.

        `outputs`: those of all parameters in it.
        """
        stored = [*shape[: self.outputs], outputs, *shape[self.outputs + 1 :]]
        stored[1:1] = [1] * self.unit_columns
        return torch.Size(reversed(stored) if self.transposed else stored)

    def read(
        self, stored: Any, offsets: Sequence[int], lengths: Sequence[int], first: int = 0
    ) -> Tensor:
        """`lengths` elements from `offsets` on of a parameter in `stored`, a safetensors slice.

        `first`: the outputs of the parameters before it.
        """
        starts = [start + first * (d == self.outputs) for d, start in enumerate(offsets)]
        part: list[Any] = [slice(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        if self.unit_columns:
            part.insert(1, 0)
        return stored[tuple(reversed(part))].t() if self.transposed else stored[tuple(part)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The stored tensor of all its parameters."""
        joined = torch.cat(tuple(tensors), self.outputs) if len(tensors) > 1 else tensors[0]
        if self.unit_columns:
            return joined.unsqueeze(1)
        return joined.t() if self.transposed else joined


def join_parts(parts: Sequence[StoredPart], tensors: Sequence[Tensor]) -> Tensor:
    """The stored tensor of some parameters, given in any order."""
    ordered = sorted(zip(parts, tensors, strict=True), key=lambda pair: pair[0].index)
    return parts[0].join([tensor for _, tensor in ordered])


COMMON_KEYS = {  # fields of the sizes of most families -> keys of config.json
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
    "n_active_experts": "num_experts_per_tok",
    "rope_scaling_factor": "factor",
}
COMMON_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
SAME_AS_LLAMA = {  # values without which a model is not computed as Llama's blocks are
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
UNSUPPORTED = {  # keys of many architectures that none of ours implements
    "is_causal": True,  # transformers takes null for false
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}  # not auto_map, which names code in the folder: it is never run, and `architectures` is known
LOCAL_ROPE_THETA = "rope_local_base_freq"  # key for the RoPE base of blocks with a window
ROPE_KINDS = {"full_attention", "sliding_attention"}
NO_TYPES = {"layer_types": None}  # of families whose blocks are all of one kind


@dataclass(frozen=True)
class HuggingFaceMapping(Generic[SizesT]):
    """One architecture in Hugging Face's format: names of tensors, and config.json both ways."""

    family: str
    architecture: str  # in config.json's `architectures`
    sizes: type[SizesT]
    names: Mapping[str, str]
    # titanlite's parameter name -> Hugging Face's; `*`: layer index; `{expert}`: stacked experts
    # [E, ...] are one tensor for each expert, with its index in the name
    parts: Mapping[str, StoredPart] = field(default_factory=dict)
    # names as in `names` of parameters that are not stored as the same tensor
    optional_prefix: str = ""  # of names; a folder may leave it out
    derived: Sequence[str] = ("*.rotary_emb.inv_freq",)
    # patterns of tensors that are not read, such as those in old folders that config.json implies
    model_type: str = ""  # default: the name of the family
    own_keys: Mapping[str, str] = field(default_factory=dict)
    # field of the sizes -> key of config.json, beside those of COMMON_KEYS
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # other keys that change the results -> the only supported value
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # transformers' values of missing keys; others are required
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    # values of keys that are missing or null, from the others; None: none
    null_is_zero: Sequence[str] = ()  # keys whose null is a size of 0
    further: Callable[[SizesT], Mapping[str, Any]] = lambda sizes: {}  # only written
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    # keys of the supported scaling -> their only values, or the default of a size, with
    # "rope_type"; empty: none
    ignored_rope: Sequence[str] = ()  # RoPE's keys that make no difference for text
    reads_mxfp4: bool = False  # tensors that are stored as NAME_blocks and NAME_scales
    multimodal: str = ""  # architecture whose `text_config` and MULTIMODAL_PREFIX are this model's
    stacked: Mapping[str, str] = field(default_factory=dict)
    # as `names`, of experts in a folder that stores those of a block as one tensor
    intervals: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    # keys with an entry for each block -> (the usual one, that of every n-th block); n is a size

    @property
    def architectures(self) -> list[str]:
        """The architectures in config.json whose folders are read."""
        return [name for name in (self.architecture, self.multimodal) if name]

    # --- tensors ----------------------------------------------------------------------------------

    def name_of(self, name: str) -> str:
        """Hugging Face's name of one of our parameters; with `{expert}` if it is stacked."""
        index = "".join(part for part in name.split(".") if part.isdigit())
        return self.names[_without_index(name)].replace("*", index)

    def stored_as(self, shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, torch.Size]]:
        """Hugging Face's names and shapes of the tensors that each of our parameters is stored in.

        Several, if ours stacks the weights of experts.
        """
        outputs: Counter[str] = Counter()
        for name, shape in shapes.items():
            outputs[self.name_of(name)] += shape[self.part_of(name).outputs]

        def stored(name: str, shape: torch.Size) -> dict[str, torch.Size]:
            stored = self.name_of(name)
            if EXPERT_INDEX not in stored:
                return {stored: self.part_of(name).stored_shape(shape, outputs[stored])}
            return {stored.replace(EXPERT_INDEX, str(row)): shape[1:] for row in range(shape[0])}

        return {name: stored(name, shape) for name, shape in shapes.items()}

    def outputs_before(self, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
        """The outputs of other parameters before each of ours in the tensor that has it."""
        outputs: Counter[str] = Counter()
        before = {}
        for name in sorted(shapes, key=lambda name: self.part_of(name).index):
            before[name] = outputs[self.name_of(name)]
            outputs[self.name_of(name)] += shapes[name][self.part_of(name).outputs]
        return before

    def as_stored_in(self, names: Container[str]) -> HuggingFaceMapping[SizesT]:
        """This mapping for a folder with tensors of these names, which may stack its experts."""
        if not any(stored.replace("*", "0") in names for stored in self.stacked.values()):
            return self
        parts = {
            name: StoredPart(index=index, outputs=1) for index, name in enumerate(self.stacked)
        }
        return replace(self, names={**self.names, **self.stacked}, parts={**self.parts, **parts})

    def is_stacked(self, name: str) -> bool:
        """Whether one of our parameters is a tensor for each expert."""
        return EXPERT_INDEX in self.name_of(name)

    def part_of(self, name: str) -> StoredPart:
        """How one of our parameters is stored in the tensor of that name."""
        return self.parts.get(_without_index(name), StoredPart())

    def prediction_prefixes(self, stored: Iterable[str]) -> tuple[str, ...]:
        """What the names of tensors for multi-token prediction begin with, among `stored` ones."""
        pattern = self.names.get("layers.*.embedding_norm.weight", "")
        return tuple(n.rsplit(".", 2)[0] + "." for n in stored if fnmatchcase(n, pattern))

    # --- config.json ------------------------------------------------------------------------------

    @property
    def keys(self) -> dict[str, str]:
        """Field of the sizes -> key."""
        keys = {**COMMON_KEYS, **self.own_keys}
        return {name: key for name, key in keys.items() if name in self.sizes.__dataclass_fields__}

    def to_config(self, sizes: SizesT, context: int) -> dict[str, Any]:
        """config.json with the keys of transformers 4, which transformers 5 reads too.

        `context`: tokens per training sequence. Raises CheckpointError for a size without a key.
        """
        keys = self.keys
        for name in self.sizes.__dataclass_fields__:
            if name not in (*keys, "mtp_layers") and (
                value := getattr(sizes, name)
            ) != self._default_of(name):
                raise CheckpointError(
                    f"model.{name} = {json.dumps(value)}: Hugging Face's {self.architecture} has no"
                    " such key, and would compute something else from these weights."
                )
        config = {key: getattr(sizes, name) for name, key in keys.items()}
        config |= {key: config[key] or None for key in self.null_is_zero}
        config |= {
            key: _list_of(config[key], sizes.n_layers, entries)
            for key, entries in self.intervals.items()
        }
        if "head_dim" in config:
            config["head_dim"] = sizes.head_width
        if self.rope_scaling:
            factor = config.pop("factor")
            sized = {key: config.pop(key) for key in self.rope_scaling if key in config}
            scaling = {"factor": factor, **self.rope_scaling, **sized}
            config["rope_scaling"] = scaling if factor > 1 else None
            original = self.rope_scaling.get("original_max_position_embeddings", 0)
            context = max(context, int(factor * original)) if factor > 1 else context
        if "rope_theta" in config:  # learned positions are a size
            config["max_position_embeddings"] = context
        fixed = self._fixed_values(getattr(sizes, "n_active_experts", None))
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type or self.family,
            **config,
            **{k: v for k, v in fixed.items() if v is not None and v != UNSUPPORTED.get(k)},
            **self.further(sizes),
        }

    def from_config(self, config: Mapping[str, Any]) -> SizesT:
        """The sizes in a config.json of transformers 4 or 5; inverse of `to_config`.

        Raises CheckpointError with every key that is missing, not implemented or contradictory.
        """
        keys = self.keys
        stated = {key: value for key, value in config.items() if value is not None}
        # to transformers, null is a missing value, except where it only asks whether a key is true
        null = dict.fromkeys(self._booleans(), False) | dict.fromkeys(self.null_is_zero, 0)
        stated |= {key: value for key, value in null.items() if config.get(key, True) is None}
        stated |= {key: self._interval_of(key, stated) for key in self.intervals if key in stated}
        kinds = stated.get("layer_types")
        if isinstance(kinds, list) and {str(kind) for kind in kinds} == {"full_attention"}:
            del stated["layer_types"]
        rope, known = rope_table(stated), {"rope_type", "type", "rope_theta", "factor"}
        if LOCAL_ROPE_THETA in self.defaults:  # as transformers 5 reads these families
            flat = stated.get("rope_parameters")
            if isinstance(flat, dict) and flat and "full_attention" not in flat:
                rope = {**rope, "rope_parameters": flat}
            known -= set() if "rope_type" in rope else {"type"}
        if rope.get("rope_type", rope.get("type")) == "yarn" and "mscale" not in self.rope_scaling:
            rope = without_implied_factor(rope)
        values = {**self.defaults, "rope_type": rope.get("type", "default")}
        values |= {key: value for key, value in self.implied(config).items() if value is not None}
        values |= {**stated, **rope}
        scaled = bool(self.rope_scaling) and values["rope_type"] == self.rope_scaling["rope_type"]
        if "factor" in keys.values():
            values["factor"] = rope.get("factor") if scaled else 1.0
        fixed = {**UNSUPPORTED} if "layer_types" in self.intervals else {**UNSUPPORTED, **NO_TYPES}
        fixed |= self._fixed_values(config.get("num_experts_per_tok"))
        fixed = {key: value for key, value in fixed.items() if key not in keys.values()}
        sized = keys.values() & self.rope_scaling.keys()
        scaling = {key: self.rope_scaling[key] for key in self.rope_scaling if key not in sized}
        required = fixed | (scaling if scaled else {"rope_type": "default"})
        values |= {key: rope.get(key, self.rope_scaling[key]) for key in sized}
        sizes = {name: values.get(key) for name, key in keys.items()}
        known |= self.rope_scaling.keys() | set(self.ignored_rope)
        known |= self.fixed.keys() | ({LOCAL_ROPE_THETA} & self.defaults.keys())
        known |= {"partial_rotary_factor"} & {*keys.values()}
        both = {key: (stated[key], rope[key]) for key in stated.keys() & rope.keys()}
        conflicts = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
        wrong = [
            *(key for key in required if values.get(key, fixed.get(key)) != required[key]),
            *(rope.keys() - known),
            *conflicts,
            *(key for name, key in keys.items() if not self._is_valid(name, sizes[name])),
        ]
        if wrong:
            raise self._unsupported(wrong, values, required, conflicts)
        return self.sizes(**self._without_implied_width(sizes))

    def _fixed_values(self, n_active_experts: Any) -> dict[str, Any]:
        """`fixed`; the weight of a single active expert is its score, and not divided by itself."""
        single = n_active_experts == 1 and "norm_topk_prob" in self.fixed
        return {**self.fixed, "norm_topk_prob": False} if single else dict(self.fixed)

    def _interval_of(self, key: str, stated: Mapping[str, Any]) -> Any:
        """The interval of a list with an entry for each block; if it has none, the list.

        Several intervals may describe a list; then the default is preferred.
        """
        value, entries = stated[key], self.intervals[key]
        if not isinstance(value, list):
            return [value]  # no interval: a number would be mistaken for one
        if 0 < len(value) <= MAX_LAYERS and len(value) == stated.get(self.keys["n_layers"]):
            for interval in (self.defaults.get(key, 0), *range(len(value) + 1)):
                if value == _list_of(interval, len(value), entries):
                    return interval
        return value

    def _booleans(self) -> set[str]:
        """The keys whose values are true or false."""
        fixed = {k for k, value in {**UNSUPPORTED, **self.fixed}.items() if isinstance(value, bool)}
        return fixed | {k for n, k in self.keys.items() if isinstance(self._default_of(n), bool)}

    def _without_implied_width(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """The sizes without a head width that is dim / n_heads.

        Flavors leave it out where they can, so that equal models compare equal.
        """
        implied = sizes.get("head_dim", 0) * sizes["n_heads"] == sizes["dim"]
        return sizes | {"head_dim": 0} if implied and not self._default_of("head_dim") else sizes

    def _default_of(self, name: str) -> Any:
        """Default of a field of the sizes; dataclasses.MISSING if it has none."""
        return self.sizes.__dataclass_fields__[name].default

    def _is_valid(self, name: str, value: Any) -> bool:
        """Whether a value is one of a key of [model]."""
        try:
            convert(value, type_hints(self.sizes)[name])
        except ValueRefused:
            return False
        return True

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
        allowed |= {
            key: f"{json.dumps(usual)} for each block and {json.dumps(other)} for every n-th"
            for key, (usual, other) in self.intervals.items()
        }
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


def rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """The table of RoPE's parameters in a config.json; transformers 5 also prefers rope_scaling.

    If there is one for each kind of blocks, it is that of blocks without a window, with the base of
    the others as LOCAL_ROPE_THETA.
    """
    scaling, rope = config.get("rope_scaling"), config.get("rope_parameters")
    if not isinstance(rope, dict) or not isinstance(rope.get("full_attention"), dict):
        rope = scaling or rope or {}
        return rope if isinstance(rope, dict) else {"rope_scaling": rope}
    full, local = rope["full_attention"], rope.get("sliding_attention")
    if not isinstance(local, dict) or local.keys() - {"rope_type", "rope_theta"}:
        return {"sliding_attention": local}  # is refused
    if local.get("rope_type", "default") != "default" or rope.keys() - ROPE_KINDS:
        return {"rope_parameters": rope}
    both = {**full, **(scaling if isinstance(scaling, dict) else {})}
    return both | ({LOCAL_ROPE_THETA: local["rope_theta"]} if "rope_theta" in local else {})


def without_implied_factor(rope: dict[str, Any]) -> dict[str, Any]:
    """YaRN's parameters without a factor of attention that is the one that it has anyway."""
    factor, stated = rope.get("factor"), rope.get("attention_factor")
    numbers = isinstance(factor, float | int) and isinstance(stated, float | int) and factor >= 1
    if numbers and math.isclose(stated, yarn_factor(factor), rel_tol=1e-6):  # type: ignore[arg-type]
        return {key: value for key, value in rope.items() if key != "attention_factor"}
    return rope


def _list_of(interval: int, blocks: int, entries: tuple[Any, Any]) -> list[Any]:
    """The entry of each block; see `HuggingFaceMapping.intervals`."""
    return [entries[is_every(interval, block)] for block in range(blocks)]


def _without_index(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
