"""A Hugging Face tokenizer.json, checked before the tokenizers library (Rust) reads it.

Its control tokens are BOS, EOS, the added tokens that it marks as special, and those named like
<|im_end|>. Its other added tokens, such as runs of spaces, are vocabulary, found in text.

Most of what is refused would abort the process in the library (a failed allocation, which Python
cannot catch), or use all memory at the first text; `dropout` would make the ids of a text random. A
Rust panic can be caught.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from titanlite.data.token_bytes import bytes_of_tokens
from titanlite.data.tokenizer import (
    ALLOWED,
    BEGIN,
    END,
    Tokenizer,
    fingerprint_of,
    not_installed_error,
)
from titanlite.errors import DataError
from titanlite.files import parse_json

_BOS_NAMES = (BEGIN, "<s>", "<bos>", "<|startoftext|>", "[BOS]", "<｜begin▁of▁sentence｜>")
_EOS_NAMES = (END, "</s>", "<eos>", "<|endoftext|>", "[EOS]", "<｜end▁of▁sentence｜>")
# Some files do not mark these as special, such as <|im_end|> and DeepSeek's <｜User｜>.
_CONTROL_NAME = re.compile(r"<[|｜][^\s|｜]+[|｜]>")
MAX_ID = 2**31 - 1  # shards store int32
MAX_PARTS = 64  # of one component: normalizers, pre-tokenizers, decoders or post-processors
MAX_CHARACTERS = 4096  # of a regex, a replacement or an affix

_COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHARSMAP = "precompiled_charsmap"  # a table of SentencePiece, the only long string


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, read by the tokenizers library."""

    def __init__(self, content: bytes, name: str, control: frozenset[str] = frozenset()):
        """`control`: added tokens that are control tokens, whatever the file says."""
        try:
            import tokenizers
        except ImportError as missing:
            raise not_installed_error(name, "tokenizers") from missing
        self.name, self.files = name, {"tokenizer.json": content}
        # a file may enable truncation and padding, which would change documents
        table = {**_parse_tokenizer_json(name, content), "truncation": None, "padding": None}
        for token in table.get("added_tokens") or []:
            if _is_control_name(token.get("content"), control):
                token["special"] = True  # otherwise the library would find it in ordinary text
        definition = json.dumps(table, sort_keys=True)
        with _library_errors(name, "the tokenizers library cannot read it"):
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
            self._tokenizer.encode_special_tokens = True  # special-looking text is ordinary text
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            tokens = self._tokenizer.get_added_tokens_decoder()
        added = {token.content: id for id, token in tokens.items()}
        self.special_tokens, self.vocab_size = added, 1 + max(ids)
        self.control_tokens = frozenset(t.content for t in tokens.values() if t.special)
        eos_id, bos_id = _first_id(_EOS_NAMES, added), _first_id(_BOS_NAMES, added)
        if eos_id is None:
            raise DataError(
                f'tokenizer "{name}": no known EOS among its {len(added)} added tokens.',
                fix=f"Add one of {' '.join(_EOS_NAMES)} to it.",
            )
        self.eos_id = eos_id
        self.bos_id = eos_id if bos_id is None else bos_id  # GPT-2 uses its EOS as BOS
        first = next(iter(added_around_text(table)), None)
        self.adds_bos = self.has_bos and first is not None and added.get(first) == self.bos_id
        self.fingerprint = fingerprint_of("tokenizer.json", definition)
        model = table["model"]
        unknown_id = model.get("unk_id", added.get(str(model.get("unk_token"))))
        control_ids = {added[token] for token in self.control_tokens} - {unknown_id}
        self._never_in_text = control_ids | {self.bos_id, self.eos_id}

    def __reduce__(self):  # the library's own pickling loses encode_special_tokens
        return HuggingFaceTokenizer, (self.files["tokenizer.json"], self.name, self.control_tokens)

    def special_token_name(self, id: int) -> str:
        name = self._tokenizer.id_to_token(id)  # not decode(): a decoder may strip or add spaces
        assert name is not None, f"no token has the id {id}"
        return name

    def token_bytes(self) -> list[bytes]:
        tokens = [self._tokenizer.id_to_token(id) for id in range(self.vocab_size)]
        return bytes_of_tokens(json.loads(self._tokenizer.to_str()), tokens, self._decode)

    def _encode(self, text: str) -> list[int]:
        with _library_errors(self.name, f"cannot encode a text of {len(text):,} characters"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            ids = encoding.ids
        if not self._never_in_text.isdisjoint(ids):
            # Unigram finds special tokens in text, and merges may make one; unknown may be EOS
            place = next(place for place, id in enumerate(ids) if id in self._never_in_text)
            token, (start, end) = self.special_token_name(ids[place]), encoding.offsets[place]
            around = json.dumps(text[max(0, start - 20) : end + 20], ensure_ascii=False)
            raise DataError(
                f'tokenizer "{self.name}": encodes ordinary text as the special token {token},'
                f" in {around}.",
                fix=f"Remove {token} from the text if it is there, or use another tokenizer.",
            )
        return ids

    def _decode(self, ids: list[int]) -> str:
        with _library_errors(self.name, f"cannot decode {len(ids):,} ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


@contextmanager
def _library_errors(name: str, failure: str) -> Iterator[None]:
    """Raise whatever the tokenizers library raises, Rust panics included, as a DataError."""
    try:
        yield
    except BaseException as error:  # no narrower class; a panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f'tokenizer "{name}": {failure} ({error}).', fix=ALLOWED) from None


def _parse_tokenizer_json(path: str, content: bytes) -> dict:
    try:
        table = parse_json(content)
    except ValueError as error:
        raise DataError(f'tokenizer "{path}": not valid JSON ({error}).', fix=ALLOWED) from None
    if not isinstance(table, dict) or not isinstance(table.get("model"), dict):
        raise DataError(f'tokenizer "{path}": is JSON, but not a tokenizer.json.', fix=ALLOWED)
    try:
        _check_definition(table)
    except ValueError as error:
        raise DataError(f'tokenizer "{path}": cannot be used: {error}.', fix=ALLOWED) from None
    return table


def _is_control_name(name: Any, control: frozenset[str]) -> bool:
    """Whether an added token is a control token, although its file may not mark it as special."""
    if not isinstance(name, str):
        return False
    known = name in _BOS_NAMES or name in _EOS_NAMES or name in control
    return known or _CONTROL_NAME.fullmatch(name) is not None


def _first_id(names: Sequence[str], ids: dict[str, int]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)


def _check_definition(table: Mapping[str, Any]) -> None:
    """Raise ValueError, with the reason, if a tokenizer.json cannot be used safely."""
    _check_model(table["model"])
    added = table.get("added_tokens") or []
    if not isinstance(added, list):
        raise ValueError("added_tokens is not a list")
    for token in added:
        if not isinstance(token, dict):
            raise ValueError("added_tokens has an entry that is not an object")
        _check_id(token.get("id"), "added_tokens")
        _check_strings(token, "added_tokens")
    for name in _COMPONENTS:
        nodes = list(_nodes(table.get(name)))
        parts = sum("type" in node for node in nodes)
        if parts > MAX_PARTS:
            raise ValueError(f"its {name} has {parts} parts, more than {MAX_PARTS}")
        for node in nodes:
            _check_strings(node, name)


def added_around_text(table: Mapping[str, Any]) -> list[str | None]:
    """The special tokens that the post-processor adds around a text; None is the text itself.

    ["<s>", None] means BOS before the text; an empty list means that the tokens are unknown. The
    library must have read `table` before: then its parts have the right types.
    """
    processor = table.get("post_processor")
    parts: list[Any] = [processor]
    if isinstance(processor, dict) and processor.get("type") == "Sequence":
        parts = processor.get("processors") or []
    # Without ByteLevel, which changes offsets only.
    parts = [p for p in parts if isinstance(p, dict) and p.get("type") != "ByteLevel"]
    if not parts:
        return [None]
    template = parts[0]
    if len(parts) > 1 or not isinstance(template.get("single"), list):
        return []
    specials = [piece.get("SpecialToken") for piece in template["single"]]
    return [special.get("id") if special else None for special in specials]


def _check_model(model: Mapping[str, Any]) -> None:
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, (dict, list)) or not vocabulary:
        raise ValueError("its vocabulary is empty")
    if isinstance(vocabulary, dict):
        for id in vocabulary.values():
            _check_id(id, "model.vocab")
    if model.get("dropout"):
        raise ValueError(f"model.dropout = {model['dropout']!r:.40} makes the ids of a text random")
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    _check_strings(rest, "model")


def _check_id(id: Any, where: str) -> None:
    if type(id) is not int or not 0 <= id <= MAX_ID:
        raise ValueError(f"{where} has the id {id!r:.40}, outside 0…{MAX_ID}")


def _check_strings(node: Mapping[str, Any], where: str) -> None:
    for key, value in node.items():
        too_long = isinstance(value, str) and len(value) > MAX_CHARACTERS and key != _CHARSMAP
        if too_long or len(key) > MAX_CHARACTERS:
            raise ValueError(f"its {where} has a string of more than {MAX_CHARACTERS} characters")


def _nodes(component: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in a component, itself included."""
    if isinstance(component, dict):
        yield component
    if isinstance(component, (dict, list)):
        for child in component.values() if isinstance(component, dict) else component:
            yield from _nodes(child)
