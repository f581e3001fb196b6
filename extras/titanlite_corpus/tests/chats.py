"""Conversations, a small tokenizer with chat tokens, and templates as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import ROOT

LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
)
# Of the tokenizer_config.json of Meta-Llama-3-8B-Instruct
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
    " '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# ChatML that marks answers
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
# A template whose end-of-text id ends each turn, as that of Zephyr does
EOS_TURNS = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

Conversation = list[dict[str, str]]


def turns(*contents: str, system: str = "") -> Conversation:
    """A conversation in which user and assistant take turns."""
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content}
        for number, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *messages] if system else messages


CHATS = [
    turns("What is 2 + 2?", "It is 4.", "Sure?", "  Yes:\n\n2 + 2 = 4.\n"),
    turns("Hi", "Hello!", system="Be brief."),
    turns("print('ß €')\n", "def f():\n    return 1"),
    turns("Repeat: a b c", "a b c", "Again", "a b c", "And again", "No."),
    turns("A long one", "word " * 30),
    turns("x", "y"),
]


def write_tokenizer(folder: Path, template: str = LLAMA3) -> Path:
    """A byte-level tokenizer with a few merges and chat tokens, as a Hugging Face folder has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([(ROOT / "README.md").read_text("utf-8")], trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in LLAMA3_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end_of_text|>"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_chats(path: Path, chats: list[Conversation]) -> Path:
    """A .jsonl of conversations."""
    lines = [json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats]
    path.write_text("".join(lines), encoding="utf-8")
    return path
