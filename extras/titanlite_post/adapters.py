"""Adapters of LoRA: to and from peft's format, and merged into the model that they adapt.

peft 0.19: adapter_config.json, and adapter_model.safetensors with names such as
base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from titanlite.checkpoint import CheckpointManifest, read_checkpoint_manifest, read_tensors
from titanlite.checkpoint.checkpointer import BASE, hash_of_base
from titanlite.checkpoint.huggingface import ADAPTER_FILE, CONFIG_FILE, open_hugging_face
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    check_hashes,
    software_versions,
    write_checkpoint_manifest,
)
from titanlite.checkpoint.saved_model import parameter_shapes, read_saved_sizes
from titanlite.checkpoint.tensor_writer import CollectiveSave, write_small_files, write_tensors
from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.models import ModelSizes, ModelSpec
from titanlite.models.config_json import StoredPart
from titanlite.storage import StorageFolder
from titanlite_lab.checkpoints import KEPT_FILES, check_empty, job_of_folder

WEIGHTS_FILE, PREFIX = "adapter_model.safetensors", "base_model.model."
SUFFIXES = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}  # peft's -> ours
PLAIN: dict[
    str, list[Any]
] = {  # keys of adapter_config.json -> the only values whose adapters are ours
    "peft_type": ["LORA"],
    "bias": ["none"],
    "fan_in_fan_out": [False],
    "use_dora": [False],
    "use_rslora": [False],
    "rank_pattern": [{}],
    "alpha_pattern": [{}],
    "modules_to_save": [None, []],
}


@dataclasses.dataclass(frozen=True)
class SavedAdapters:
    """The adapters of a checkpoint."""

    manifest: CheckpointManifest
    spec: ModelSpec
    sizes: ModelSizes
    rank: int
    alpha: float
    tensors: dict[str, Tensor]  # in the checkpoint: adapters, and buffers that training changed

    def change_of(self, weight: str) -> Tensor | float:
        """What the adapter of a weight adds to it, [out, in] in fp32; 0.0: it has none."""
        layer = weight.rpartition(".")[0]
        if not weight.endswith(".weight") or f"{layer}.lora_a" not in self.tensors:
            return 0.0
        a, b = (self.tensors[f"{layer}.{name}"].float() for name in SUFFIXES.values())
        return self.alpha / self.rank * (b @ a)


def read_adapters(folder: StorageFolder) -> SavedAdapters:
    """The adapters of a `step-N` folder; raises CheckpointError."""
    manifest = read_checkpoint_manifest(folder)
    lora = manifest.facts.get("lora")
    if not isinstance(lora, dict):
        raise CheckpointError(f"{folder}: was not trained with lora.rank, so it has no adapters.")
    check_hashes(folder, manifest, manifest.files)
    records = {n[6:]: r for n, r in manifest.tensors.items() if n.startswith("model.")}
    tensors = {n: torch.empty(r.shape, dtype=DTYPE_OF_NAME[r.dtype]) for n, r in records.items()}
    read_tensors(folder, {"model": tensors}, no_dist=True)
    spec, sizes = read_saved_sizes(folder, manifest)
    return SavedAdapters(manifest, spec, sizes, lora["rank"], lora["alpha"], tensors)


def to_peft(folder: StorageFolder, out: StorageFolder) -> int:
    """Write the adapters of a checkpoint for peft; returns the number of adapted layers."""
    saved = read_adapters(folder)
    check_empty(out)
    names = _peft_layers(saved.spec, saved.sizes)
    tensors, layers = {}, set()
    for name, tensor in saved.tensors.items():
        layer, _, adapter = name.rpartition(".")
        suffix = next((theirs for theirs, ours in SUFFIXES.items() if ours == adapter), None)
        if suffix is None:
            continue
        if layer not in names:
            raise CheckpointError(
                f"{folder}: peft has no adapter for {layer}: Hugging Face stores its weight"
                " transposed, or together with others.",
                fix="Merge the adapters instead.",
            )
        layers.add(names[layer])
        tensors[f"{PREFIX}{names[layer]}.{suffix}"] = tensor
    config = {key: values[0] for key, values in PLAIN.items()}
    config |= {"task_type": "CAUSAL_LM", "r": saved.rank, "lora_alpha": saved.alpha}
    config |= {"lora_dropout": 0.0, "target_modules": sorted(layers)}
    out.create_folder()
    out.write_atomically(WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    out.write_atomically(ADAPTER_FILE, json.dumps(config, indent=2).encode())
    return len(layers)


def from_peft(folder: StorageFolder, base: StorageFolder, out: StorageFolder) -> int:
    """Write peft's adapters of a Hugging Face model as a checkpoint; returns the number of layers.

    `base`: the folder of that model. Raises CheckpointError, also for adapters of another kind.
    """
    check_empty(out)
    source, started = open_hugging_face(base), time.monotonic()
    try:
        config, stored = parse_json(folder.read(ADAPTER_FILE)), load(folder.read(WEIGHTS_FILE))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}.") from None
    for key, values in PLAIN.items():
        if config.get(key, values[0]) not in values:
            raise CheckpointError(
                f"{folder}: {key} = {config[key]!r:.80}: only plain LoRA can be read.",
                fix="Merge it with peft: merge_and_unload().",
            )
    rank, alpha = config["r"], config["lora_alpha"]
    ours = {theirs: name for name, theirs in _peft_layers(source.spec, source.sizes).items()}
    tensors = {}
    for name, tensor in stored.items():
        layer, _, kind = name.removeprefix(PREFIX).rpartition(".lora_")
        if layer not in ours or f"lora_{kind}" not in SUFFIXES:
            raise CheckpointError(f"{folder}: {name!r:.200} is no adapter of a layer of {base}.")
        tensors[f"{ours[layer]}.{SUFFIXES[f'lora_{kind}']}"] = tensor
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    manifest = CheckpointManifest(
        step=0,
        progress={},
        facts={
            "model": dataclasses.asdict(source.sizes),
            "lora": {"rank": rank, "alpha": alpha, "targets": layers, "base_dtype": None},
            BASE: hash_of_base(map(base.hash_of, source.files)),
        },
        job=job_of_folder(source, None),
        layout="one process",
        versions=software_versions(),
        seconds=time.monotonic() - started,
        files={},
        tensors={},
    )
    _write_adapted(out, manifest, tensors, tensors.__getitem__)
    return len(layers)


def merge(folder: StorageFolder, base: StorageFolder, out: StorageFolder) -> None:
    """Write a checkpoint of the weights of a model plus what its adapters add, in fp32.

    `base`: the Hugging Face folder or the checkpoint that the adapters were trained on; another one
    raises CheckpointError.
    """
    saved = read_adapters(folder)
    check_empty(out)
    shapes = parameter_shapes(saved.spec, saved.sizes)
    if CONFIG_FILE in base.sizes():
        source = open_hugging_face(base, getattr(saved.sizes, "mtp_layers", 0))
        hashes = [base.hash_of(file) for file in source.files]
    else:
        source = None
        hashes = [record.hash for record in read_checkpoint_manifest(base).tensors.values()]
    if saved.manifest.facts.get(BASE) != hash_of_base(hashes):
        raise CheckpointError(
            f"{base}: is not the model that {folder} was trained on: its files have another hash.",
            fix="Give the folder of checkpoint.initial_load_path of that run.",
        )

    def merged(name: str) -> Tensor:
        if name in saved.tensors:  # a buffer
            return saved.tensors[name].float()
        weight = torch.empty(shapes[name]) if source is None else source.read(name).float()
        if source is None:
            read_tensors(base, {"model": {name: weight}}, no_dist=True)
        return weight + saved.change_of(name)

    facts = {k: v for k, v in saved.manifest.facts.items() if k not in ("lora", BASE)}
    kept = [name for name in saved.manifest.files if name in KEPT_FILES]
    files = {name: folder.read(name) for name in kept}
    manifest = dataclasses.replace(saved.manifest, facts=facts, progress={}, lease=0)
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    _write_adapted(out, manifest, meta, merged, files)


def _peft_layers(spec: ModelSpec, sizes: ModelSizes) -> dict[str, str]:
    """Our names of the layers whose weights Hugging Face stores alone -> its names."""
    mapping = spec.hugging_face
    return {
        name.removesuffix(".weight"): mapping.name_of(name).removesuffix(".weight")
        for name, shape in parameter_shapes(spec, sizes).items()
        if len(shape) == 2 and mapping.part_of(name) == StoredPart()
    }


def _write_adapted(
    out: StorageFolder,
    manifest: CheckpointManifest,
    tensors: Mapping[str, Tensor],
    load: Callable[[str], Tensor],
    small: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint with only weights; `load` returns one of `tensors` by its name."""

    def commit(files: dict[str, Any], records: dict[str, Any]) -> None:
        files |= write_small_files(out, small or {})
        write_checkpoint_manifest(out, dataclasses.replace(manifest, files=files, tensors=records))

    state = {"model": {name: tensor.to("meta") for name, tensor in tensors.items()}}
    write_tensors(
        out, state, CollectiveSave(), commit, load=lambda name: load(name.removeprefix("model."))
    )
