"""Conversion to tokenizer.json: the ids stay the same, for any text and any ranks."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import pytest

from tests.data.test_tokenizer import ODD_TEXTS, training_texts, write_tokenizer_json
from titanlite.data import open_tokenizer
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import DataError
from titanlite_corpus.bpe import train_bpe


def convert(path: str, folder: Path):
    (folder / "converted.json").write_bytes(to_tokenizer_json(open_tokenizer(path)))
    return open_tokenizer(str(folder / "converted.json"))


def assert_equal_ids(texts, original, converted) -> None:
    for name in ("vocab_size", "bos_id", "eos_id"):
        assert getattr(original, name) == getattr(converted, name)
    for text in texts:
        ids = original.encode(text)
        assert converted.encode(text) == ids, text
        assert converted.decode([*ids, original.eos_id]) == original.decode([*ids, original.eos_id])


@pytest.mark.parametrize("kind", ["bytes", "ranks"])
def test_ids_are_equal_on_unusual_text_and_around_random_characters(tmp_path, kind):
    path = str(tmp_path / "t.model") if kind == "ranks" else "bytes"
    if kind == "ranks":
        train_bpe(training_texts(), 900, path)
    sample = random.Random(0).sample([c for c in range(0x30000) if not 0xD800 <= c < 0xE000], 2000)
    around = (f"a{c}b {c}{c} 1{c}2'{c} ,{c}.\n{c} \r{c}" for c in map(chr, sample))
    assert_equal_ids([*ODD_TEXTS, *around], open_tokenizer(path), convert(path, tmp_path))


def test_ids_are_equal_for_ranks_in_random_order(tmp_path):
    """Some tokens are made by no merges, and some merges enable others of lower rank."""
    generator, path = random.Random(1), tmp_path / "t.model"
    for _ in range(20):
        merged = {bytes(generator.choices(b"abc", k=generator.randrange(2, 7))) for _ in range(40)}
        tokens = [*merged, *(bytes([byte]) for byte in range(256))]
        generator.shuffle(tokens)
        lines = (b"%s %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))
        path.write_bytes(b"".join(lines))
        texts = ["".join(generator.choices("abc", k=generator.randrange(1, 60))) for _ in range(60)]
        assert_equal_ids(texts, open_tokenizer(str(path)), convert(str(path), tmp_path))


def test_a_tokenizer_json_is_unchanged_except_truncation_and_padding(tmp_path):
    path = write_tokenizer_json(tmp_path)
    table = json.loads(Path(path).read_text())
    plain = {**table, "truncation": None, "padding": None}
    assert table != plain == json.loads(to_tokenizer_json(open_tokenizer(path)))
    Path(path).write_text(json.dumps(plain, indent=3))
    assert to_tokenizer_json(open_tokenizer(path)) == Path(path).read_bytes()


def test_tokens_that_would_take_minutes_to_convert_are_refused(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"a" * size for size in range(2, 600)]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (tmp_path / "long.model").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match="too many long tokens .* the longest has 599 bytes"):
        to_tokenizer_json(open_tokenizer(str(tmp_path / "long.model")))
