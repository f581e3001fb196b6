"""Tokenizers: the ids are those of the given file, for any text."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from titanlite.data import open_tokenizer
from titanlite.data import tokenizer as tokenizer_module
from titanlite.data.open_tokenizer import tokenizer_from_bytes
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import DataError
from titanlite_corpus.bpe import train_bpe, train_merges

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 600
ODD_TEXTS = [
    "",
    "def f(x):\n\treturn x  # naïve façade\r\n\r\n",
    "emoji 👩‍👩‍👧‍👦🏽 flags 🇫🇷🇯🇵, 中文字符 한국어 日本語",
    unicodedata.normalize("NFD", "Ünïcödé é ǭ ṩ") + "z͑ͫ̓ͪ̂ͫ",
    " \u00a0\u2003\u3000\t \n \r \x0b\x0c\x85\u2028\u200b end   ",
    "don't I'LL 1234567 3.14159 ١٢٣ ½ Ⅷ",
    "\x00\x01\x7f <|begin_of_text|> <|end_of_text|> </s> ﷽ 𝔘𝔫𝔦",
]


def training_texts() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "titanlite").glob("*.py"))] + ODD_TEXTS[1:4]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("ranks") / "t.model"
    assert train_bpe(training_texts(), VOCAB_SIZE, path) == VOCAB_SIZE
    return str(path)


def test_the_reported_size_is_that_of_the_opened_tokenizer(tmp_path, monkeypatch):
    """Also for as many ranks as Llama 3 has, which are read with its 256 special tokens."""
    monkeypatch.setattr(tokenizer_module, "_LLAMA3_RANKS", 300)
    for vocab_size in (301, 302, 303):
        size = train_bpe(training_texts(), vocab_size, tmp_path / "t.model")
        assert size == open_tokenizer(str(tmp_path / "t.model")).vocab_size


def run_command(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def write_tokenizer_json(folder: Path, end: str = "<|endoftext|>") -> str:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_trained_tokenizer_has_the_requested_size_with_special_tokens_last(ranks):
    tokenizer = open_tokenizer(ranks)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.bos_id, tokenizer.eos_id) == (VOCAB_SIZE - 2, VOCAB_SIZE - 1)
    assert tokenizer.decode([tokenizer.eos_id]) == "<|end_of_text|>"


def test_tiktoken_gives_the_ids_of_the_trained_tokenizer(ranks):
    trained, opened = train_merges(training_texts(), VOCAB_SIZE - 2), open_tokenizer(ranks)
    held_out = [path.read_text() for path in sorted((ROOT / "titanlite").glob("*/*.py"))]
    for text in held_out + ODD_TEXTS:
        assert opened.encode(text) == trained.encode(text).ids


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_decoding_the_ids_of_unusual_text_gives_it_back(ranks, text):
    for path in (ranks, "bytes"):
        tokenizer = open_tokenizer(path)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def write_sentencepiece_json(folder: Path) -> str:
    """Byte fallback, and a decoder that strips the space before a text, as in Llama 2."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "</s>", *bytes_, "▁", "a", "b", "▁a", "▁é"]
    vocab = {token: id for id, token in enumerate(tokens)}
    model = models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "sentencepiece.json"))
    return str(folder / "sentencepiece.json")


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_the_bytes_of_the_ids_of_a_text_are_the_text(ranks, tmp_path, text):
    """Bits per byte would be wrong by a constant factor that nobody sees."""
    for tokenizer in (open_tokenizer("bytes"), open_tokenizer(ranks)):
        (tmp_path / "tokenizer.json").write_bytes(to_tokenizer_json(tokenizer))
        for opened in (tokenizer, open_tokenizer(str(tmp_path / "tokenizer.json"))):
            content = opened.token_bytes()
            assert len(content) == opened.vocab_size
            assert content[opened.bos_id] == content[opened.eos_id] == b""
            assert b"".join(content[id] for id in opened.encode(text)) == text.encode()


def test_byte_fallback_and_spaces_before_words_are_counted(tmp_path):
    tokenizer = open_tokenizer(write_sentencepiece_json(tmp_path))
    content = tokenizer.token_bytes()
    for text in ("a b a", "ab 中文 a", "bé\n"):
        ids = tokenizer.encode(text)
        # The file adds a space before a text, and removes it when it decodes.
        assert b"".join(content[id] for id in ids) == b" " + text.encode()
        assert tokenizer.decode(ids) == text


def test_text_that_looks_like_a_special_token_cannot_end_a_document(ranks, tmp_path):
    for path in (ranks, "bytes", write_tokenizer_json(tmp_path)):
        tokenizer = pickle.loads(pickle.dumps(open_tokenizer(path)))
        ids = tokenizer.encode("ab<|endoftext|>ab<|end_of_text|><|begin_of_text|>ab")
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_a_control_token_that_is_not_marked_as_special_is_not_found_in_text(tmp_path):
    path = Path(write_tokenizer_json(tmp_path))
    table = json.loads(path.read_text())
    table["added_tokens"][0]["special"] = False
    names = ("<|im_end|>", "<｜User｜>", "  ")  # the last one is vocabulary
    table["added_tokens"] += [
        {**table["added_tokens"][0], "id": 4 + n, "content": name} for n, name in enumerate(names)
    ]
    path.write_text(json.dumps(table))
    tokenizer = pickle.loads(pickle.dumps(open_tokenizer(str(path))))
    assert tokenizer.encode("ab<|endoftext|>ab<|im_end|>  <｜User｜>") == [2, 2, 6]
    assert tokenizer.control_tokens == {"<|endoftext|>", *names[:2]}


@pytest.mark.parametrize("name", ["</s>", "<s/>"])
def test_text_that_a_unigram_model_encodes_as_a_control_token_is_refused(tmp_path, name):
    pieces = [("<unk>", 0.0), (name, 0.0), *((character, -3.0) for character in "</s>")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens([AddedToken(n, special=True) for n in ("<unk>", name, "</s>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert opened.encode("s>") == [4, 5]
    assert opened.encode("sé") == [4, 0]  # <unk>
    with pytest.raises(DataError, match=f"ordinary text as the special token {name}"):
        opened.encode(f"s{name}s")


def test_truncation_in_a_tokenizer_json_does_not_shorten_documents(tmp_path):
    tokenizer = open_tokenizer(write_tokenizer_json(tmp_path))
    assert tokenizer.encode("ab" * 5) == [2] * 5
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (4, 3, 3)


def test_the_fingerprint_depends_on_the_tokenizer_but_not_on_its_path(ranks, tmp_path):
    copy, other = tmp_path / "copy.model", tmp_path / "other.model"
    copy.write_bytes(Path(ranks).read_bytes())
    train_bpe(training_texts(), VOCAB_SIZE - 1, other)
    same, different = open_tokenizer(str(copy)), open_tokenizer(str(other))
    assert same.fingerprint == open_tokenizer(ranks).fingerprint != different.fingerprint


def test_a_retrained_file_is_not_read_from_a_cache(ranks, tmp_path):
    path = tmp_path / "t.model"
    path.write_bytes(Path(ranks).read_bytes())
    assert open_tokenizer(str(path)).vocab_size == VOCAB_SIZE
    train_bpe(training_texts(), 300, path)
    assert open_tokenizer(str(path)).vocab_size == 300


def test_a_worker_process_receives_an_equal_tokenizer(ranks, tmp_path):
    for path in (ranks, "bytes", write_tokenizer_json(tmp_path)):
        tokenizer = open_tokenizer(path)
        sent = pickle.loads(pickle.dumps(tokenizer))
        assert sent.encode("abab") == tokenizer.encode("abab")
        assert (sent.fingerprint, sent.vocab_size) == (tokenizer.fingerprint, tokenizer.vocab_size)


def test_llama_3_ranks_have_its_256_special_tokens(tmp_path):
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b"~" + i.to_bytes(3, "big") for i in range(128_000 - 256)]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.model"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (128_256, 128_000, 128_001)
    names = {128_006: "<|start_header_id|>", 128_009: "<|eot_id|>"}
    names |= {128_005: "<|reserved_special_token_3|>", 128_255: "<|reserved_special_token_250|>"}
    assert {id: tokenizer.decode([id]) for id in names} == names


def test_a_million_spaces_do_not_crash_the_encoder(ranks):
    tokenizer = open_tokenizer(ranks)
    for text in (" " * 1_200_000 + "x", "x" + "\t" * 250_000 + "y" + " " * 100_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_surrogate_pair_is_replaced_by_all_tokenizers(ranks):
    for path in (ranks, "bytes"):
        tokenizer = open_tokenizer(path)
        assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


@pytest.mark.parametrize(
    "content, message",
    [
        (b"YQ== zero\n", "line 1"),
        (b"YQ== 0\nYg== 2\n", "0, 1, 2"),
        (b"YQ== 0\nYg== 1\n", "single bytes"),
        (b"\x0a\x07\x0a\x03<s>\x15\x00\x00", "base64"),  # SentencePiece
        (b'{"a": 0}', "tokenizer.json"),
        (b'{"model": {}}', "vocabulary is empty"),
        (b'{"model": {"type": "x", "vocab": {"a": 0}}}', "cannot read"),
        (b'{"model": ', "JSON"),
        (None, "cannot be read"),
    ],
)
def test_an_invalid_tokenizer_is_refused_with_a_fix(tmp_path, content, message):
    path = tmp_path / "t.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as refusal:
        open_tokenizer(str(path))
    assert str(path) in str(refusal.value) and (refusal.value.fix or message == "0, 1, 2")


def test_the_name_of_a_special_token_is_looked_up_by_its_real_id(tmp_path):
    """Not by its id in the list of added tokens, which the library may change."""
    path = write_tokenizer_json(tmp_path)
    table = json.loads(Path(path).read_text())
    table["added_tokens"][0]["id"] = 9
    Path(path).write_text(json.dumps(table))
    for name in (path, "bytes"):
        tokenizer = open_tokenizer(name)
        token = "<|end_of_text|>" if name == "bytes" else "<|endoftext|>"
        assert tokenizer.special_token_name(tokenizer.eos_id) == token
        assert token in to_tokenizer_json(tokenizer).decode()


def test_a_tokenizer_without_a_known_eos_is_refused(tmp_path):
    with pytest.raises(DataError, match="no known EOS"):
        open_tokenizer(write_tokenizer_json(tmp_path, end="<|nothing known|>"))


@pytest.mark.slow
def test_the_script_trains_on_jsonl_and_reports_errors_without_a_traceback(python, tmp_path):
    source, out = tmp_path / "t.jsonl", tmp_path / "t.model"
    source.write_text(json.dumps({"text": "to be or not to be, that is the question"}) + "\n")
    command = [python, "scripts/train_tokenizer.py", str(source), "--out", str(out)]
    done = run_command([*command, "--vocab-size", "261"])
    assert done.returncode == 0, done.stderr
    assert open_tokenizer(str(out)).vocab_size == 261
    refused = run_command([*command, "--vocab-size", "200"])
    assert refused.returncode == 2 and "at least 258" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_the_script_accepts_the_options_that_its_errors_name(python, tmp_path):
    (tmp_path / "a.txt").write_text("ab " * (1 << 19))  # 1.5 MiB
    command = [python, "scripts/train_tokenizer.py", str(tmp_path / "a.txt")]
    command += ["--vocab-size", "259", "--out", str(tmp_path / "t.model"), "--document-mib", "1"]
    refused = run_command(command)
    assert refused.returncode == 2 and "raise the limit: --document-mib N" in refused.stderr
    done = run_command([*command, "--document-mib", "2"])
    assert done.returncode == 0, done.stderr


SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
MINIMAL = {
    "version": "1.0",
    "added_tokens": [{"id": 0, "content": "</s>", "special": True, **SPECIAL}],
    "model": {"type": "BPE", "vocab": {"</s>": 0, "a": 1, "b": 2}, "merges": []},
}


def split(regex: str) -> dict:
    pattern = {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"pre_tokenizer": pattern}


def model(**changes) -> dict:
    return {"model": {**MINIMAL["model"], **changes}}


HOSTILE = {  # name -> (changes to a harmless file, the message that refuses it)
    "too many parts": (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 70}},
        "71 parts, more than 64",
    ),
    "an index outside a table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAP////////8AYQA="}},
        "index out of bounds",
    ),
    "a regex that backtracks endlessly": (split("(a+)+$"), "cannot encode a text"),
    "a regex that is too long": (split("a" * 5000), "more than 4096 characters"),
    "parts without characters": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "cannot encode a text",
    ),
    "a decoder that strips too much": (
        {"decoder": {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}},
        "cannot decode",
    ),
    "an empty vocabulary": (model(vocab={}), "vocabulary is empty"),
    "no special tokens either": ({**model(vocab={}), "added_tokens": []}, "vocabulary is empty"),
    "ids too large for a shard": (model(vocab={"</s>": 0, "a": 2**32 - 1}), "outside 0…2147483647"),
    "random ids": (model(dropout=0.5), "makes the ids of a text random"),
    "depth": ({"x": json.loads("[" * 200 + "]" * 200)}, "nested too deeply"),
}
OPEN_ALL = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
from titanlite.data import open_tokenizer
from titanlite.errors import UserError
for path in sys.argv[1:]:
    try:
        tokenizer = open_tokenizer(path)
        ids = tokenizer.encode("aa" * 30 + "ab")
        print(json.dumps(f"accepted, {len(tokenizer.decode(ids))} characters"))
    except UserError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_a_hostile_tokenizer_is_refused_and_crashes_no_process(tmp_path):
    """In a child process, which these would otherwise abort, block or fill."""
    files = {"harmless": MINIMAL} | {
        name: {**MINIMAL, **changes} for name, (changes, _) in HOSTILE.items()
    }
    for name, table in files.items():
        (tmp_path / name).write_text(json.dumps(table))
    (tmp_path / "very deep").write_text('{"model": ' + "[" * 200_000)
    (tmp_path / "too large").open("wb").truncate(65 << 20)
    os.mkfifo(tmp_path / "fifo")
    messages = {name: message for name, (_, message) in HOSTILE.items()} | {
        "harmless": "accepted, 123 characters",
        "very deep": "nested too deeply",
        "too large": "more than 67,108,864 bytes",
        "fifo": "not a regular file",
        "/dev/zero": "not a regular file",
    }
    command = [sys.executable, "-c", OPEN_ALL, *(str(tmp_path / name) for name in messages)]
    done = run_command(command)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for (name, message), line in zip(messages.items(), lines, strict=True):
        assert re.search(message, line), f"{name}: {line}"


@pytest.mark.parametrize("count", [50_256, 151_643, 199_998])
def test_ranks_of_a_model_with_another_pattern_are_refused(count):
    tokens = [b"!", *(bytes([byte]) for byte in range(256) if byte != ord("!"))]
    tokens += [b"\xff" + number.to_bytes(3, "big") for number in range(count - 256)]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    with pytest.raises(DataError, match="another pattern than Llama 3"):
        tokenizer_from_bytes(b"".join(lines), "tokenizer.model")
