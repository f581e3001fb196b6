"""Pairs of answers: two documents of one window, side by side, with labels on the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titanlite.data import FORMATS, SourceConfig, open_sample_stream, open_tokenizer
from titanlite.errors import DataError
from titanlite.kernels.documents import document_positions
from titanlite.labels import DOCUMENT_END
from titanlite_corpus.tests.chats import turns
from titanlite_corpus.tests.test_chat import open_encoder
from titanlite_corpus.tests.test_fine_tuning import SEQ_LEN, make
from titanlite_post.pairs import PAIRS as FORMAT
from titanlite_post.pairs import open_pairs, pair_segments

CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {}}]}
PAIRS = [
    {"prompt": "What is 2 + 2?", "chosen": "It is 4.", "rejected": "Five."},
    {"messages": turns("Hi", "Yes?", "Say a", system="Be brief."), "chosen": "a", "rejected": "b"},
    {"prompt": turns("Q"), "chosen": turns("", "c d")[1:], "rejected": turns("", "e" * 60)[1:]},
    # whole conversations, beside keys that some published data sets have, too
    {"prompt": "p", "messages": turns("p"), "chosen": turns("p", "x"), "rejected": turns("p", "y")},
]
LEFT_OUT = {
    "equal_answers": {"prompt": "a", "chosen": "b ", "rejected": " b"},
    "empty_answer": {"prompt": "a", "chosen": "", "rejected": "b"},
    "prompts_differ": {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "x", "c", "y")},
    "longer_than_window": {"prompt": "a", "chosen": "b", "rejected": "word " * SEQ_LEN},
}


@pytest.fixture(autouse=True)
def the_format_of_dpo(monkeypatch):
    monkeypatch.setitem(FORMATS, FORMAT, open_pairs)


def write_pairs(folder: Path, pairs: list) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def read_windows(folder: Path, seq_len: int, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    sources = [SourceConfig("pairs", str(folder / "out/chats/train"), format="pairs")]
    return open_sample_stream(sources, seq_len=seq_len, seed=0, vocab_size=512).read(0, windows)


def expected_texts(pair: dict) -> list[tuple[str, str]]:
    """(the whole document, its labels) of both sides with the template "llama3"."""
    prompt = pair.get("messages", pair.get("prompt"))
    prompt = turns(prompt) if isinstance(prompt, str) else prompt
    texts = []
    for side in (pair["chosen"], pair["rejected"]):
        side = turns("", side)[1:] if isinstance(side, str) else side
        chat = [*prompt, *side] if side[0]["role"] == "assistant" else side
        begins = [f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n" for m in chat]
        ends = [m["content"] + "<|eot_id|>" for m in chat]
        whole = "".join(begin + end for begin, end in zip(begins, ends, strict=True))
        texts.append(("<|begin_of_text|>" + whole, ends[-1]))
    return texts


def test_each_pair_is_two_documents_of_one_window_with_labels_on_the_answers(tmp_path):
    write_pairs(tmp_path, [*PAIRS, *LEFT_OUT.values()])
    stages = make(tmp_path, kind="pairs", answers="all").stages
    left_out = {rule: entry["documents"] for rule, entry in stages["tokenise"]["removed"].items()}
    assert left_out == {f"tokenise.{rule}": 1 for rule in LEFT_OUT}
    counts = stages["pack"]
    assert counts["documents_truncated"] == 0 and 1 < counts["windows"] < len(PAIRS)
    inputs, labels = read_windows(tmp_path, SEQ_LEN, counts["windows"])
    segments = pair_segments(inputs, labels)
    tokenizer, found = open_tokenizer(str(tmp_path / "tokenizer.json")), []
    for row in range(counts["windows"]):
        ends = (labels[row] == DOCUMENT_END).nonzero().flatten() + 1
        parts = zip(*(t[row].tensor_split(ends) for t in (inputs, labels)), strict=True)
        decode = tokenizer.decode
        documents = [(decode(ids.tolist()), decode(own[own >= 0].tolist())) for ids, own in parts]
        count = int(segments[row].max()) + 1
        assert count % 2 == 0 and not any(text for _, text in documents[count:])  # padding
        for k in range(0, count, 2):
            found.append(documents[k : k + 2])
            for number in (k, k + 1):
                ids = labels[row][segments[row] == number].tolist()
                assert tokenizer.decode(ids) == documents[number][1]
    assert sorted(found) == sorted(map(expected_texts, PAIRS))


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_window_of_one_pair_is_recognised_with_and_without_padding(tmp_path, padding):
    pair = {"prompt": "a", "chosen": "<|end_of_text|> b", "rejected": "c"}
    write_pairs(tmp_path, [pair])
    make(tmp_path, kind="pairs")
    both = open_encoder(tmp_path, "llama3").encode_pair(json.dumps(pair), "f:1")
    seq_len = len(both) - 1 + padding
    files = [str(tmp_path / "chats.jsonl")]
    exact = make(tmp_path / "exact", kind="pairs", seq_len=seq_len, inputs=files)
    counts = exact.stages["pack"]
    assert counts["windows"] == 1 and counts["padding"] == padding
    inputs, labels = read_windows(tmp_path / "exact", seq_len, 1)
    first = int((labels[0] == DOCUMENT_END).int().argmax()) + 1
    positions = document_positions(inputs, 0, labels)[0]
    second = len(both) - first - (padding == 0)
    expected = [*range(first), *range(second), *range(padding - 1)]
    assert positions.tolist() == expected
    assert set(pair_segments(inputs, labels)[0].tolist()) == {-1, 0, 1}
    if padding == 0:
        with pytest.raises(DataError, match="no source has a document left"):
            make(tmp_path / "long", kind="pairs", seq_len=seq_len - 1, inputs=files)


def test_pairs_and_conversations_are_not_read_as_each_other(tmp_path):
    write_pairs(tmp_path, PAIRS)
    make(tmp_path, kind="pairs")
    sizes = {"seq_len": SEQ_LEN, "seed": 0, "vocab_size": 512}
    path = str(tmp_path / "out/chats/train")
    with pytest.raises(DataError, match="its windows have pairs of answers.*titanlite_post dpo"):
        open_sample_stream([SourceConfig("pairs", path, format="packed")], **sizes)
    write_pairs(tmp_path / "chats", [{"messages": turns("a", "b")}])
    make(tmp_path / "chats")
    path = str(tmp_path / "chats/out/chats/train")
    with pytest.raises(DataError, match="its windows have no pairs of answers"):
        open_sample_stream([SourceConfig("pairs", path, format="pairs")], **sizes)


@pytest.mark.parametrize(
    "pair, message",
    [
        ({"prompt": "a", "chosen": "b"}, "no list of rejected"),
        ({"chosen": "b", "rejected": "c"}, "no list of prompt"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, "no list of chosen"),
        (
            {"prompt": "a", "chosen": turns("a"), "rejected": "c"},
            "does not end with an answer",
        ),
        ({"prompt": "a", "chosen": [CALL], "rejected": "c"}, "it has tool_calls, which"),
    ],
    ids=str,
)
def test_what_is_no_pair_is_refused_with_its_place(tmp_path, pair, message):
    write_pairs(tmp_path, [pair])
    with pytest.raises(DataError, match=message) as error:
        make(tmp_path, kind="pairs")
    assert "chats.jsonl:1" in str(error.value)
