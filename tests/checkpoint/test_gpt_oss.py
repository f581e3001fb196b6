"""gpt-oss: gradients as in transformers, and experts that are stored in MXFP4."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_families import OSS, TOKENS, export, load
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.errors import CheckpointError
from titanlite.kernels.documents import index_documents
from titanlite.kernels.flash import window_mask
from titanlite.models.config_json import join_parts
from titanlite.storage import StorageFolder

# importorskip would import it in each worker of the suite
pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


def their_model(**changes):
    """A small model of transformers with so large weights that the experts' clamps act."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GptOssConfig(**{**OSS, "sliding_window": 9, **changes})
    model = transformers.GptOssForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(
            parameter, float("norm" in name), 0.2 * (9 if "gate_up" in name else 1)
        )
    return model


def document_masks(positions: Tensor, window: int) -> Tensor:
    """What transformers adds to scores, so that tokens attend within documents: [B, 1, T, T]."""
    starts = torch.arange(positions.shape[1]) - positions
    rows = torch.empty(1, 1, positions.shape[1], 1)
    allowed = window_mask(rows, rows, 0, window) & (starts.unsqueeze(2) == starts.unsqueeze(1))
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf).unsqueeze(1)


def stored_gradients(model, mapping) -> dict[str, Tensor]:
    """The gradients of our parameters under the names, and in the layout, of Hugging Face."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(mapping.name_of(name), []).append((name, parameter.grad))
    return {
        stored: join_parts([mapping.part_of(n) for n, _ in parts], [grad for _, grad in parts])
        for stored, parts in groups.items()
    }


def test_every_gradient_is_that_of_transformers_also_with_several_documents(tmp_path):
    theirs = their_model()
    theirs.save_pretrained(tmp_path)
    ours, source = load(tmp_path)
    positions = torch.stack([torch.arange(40) % 23, torch.arange(40) % 14])
    logits = ours(TOKENS, positions, documents=index_documents(positions))
    masks = {"full_attention": document_masks(positions, 40)}
    masks |= {"sliding_attention": document_masks(positions, 9)}
    wanted = theirs(TOKENS, masks, positions, use_cache=False).logits
    assert (logits - wanted).abs().max() < 2e-5 * wanted.abs().max()
    grad = torch.randn(wanted.shape)
    logits.backward(grad)
    wanted.backward(grad)
    found = stored_gradients(ours, source.spec.hugging_face)
    for name, parameter in theirs.named_parameters():
        assert found[name].shape == parameter.shape and parameter.grad.abs().max() > 0, name
        error = (found.pop(name) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 5e-5, (name, error)
    assert not found


def quantize(folder, model) -> dict[str, Tensor]:
    """Store random experts in MXFP4 as openai/gpt-oss-20b does; returns their values."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj") and ".experts." in n]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 127, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_experts_in_mxfp4_are_read_and_exported_without_it(tmp_path, caplog):
    theirs = their_model(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    values = quantize(tmp_path / "in", theirs)
    with caplog.at_level("INFO"):
        ours, source = load(tmp_path / "in")
    assert "4 tensors of experts are stored in MXFP4; they are read as bfloat16" in caplog.text
    theirs.load_state_dict(values, strict=False)
    with torch.no_grad():
        wanted = theirs(TOKENS).logits
        assert torch.allclose(ours(TOKENS), wanted, rtol=0, atol=2e-5 * wanted.abs().max())
    for name in ("w1", "w2", "w3"):  # as a rank reads its shard
        whole = source.read(name := f"layers.1.moe.experts.{name}")
        assert whole.dtype == source.tensors[name].dtype == torch.bfloat16
        part = source.read(name, [1, 7, 33], [3, 21, 30])
        assert torch.equal(part, whole[1:4, 7:28, 33:63]) and part.is_contiguous()
    folder = export(tmp_path / "out", source.spec, ours, dtype=torch.bfloat16)
    config = json.loads(folder.read("config.json"))
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in again.named_parameters():
        if name in values:
            assert parameter.dtype == torch.bfloat16 and torch.equal(
                parameter.float(), values[name]
            )


@pytest.mark.parametrize("missing", ["_scales", "_blocks"])
def test_half_of_a_tensor_in_mxfp4_is_refused(tmp_path, missing):
    from safetensors.torch import load_file, save_file

    quantize(tmp_path, their_model(hidden_size=64, intermediate_size=32, num_hidden_layers=1))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.0.mlp.experts.down_proj{missing}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="1 tensors are missing: .*experts.down_proj;"):
        open_hugging_face(StorageFolder(tmp_path))
