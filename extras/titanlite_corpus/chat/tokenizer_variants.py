"""Variants of a tokenizer.json for the parts of a chat; other tokenizers need none."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from titanlite.data.huggingface_tokenizer import HuggingFaceTokenizer
from titanlite.data.tokenizer import Tokenizer


def with_control_tokens(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """The tokenizer with `names`, some of its special tokens, as control tokens too."""
    control = tokenizer.control_tokens.union(names)
    if not isinstance(tokenizer, HuggingFaceTokenizer) or control == tokenizer.control_tokens:
        return tokenizer
    return HuggingFaceTokenizer(tokenizer.files["tokenizer.json"], tokenizer.name, control)


def continuing(tokenizer: Tokenizer, *, after_text: bool) -> Tokenizer:
    """The tokenizer of text behind a control token or `after_text`; only its encoding differs.

    A file may add a space before a text, which must not be in the middle of one.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    table = json.loads(tokenizer.files["tokenizer.json"])
    names = ("normalizer", "pre_tokenizer")
    changed = {**table, **{name: _without_prefix(table.get(name), after_text) for name in names}}
    if changed == table:
        return tokenizer
    content = json.dumps(changed).encode()
    return HuggingFaceTokenizer(content, tokenizer.name, tokenizer.control_tokens)


def find_strips(tokenizer: Tokenizer) -> dict[str, tuple[bool, bool]]:
    """Whether a special token takes the white space (before, after) it, by name."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    added = json.loads(tokenizer.files["tokenizer.json"]).get("added_tokens") or []
    return {token["content"]: (token["lstrip"], token["rstrip"]) for token in added}


def _without_prefix(part: Any, after_text: bool) -> Any:
    """A normalizer or pre-tokenizer without what adds a space before a text; None: nothing left.

    For text behind a control token or `after_text`. Behind a control token, the tokenizers library
    omits only what is added "first". It must have read the file before.
    """
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
