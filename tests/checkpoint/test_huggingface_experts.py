"""Stacked experts in Hugging Face folders, which have one tensor per expert and projection."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from tests.checkpoint.test_huggingface import load_into_layout
from tests.distributed.moe_family import MOE_FAMILY, MoESizes
from tests.distributed.oracle import Layout
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import MOE as RECIPE
from tests.distributed.recipes import MOE_SIZES as SIZES
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.checkpoint.huggingface_export import ModelToExport, write_hugging_face
from titanlite.models import FAMILIES, LLAMA3, ExpertSizes, HuggingFaceMapping
from titanlite.storage import StorageFolder

MOE, THEIRS = "layers.*.moe", "model.layers.*.mlp"
NAMES = {
    **LLAMA3.hugging_face.names,
    f"{MOE}.shared_experts.w1.weight": f"{THEIRS}.shared_expert.gate_proj.weight",
    f"{MOE}.shared_experts.w3.weight": f"{THEIRS}.shared_expert.up_proj.weight",
    f"{MOE}.shared_experts.w2.weight": f"{THEIRS}.shared_expert.down_proj.weight",
}


class MoEMapping(HuggingFaceMapping):
    """A config.json that has our keys."""

    def to_config(self, sizes, context):
        return {"architectures": [self.architecture], **dataclasses.asdict(sizes)}

    def from_config(self, config):
        values = {field.name: config[field.name] for field in dataclasses.fields(MoESizes)}
        return MoESizes(**values | {"experts": ExpertSizes(**config["experts"])})


FAMILY = replace(
    MOE_FAMILY, hugging_face=MoEMapping("moe", "MoEForCausalLM", MoESizes, names=NAMES)
)


def load_experts_into_layout(layout, folders) -> int:
    FAMILIES["moe"] = FAMILY
    return load_into_layout(layout, RECIPE, folders)


def write(folder, max_shard_bytes: int) -> dict[str, torch.Tensor]:
    """Write a random model; returns its state."""
    torch.manual_seed(0)
    model = FAMILY.build(SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state = model.state_dict()
    exported = ModelToExport(FAMILY, SIZES, lambda names: {n: state[n] for n in names}, 24, None)
    write_hugging_face(StorageFolder(folder), exported, max_shard_bytes=max_shard_bytes)
    return state


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 10_000], ids=["one file", "shards"])
def test_each_expert_is_a_tensor_and_is_read_into_its_row(tmp_path, monkeypatch, max_shard_bytes):
    monkeypatch.setitem(FAMILIES, "moe", FAMILY)
    state = write(tmp_path, max_shard_bytes)
    source = open_hugging_face(StorageFolder(tmp_path))
    assert source.sizes == SIZES
    stored = source.tensors["layers.1.moe.experts.w2"].locations[3]
    assert stored.name == "model.layers.1.mlp.experts.3.down_proj.weight"
    assert stored.shape == (SIZES.dim, SIZES.experts.hidden_dim)
    for name, expected in state.items():
        assert torch.equal(source.read(name), expected), name
    part = source.read("layers.2.moe.experts.w1", (1, 3, 5), (2, 4, 6))
    assert torch.equal(part, state["layers.2.moe.experts.w1"][1:3, 3:7, 5:11])


def test_experts_are_read_from_a_folder_into_their_ranks_only(tmp_path):
    write(tmp_path, 10_000)
    layout = Layout(shard=2, tensor=2, expert=2, expert_tensor=2)
    assert all(run_on_ranks(load_experts_into_layout, 4, layout, [str(tmp_path)]))
