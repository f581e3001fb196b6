"""Check a foreign tokenizer.json before the tokenizers library (Rust) reads it.

Most of what is refused here would abort the process there (a failed allocation, which Python
cannot catch), or use all memory at the first text; `dropout` would make the ids of a text random. A
Rust panic can be caught, by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from titanlite.files import MAX_NESTING_LEVELS

MAX_ID = 2**31 - 1  # shards store int32
MAX_PARTS = 64  # of one component: normalizers, pre-tokenizers, decoders or post-processors
MAX_CHARACTERS = 4096  # of a regex, a replacement or an affix

_COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_CHARSMAP = "precompiled_charsmap"  # a table of SentencePiece, the only long string


def check_definition(table: Mapping[str, Any]) -> None:
    """Raise ValueError, with the reason, if a tokenizer.json cannot be used safely."""
    _check_model(table.get("model"))
    for token in _list_of(table, "added_tokens"):
        if not isinstance(token, dict):
            raise ValueError("added_tokens has an entry that is not an object")
        _check_id(token.get("id"), "added_tokens")
        _check_strings(token, "added_tokens")
    for name in _COMPONENTS:
        if table.get(name) is not None:
            _check_component(name, table[name])


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


def without_prefix(table: Mapping[str, Any], *, after_text: bool) -> dict[str, Any]:
    """`table` without the space before a text, for text behind a control token or `after_text`.

    Behind a control token, the tokenizers library omits only what is added "first". The library
    must have read `table` before.
    """
    names = ("normalizer", "pre_tokenizer")
    parts = {name: _without_prefix(table.get(name), after_text) for name in names}
    return {**table, **parts}


def _without_prefix(part: Any, after_text: bool) -> Any:
    """A normalizer or pre-tokenizer without what adds a space before a text; None: nothing left."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [_without_prefix(child, after_text) for child in part[key]]
        return {**part, key: [child for child in kept if child is not None]}
    if kind == "Prepend" and after_text:
        return None
    if kind == "Metaspace" and (after_text or part.get("prepend_scheme") == "first"):
        rest = {name: value for name, value in part.items() if name != "add_prefix_space"}
        return {**rest, "prepend_scheme": "never"}
    if kind == "ByteLevel" and after_text:
        return {**part, "add_prefix_space": False}
    return part


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
        raise ValueError(f"model.dropout = {model['dropout']!r:.40} makes the ids of a text random")
    rest = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    _check_strings(rest, "model")


def _check_id(id: Any, where: str) -> None:
    if type(id) is not int or not 0 <= id <= MAX_ID:
        raise ValueError(f"{where} has the id {id!r:.40}, outside 0…{MAX_ID}")


def _check_component(name: str, component: Any) -> None:
    nodes = list(_nodes(component))
    parts = [node for node in nodes if "type" in node]
    if len(parts) > MAX_PARTS:
        raise ValueError(f"its {name} has {len(parts)} parts, more than {MAX_PARTS}")
    for node in nodes:
        _check_strings(node, name)


def _check_strings(node: Mapping[str, Any], where: str) -> None:
    for key, value in node.items():
        too_long = isinstance(value, str) and len(value) > MAX_CHARACTERS and key != _CHARSMAP
        if too_long or len(key) > MAX_CHARACTERS:
            raise ValueError(f"its {where} has a string of more than {MAX_CHARACTERS} characters")


def _nodes(component: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in a component, itself included."""
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


def _list_of(table: Mapping[str, Any], key: str) -> list:
    value = table.get(key) or []
    if not isinstance(value, list):
        raise ValueError(f"{key} is not a list")
    return value
