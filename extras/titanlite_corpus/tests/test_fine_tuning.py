"""Fine-tuning: a recipe packs conversations; the loss on answers is that of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titanlite.data import SourceConfig, open_sample_stream, open_tokenizer, open_validation
from titanlite.errors import UserError
from titanlite.kernels.backend import set_attention_kernel
from titanlite.kernels.documents import document_positions, index_documents
from titanlite.models import FAMILIES, Llama3Sizes, valid_tokens
from titanlite.training.validation import _count_bytes
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.pipeline import CorpusResult, make_corpus
from titanlite_corpus.recipe import load_recipe
from titanlite_corpus.tests.chats import CHATS, turns, write_chats, write_tokenizer

SEQ_LEN = 192


def write_recipe(folder: Path, more: str = "", seq_len: int = SEQ_LEN, **source) -> Path:
    """A recipe for `folder`/chats.jsonl with the tokenizer of `folder`."""
    write_tokenizer(folder)
    values = {"name": "chats", "kind": "chat", "inputs": [str(folder / "chats.jsonl")], **source}
    lines = [
        f'out = "{folder / "out"}"',
        f'tokenizer = "{folder / "tokenizer.json"}"',
        more or f'[pack]\nmode = "best_fit"\nseq_len = {seq_len}',
        "[[sources]]",
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    (folder / "recipe.toml").write_text("\n".join(lines))
    return folder / "recipe.toml"


def make(folder: Path, validation_share: float = 0.0, **options) -> CorpusResult:
    recipe = write_recipe(folder, **options)
    recipe.write_text(f"validation_share = {validation_share}\n{recipe.read_text()}")
    return make_corpus(load_recipe(recipe), LocalEngine(workers=1))


def open_chats(folder: Path, seq_len: int = SEQ_LEN):
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    sources = [SourceConfig("chats", str(folder / "out/chats/train"), format="packed")]
    return open_sample_stream(sources, seq_len=seq_len, seed=0, vocab_size=512, tokenizer=tokenizer)


def reference_loss(folder: Path, model: torch.nn.Module) -> tuple[float, int]:
    """(summed loss of the answers' tokens, their number) of transformers, one conversation each."""
    from transformers import PreTrainedTokenizerFast

    from titanlite_corpus.tests.test_chat import MARKED_LLAMA3

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|begin_of_text|>"
    )
    total, count = 0.0, 0
    for chat in CHATS:
        encoded = tokenizer.apply_chat_template(
            chat,
            chat_template=MARKED_LLAMA3,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        labels = torch.where(encoded["assistant_masks"].bool(), encoded["input_ids"], -100)
        valid = int((labels[:, 1:] != -100).sum())
        total += model(encoded["input_ids"], labels=labels).loss.item() * valid
        count += valid
    return total, count


def build_pair(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One small model with random weights, as transformers has it and as titanlite has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    family = FAMILIES["llama3"]
    sizes = Llama3Sizes(dim=48, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=64, vocab_size=512)
    torch.manual_seed(0)
    model = family.build(sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    set_attention_kernel(model, family.attention_pattern, "flash", True)
    mapping = family.hugging_face
    reference = LlamaForCausalLM(LlamaConfig(**mapping.to_config(sizes, SEQ_LEN)))
    weights = {mapping.name_of(name): tensor for name, tensor in model.state_dict().items()}
    reference.load_state_dict(weights)
    return model, reference


def test_the_loss_on_answers_is_that_of_transformers(tmp_path):
    write_chats(tmp_path / "chats.jsonl", CHATS)
    counts = make(tmp_path).stages["pack"]
    assert counts["documents_out"] == len(CHATS) and counts["documents_truncated"] == 0
    assert counts["windows"] < len(CHATS)  # so several are in one window
    stream = open_chats(tmp_path)
    inputs, labels = stream.read(0, counts["windows"])
    model, reference = build_pair(tmp_path)
    positions = document_positions(inputs, stream.document_end_id, labels)
    loss = model(inputs, positions, labels=labels, documents=index_documents(positions))
    expected, count = reference_loss(tmp_path, reference)
    assert valid_tokens(labels) == count
    assert loss.item() / count == pytest.approx(expected / count, rel=1e-5)


def test_the_recipe_divides_and_counts_conversations(tmp_path):
    chats = [[*CHATS[n % 5][:-1], {"role": "assistant", "content": f"{n}"}] for n in range(40)]
    chats += [[{"role": "user", "content": "no answer"}], turns("an empty one", "")]
    write_chats(tmp_path / "chats.jsonl", chats)
    result = make(tmp_path, validation_share=0.2)
    left_out = result.stages["tokenise"]["removed"]
    assert {rule: entry["documents"] for rule, entry in left_out.items()} == {
        "tokenise.no_answer": 1,
        "tokenise.empty_answer": 1,
    }
    (sample,) = result.stages["tokenise"]["samples"]["tokenise.no_answer"]
    assert sample["origin"].endswith("chats.jsonl:41")
    sides = {side.side: side for side in result.published.sides}
    assert sides["train"].documents + sides["validation"].documents == 40
    held_out = open_validation(
        SourceConfig("chats", str(tmp_path / "out/chats/validation"), format="packed"),
        seq_len=SEQ_LEN,
        vocab_size=512,
    )
    assert (held_out.read(0, 1)[1] >= 0).any()
    assert make(tmp_path, validation_share=0.2).stages == {}  # nothing to do


def test_the_bytes_of_a_validation_set_are_those_of_the_answers(tmp_path):
    write_chats(tmp_path / "chats.jsonl", CHATS)
    counts = make(tmp_path).stages["pack"]
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    held_out = open_validation(
        SourceConfig("chats", str(tmp_path / "out/chats/train"), format="packed"),
        seq_len=SEQ_LEN,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
    )
    _, labels = held_out.read(0, counts["windows"])
    answers = [m["content"].strip() for chat in CHATS for m in chat if m["role"] == "assistant"]
    expected = sum(len(answer.encode()) for answer in answers)
    assert _count_bytes(labels, held_out.token_bytes) == expected


def test_a_conversation_that_is_too_long_loses_its_end(tmp_path):
    write_chats(tmp_path / "chats.jsonl", CHATS)
    counts = make(tmp_path, seq_len=64).stages["pack"]
    assert 0 < counts["documents_truncated"] < len(CHATS)
    inputs, labels = open_chats(tmp_path, 64).read(0, counts["windows"])
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    firsts = inputs[document_positions(inputs, tokenizer.eos_id, labels) == 0]
    assert (firsts == tokenizer.bos_id).sum() == len(CHATS)
    assert set(firsts.tolist()) <= {tokenizer.bos_id, tokenizer.eos_id}  # EOS: padding


def test_mistakes_in_a_recipe_for_chats_are_named(tmp_path):
    write_chats(tmp_path / "chats.jsonl", CHATS)
    with pytest.raises(UserError, match="cannot be concatenated") as error:
        make(tmp_path, more="[shuffle]")
    assert "best_fit" in str(error.value)
    both = '[pack]\nmode = "best_fit"\n[deduplicate]'
    with pytest.raises(UserError, match=r"\[deduplicate\] is for text"):
        make(tmp_path, more=both)
    (tmp_path / "chats.txt").write_text("Hi")
    with pytest.raises(UserError, match="are read from .jsonl"):
        make(tmp_path, inputs=[str(tmp_path / "chats.txt")])
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(UserError, match=r"chats.jsonl:1: .*no \"content\""):
        make(tmp_path)
    (tmp_path / "chats.jsonl").write_text('{"messages": "Hi"}\n')
    with pytest.raises(UserError, match="no list of messages"):
        make(tmp_path)
