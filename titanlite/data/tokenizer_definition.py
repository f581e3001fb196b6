"""What a foreign tokenizer.json says, checked before the tokenizers library (Rust) reads it.

What is refused here would end the process there (an allocation that fails aborts, which Python
cannot catch), or take all memory at the first text. A Rust panic is caught where it happens.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.files import MAX_NESTING_LEVELS

MOST_ID = 2**31 - 1  # shards hold int32
MOST_PARTS = 64  # normalizers, pre-tokenizers, decoders, post-processors of one kind
MOST_CHARACTERS = 4096  # of a regex, a replacement, an affix
MOST_GROWTH = 100  # of a text's length, by all its normalizers; NFKC of SentencePiece has 18

_COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHARSMAP = "precompiled_charsmap"


def check_definition(table: Mapping[str, Any]) -> None:
    """Raise ValueError with the reason why a tokenizer.json cannot be used safely."""
    _check_model(table.get("model"))
    for token in _list_of(table, "added_tokens"):
        if not isinstance(token, dict):
            raise ValueError("added_tokens holds what is not an object")
        _check_id(token.get("id"), "added_tokens")
        _check_strings(token, "added_tokens")
    for name in _COMPONENTS:
        if table.get(name) is not None:
            _check_component(name, table[name])


def added_around_text(table: Mapping[str, Any]) -> list[str | None]:
    """The special tokens that its post-processor puts around a text, which itself is None.

    ["<s>", None] is BOS and the text. Empty where it cannot be told. The library has read `table`,
    so that its parts have the right types.
    """
    given = table.get("post_processor")
    parts = [given]
    if isinstance(given, dict) and given.get("type") == "Sequence":
        parts = given.get("processors") or []
    parts = [p for p in parts if isinstance(p, dict) and p.get("type") != "ByteLevel"]
    if not parts:  # the byte level moves offsets and adds nothing
        return [None]
    if len(parts) > 1 or not isinstance(parts[0].get("single"), list):
        return []
    specials = [piece.get("SpecialToken") for piece in parts[0]["single"]]
    return [special.get("id") if special else None for special in specials]


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        raise ValueError("it has no model")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, (dict, list)) or not vocabulary:
        raise ValueError("its vocabulary is empty")
    if isinstance(vocabulary, dict):
        for id in vocabulary.values():
            _check_id(id, "model.vocab")
    if model.get("dropout"):
        raise ValueError(
            f"model.dropout = {model['dropout']!r:.40}, so that the ids of a text are random"
        )
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    _check_strings(rest, "model")


def _check_id(id: Any, where: str) -> None:
    if type(id) is not int or not 0 <= id <= MOST_ID:
        raise ValueError(f"{where} has the id {id!r:.40}, outside 0…{MOST_ID}")


def _check_component(name: str, component: Any) -> None:
    nodes = list(_nodes(component))
    parts = [node for node in nodes if "type" in node]
    if len(parts) > MOST_PARTS:
        raise ValueError(f"its {name} has {len(parts)} parts, more than {MOST_PARTS}")
    growth = 1.0
    for node in nodes:
        _check_strings(node, name)
        growth *= _growth(node)
    if growth > MOST_GROWTH:
        raise ValueError(
            f"its {name} can make a text {growth:,.0f} times as long, more than {MOST_GROWTH}"
        )


def _growth(node: Mapping[str, Any]) -> float:
    """By which factor one part can lengthen a text."""
    kind = node.get("type")
    if kind == "Prepend":
        return 1.0 + len(_string(node, "prepend"))
    if kind == "Replace":
        pattern = node.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else pattern
        least = len(literal) if isinstance(literal, str) else 1
        return max(1.0, len(_string(node, "content")) / max(1, least))
    if _CHARSMAP in node:
        return float(_longest_of_charsmap(_string(node, _CHARSMAP)))
    return 1.0


def _longest_of_charsmap(text: str) -> int:
    """The most characters that SentencePiece's table writes for one.

    It is the size of a trie, the trie, and what is written, each ended by a zero. A wrong size
    makes the library allocate it.
    """
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"its {_CHARSMAP} is not base64") from None
    size = int.from_bytes(content[:4], "little")
    if len(content) < 8 or size % 4 or not 4 <= size <= len(content) - 4:
        raise ValueError(f"its {_CHARSMAP} is damaged")
    written = content[4 + size :].split(b"\0")
    return max(1, *(len(part.decode(errors="replace")) for part in written))


def _check_strings(node: Mapping[str, Any], where: str) -> None:
    for key, value in node.items():
        long = isinstance(value, str) and len(value) > MOST_CHARACTERS and key != _CHARSMAP
        if long or len(key) > MOST_CHARACTERS:
            raise ValueError(f"its {where} has a text of more than {MOST_CHARACTERS} characters")


def _nodes(component: Any) -> Iterator[dict[str, Any]]:
    """Every object in a component, itself included."""
    level = [component]
    for _ in range(MAX_NESTING_LEVELS):
        for node in level:
            if isinstance(node, dict):
                yield node
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]


def _string(node: Mapping[str, Any], key: str) -> str:
    value = node.get(key)
    return value if isinstance(value, str) else ""


def _list_of(table: Mapping[str, Any], key: str) -> list:
    value = table.get(key) or []
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list")
    return value
