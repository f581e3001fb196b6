"""Adapters compute what peft's do, and survive the way to peft and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from titanlite.checkpoint import to_hugging_face
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.errors import UserError
from titanlite.parallelize.lora import LoraConfig, add_adapters
from titanlite.storage import StorageFolder
from titanlite_post.adapters import from_peft, merge, read_adapters, to_peft
from titanlite_post.commands.adapters import main

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "head_dim": 12,
    "tie_word_embeddings": False,
}
RANK, ALPHA = 3, 5
TOKENS = torch.arange(40).view(2, 20) % 101


def peft_model(folder: Path, family: str):
    """A small model with random adapters of peft: `folder`/base and `folder`/peft."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "base")
    lora = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(folder / "peft")
    return adapted


def open_ours(folder: Path) -> torch.nn.Module:
    """Our model with the weights of `folder`/base and the adapters of `folder`/step-0."""
    source = open_hugging_face(StorageFolder(folder / "base"))
    adapters = read_adapters(StorageFolder(folder / "step-0"))
    model = source.spec.build(source.sizes)
    lora = LoraConfig(RANK, float(ALPHA), adapters.manifest.facts["lora"]["targets"])
    add_adapters(model, lora.select(model), lora, torch.float32)
    weights = {name: source.read(name) for name in source.tensors}
    model.load_state_dict({**weights, **adapters.tensors})
    return model


@pytest.fixture(params=["llama", "qwen3"])
def converted(tmp_path, request):
    """(folder, model of peft), with the adapters of peft as a checkpoint."""
    adapted = peft_model(tmp_path, request.param)
    folders = [str(tmp_path / name) for name in ("peft", "base", "step-0")]
    assert main(["from-peft", *folders]) == 0
    return tmp_path, adapted


def test_forward_and_gradients_are_those_of_peft(converted):
    folder, adapted = converted
    ours, theirs = open_ours(folder), adapted(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS), theirs, rtol=1e-5, atol=1e-5)
    theirs.square().mean().backward()
    ours(TOKENS).square().mean().backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    expected = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
    assert len(gradients) == len(expected) == 2 * 4 * 2
    for name, gradient in gradients.items():
        block, layer, kind = name.split(".")[1], name.split(".")[3], name[-1].upper()
        theirs = {"wq": "q_proj", "wv": "v_proj", "wo": "o_proj", "w2": "down_proj"}[layer]
        (same,) = (
            grad
            for n, grad in expected.items()
            if f".{block}." in n and f"{theirs}.lora_{kind}" in n
        )
        torch.testing.assert_close(gradient, same, rtol=1e-4, atol=1e-7)


def test_adapters_return_from_peft_bit_for_bit_and_peft_reads_them(converted):
    import peft
    import transformers

    folder, adapted = converted
    to_peft(StorageFolder(folder / "step-0"), StorageFolder(folder / "again"))
    first, second = (load_file(folder / n / "adapter_model.safetensors") for n in ("peft", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, folder / "again")
    assert torch.equal(again(TOKENS).logits, adapted(TOKENS).logits)


def test_merged_weights_are_those_of_the_base_plus_the_adapters(converted):
    import transformers

    folder, adapted = converted
    base, step, out = (StorageFolder(folder / n) for n in ("base", "step-0", "step-1"))
    merge(step, base, out)
    to_hugging_face(out, StorageFolder(folder / "hf"))
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    torch.testing.assert_close(merged(TOKENS).logits, adapted(TOKENS).logits, rtol=1e-4, atol=1e-5)
    expected = adapted.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_a_checkpoint_of_adapters_is_not_exported_as_the_model(converted):
    folder, _ = converted
    with pytest.raises(UserError, match="has only the adapters of LoRA"):
        to_hugging_face(StorageFolder(folder / "step-0"), StorageFolder(folder / "hf"))


def test_adapters_are_not_merged_into_another_base(converted):
    folder, _ = converted
    file = folder / "base/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not the model that .* was trained on"):
        main(["merge", *(str(folder / name) for name in ("step-0", "base", "step-1"))])


def test_adapters_of_another_kind_are_refused(converted):
    folder, _ = converted
    file = folder / "peft/adapter_config.json"
    file.write_text(file.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(UserError, match="use_dora = True: only plain LoRA"):
        from_peft(*(StorageFolder(folder / name) for name in ("peft", "base", "step-1")))
