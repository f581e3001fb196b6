"""The bytes of text that each id of a tokenizer.json stands for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, of tokenizers with byte fallback


def bytes_of_tokens(
    table: dict[str, Any], tokens: Sequence[str | None], decode: Callable[[list[int]], str]
) -> list[bytes]:
    """The bytes of each id; b"" for special tokens and ids without a token.

    `table` is the content of the tokenizer.json, `tokens` has the token of each id. The bytes of
    all ids of a text are that text as the tokenizer decodes it behind other text.
    """
    special = {entry["id"] for entry in table.get("added_tokens") or [] if entry.get("special")}
    types = set(_decoder_types(table.get("decoder")))
    if "ByteLevel" in types:
        spelled = byte_level_alphabet()
        return [
            b"" if token is None or id in special else _unspell(token, spelled)
            for id, token in enumerate(tokens)
        ]
    # each is decoded behind another one: a decoder may treat the first token of a text differently
    first = next((i for i in range(len(tokens)) if i not in special and decode([i]).isalpha()), 0)
    skipped = len(decode([first]).encode())
    has_bytes = "ByteFallback" in types
    content = []
    for id, token in enumerate(tokens):
        if token is None or id in special:
            content.append(b"")
        elif has_bytes and (match := _BYTE.fullmatch(token)):
            content.append(bytes([int(match[1], 16)]))
        else:
            content.append(decode([first, id]).encode()[skipped:])
    return content


def _decoder_types(decoder: Any) -> Iterator[str]:
    """The types of a decoder of a tokenizer.json, and of those in a sequence."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or []:
            yield from _decoder_types(part)


def byte_level_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers spell each byte -> the byte.

    Printable bytes of Latin-1 are themselves, the others the characters from U+0100 on, as in GPT-2
    (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf,
    section 2.2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def _unspell(token: str, spelled: dict[str, int]) -> bytes:
    """The bytes of a token; an added token may have characters that spell no byte."""
    if all(character in spelled for character in token):
        return bytes(spelled[character] for character in token)
    return token.encode()
