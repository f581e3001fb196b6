"""A tokenizer.json made of ranks gives their ids, whatever the text and whatever the ranks."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from tests.data.test_tokenizer import ODD_TEXTS, hugging_face, learned_text
from titanlite.data import open_tokenizer
from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import DataError


def remade(path: str, folder: Path):
    (folder / "remade.json").write_bytes(to_tokenizer_json(open_tokenizer(path)))
    return open_tokenizer(str(folder / "remade.json"))


def assert_equal_on(texts, ours, theirs) -> None:
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (
        theirs.vocab_size,
        theirs.bos_id,
        theirs.eos_id,
    )
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids, text
        assert theirs.decode([*ids, ours.eos_id]) == ours.decode([*ids, ours.eos_id])


@pytest.mark.parametrize("kind", ["bytes", "ranks"])
def test_the_ids_are_the_same_on_odd_text_and_around_every_character(tmp_path, kind):
    path = str(tmp_path / "t.model") if kind == "ranks" else "bytes"
    if kind == "ranks":
        train_bpe(learned_text(), 900, path)
    sample = random.Random(0).sample([c for c in range(0x30000) if not 0xD800 <= c < 0xE000], 2000)
    around = (f"a{c}b {c}{c} 1{c}2'{c} ,{c}.\n{c} \r{c}" for c in map(chr, sample))
    assert_equal_on([*ODD_TEXTS, *around], open_tokenizer(path), remade(path, tmp_path))


def test_the_ids_are_the_same_for_ranks_in_no_order(tmp_path):
    """Tokens that no merges lead to, and merges that make room for ones of lower rank."""
    draw, path = random.Random(1), tmp_path / "t.model"
    for _ in range(20):
        made = {bytes(draw.choices(b"abc", k=draw.randrange(2, 7))) for _ in range(40)}
        tokens = [*made, *(bytes([byte]) for byte in range(256))]
        draw.shuffle(tokens)
        lines = (b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))
        path.write_bytes(b"".join(lines))
        texts = ["".join(draw.choices("abc", k=draw.randrange(1, 60))) for _ in range(60)]
        assert_equal_on(texts, open_tokenizer(str(path)), remade(str(path), tmp_path))


def test_a_tokenizer_json_is_itself_without_truncation_and_padding(tmp_path):
    path = hugging_face(tmp_path)
    table = json.loads(Path(path).read_text())
    plain = {**table, "truncation": None, "padding": None}
    assert table != plain == json.loads(to_tokenizer_json(open_tokenizer(path)))
    Path(path).write_text(json.dumps(plain, indent=3))
    assert to_tokenizer_json(open_tokenizer(path)) == Path(path).read_bytes()


def test_tokens_whose_pairs_would_take_minutes_to_find_are_refused(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"a" * size for size in range(2, 600)]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (tmp_path / "long.model").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match="too many long tokens .* the longest has 599 bytes"):
        to_tokenizer_json(open_tokenizer(str(tmp_path / "long.model")))
