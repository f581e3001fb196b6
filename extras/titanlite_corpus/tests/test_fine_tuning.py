"""Fine-tuning: a recipe packs conversations, which train as they would one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.oracle import (
    SEED,
    SGD,
    Layout,
    Recipe,
    Record,
    merge_ranks,
    relative_error,
    run_layouts,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.data import SourceConfig, open_sample_stream, open_tokenizer, open_validation
from titanlite.errors import UserError
from titanlite.kernels.documents import document_positions
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.validation import _count_bytes
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.pipeline import CorpusResult, make_corpus
from titanlite_corpus.recipe import load_recipe
from titanlite_corpus.tests.chats import CHATS, turns, write_chats, write_tokenizer
from titanlite_corpus.tests.test_chat import MARKED_LLAMA3

SEQ_LEN, WINDOWS = 192, 8


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


def loss_of_trl(folder: Path, chats: list, model: torch.nn.Module, sizes: Llama3Sizes):
    """(the conversations as TRL tokenises and masks them, its loss on all, the gradients of it).

    By its trainer for SFT, with the answers that transformers finds by {% generation %}, the
    conversations padded to one batch, and the weights of `model`.
    """
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    mapping = FAMILIES["llama3"].hugging_face
    names = {mapping.name_of(name): name for name in model.state_dict()}
    reference = LlamaForCausalLM(LlamaConfig(**mapping.to_config(sizes, SEQ_LEN)))
    reference.load_state_dict({name: model.state_dict()[own] for name, own in names.items()})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|end_of_text|>",
        chat_template=MARKED_LLAMA3,
    )
    options = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    trainer = SFTTrainer(
        reference,
        SFTConfig(
            str(folder / "trl"),
            assistant_only_loss=True,
            per_device_train_batch_size=len(chats),
            max_length=None,
            **options,
        ),
        train_dataset=Dataset.from_list([{"messages": chat} for chat in chats]),
        processing_class=tokenizer,
    )
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    gradients = {names[name]: p.grad for name, p in reference.named_parameters()}
    return list(trainer.train_dataset), loss.item(), gradients


def loss_one_by_one(rows: list[dict], model: torch.nn.Module) -> tuple[float, dict]:
    """(mean loss of all labels, its gradients) of conversations that the plain model gets alone."""
    labels = [torch.tensor(row["labels"])[1:] for row in rows]
    count = sum(int((own >= 0).sum()) for own in labels)
    total = 0.0
    for row, own in zip(rows, labels, strict=True):
        logits = model(torch.tensor([row["input_ids"][:-1]]))[0]
        loss = F.cross_entropy(logits, own, reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


LAYOUTS = [
    Layout(accumulate=4),
    Layout(shard=2),
    Layout(shard=2, accumulate=2),
    Layout(tensor=2),
    Layout(context=2),
    Layout(pipeline=2, microbatch=2),
]


@pytest.mark.slow
def test_packed_conversations_train_under_every_layout_as_alone_and_as_with_trl(tmp_path):
    chats = [*CHATS, *(turns(f"{n} + 1?", f"{n + 1}. " * n, system="Add.") for n in range(1, 17))]
    write_chats(tmp_path / "chats.jsonl", chats)
    counts = make(tmp_path).stages["pack"]
    assert (counts["windows"], counts["documents_truncated"]) == (WINDOWS, 0)
    sizes = replace(SGD.sizes, vocab_size=512, n_layers=4)
    packed = str(tmp_path / "out/chats/train")
    recipe = Recipe(
        sizes=sizes, steps=1, batch=WINDOWS, seq_len=SEQ_LEN, documents=True, packed=packed
    )
    model = recipe.spec.build(sizes)
    init_weights(model, recipe.spec, sizes, SEED, recipe.widths)
    rows, *trl = loss_of_trl(tmp_path, chats, model, sizes)
    alone = loss_one_by_one(rows, model)
    records = [Record([loss], gradients=[gradients]) for loss, gradients in (alone, trl)]
    for ranks in (1, 2):
        cases = [(layout, recipe) for layout in LAYOUTS if layout.degrees.ranks == ranks]
        by_rank = run_on_ranks(run_layouts, ranks, cases)
        records += [merge_ranks(list(of_ranks)) for of_ranks in zip(*by_rank, strict=True)]
    names = ["one by one", "TRL", *map(str, LAYOUTS)]
    (loss,), (gradients,) = records[0].losses, records[0].gradients
    for name, record in zip(names, records, strict=True):
        errors = {n: relative_error(g, gradients[n]) for n, g in record.gradients[0].items()}
        assert errors.keys() == gradients.keys()
        errors["loss"] = abs(record.losses[0] / loss - 1)
        print(f"{name}: at most {max(errors.values()):.1e}")  # pytest -rP
        assert max(errors.values()) <= 1e-5, (name, errors)


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
