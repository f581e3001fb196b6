"""Convert any tokenizer to a Hugging Face tokenizer.json that gives the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from titanlite.data.huggingface_tokenizer import added_around_text
from titanlite.data.token_bytes import byte_level_alphabet
from titanlite.data.tokenizer import (
    BYTES,
    SPLIT_PATTERN,
    Tokenizer,
    not_installed_error,
    parse_ranks,
)
from titanlite.errors import DataError

# Finding the pair of a token takes about (its bytes)^3 steps; this many take half a minute.
# Published tokenizers, with tokens of up to 128 bytes, need a tenth.
MAX_STEPS = 20_000_000_000


def to_tokenizer_json(tokenizer: Tokenizer, *, bos: bool = False) -> bytes:
    """The content of a tokenizer.json that gives the ids which a model was trained on.

    `bos`: each training document began with BOS, so the file adds one before a text; otherwise it
    adds nothing. A tokenizer.json that already does so is returned unchanged, but without
    truncation and padding. The ids are equal, but only titanlite reads the name of a control
    token as text, and splits 100,000 spaces in a row. Raises DataError.
    """
    content = tokenizer.files.get("tokenizer.json")
    if content is None:
        ranks = {bytes([byte]): byte for byte in range(256)}
        if tokenizer.name != BYTES:
            ranks = parse_ranks(tokenizer.name, tokenizer.files["tokenizer.model"])
        content = _ranks_to_json(ranks, tokenizer)
    table = json.loads(content)
    wanted = {
        "truncation": None,
        "padding": None,
        "post_processor": _post_processor(table, tokenizer, bos),
    }
    if all(table.get(key) == value for key, value in wanted.items()):
        return content
    return json.dumps({**table, **wanted}, ensure_ascii=False).encode()


def _post_processor(table: dict[str, Any], tokenizer: Tokenizer, bos: bool) -> Any:
    """The post-processor that adds BOS or nothing; the existing one if it does exactly that."""
    begin = tokenizer.special_token_name(tokenizer.bos_id)
    if added_around_text(table) == ([begin, None] if bos else [None]):
        return table.get("post_processor")
    if not bos:
        return None
    return {
        "type": "TemplateProcessing",
        "single": [_template_piece("SpecialToken", begin, 0), _template_piece("Sequence", "A", 0)],
        "pair": [
            *(_template_piece("SpecialToken", begin, 0), _template_piece("Sequence", "A", 0)),
            *(_template_piece("SpecialToken", begin, 1), _template_piece("Sequence", "B", 1)),
        ],
        "special_tokens": {begin: {"id": begin, "ids": [tokenizer.bos_id], "tokens": [begin]}},
    }


def _template_piece(kind: str, id: str, type_id: int) -> dict[str, Any]:
    return {kind: {"id": id, "type_id": type_id}}


def _ranks_to_json(ranks: dict[bytes, int], tokenizer: Tokenizer) -> bytes:
    """A tokenizer.json with the merges that give the same ids as tiktoken's ranks.

    tiktoken repeatedly merges the adjacent pair that makes the token of lowest rank. Wherever a
    token is made in a text, the merges inside it depend on its own bytes only. So every token has
    one pair, and the list of these pairs in rank order gives the same merges.
    """
    try:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError as missing:
        raise not_installed_error(tokenizer.name, "tokenizers") from missing

    if sum(len(token) ** 3 for token in ranks) > MAX_STEPS:
        raise DataError(
            f'tokenizer "{tokenizer.name}": has too many long tokens to be written as'
            f" tokenizer.json; the longest has {max(map(len, ranks)):,} bytes."
        )
    characters = {byte: character for character, byte in byte_level_alphabet().items()}

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    in_order = sorted(ranks, key=ranks.__getitem__)
    pairs = [pair for token in in_order if (pair := _last_merge(token, ranks))]
    merges = [(spell(left), spell(right)) for left, right in pairs]
    ids = {spell(token): rank for token, rank in ranks.items()}
    # ignore_merges: as in tiktoken, a word that is a token gets its id even if no merges make it
    converted = LibraryTokenizer(models.BPE(ids, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    converted.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    converted.decoder = decoders.ByteLevel()
    names = [tokenizer.decode([id]) for id in range(len(ranks), tokenizer.vocab_size)]
    converted.add_special_tokens([AddedToken(name, special=True) for name in names])
    return converted.to_str().encode()


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The pair whose merge makes a token; None for a single byte, and if no merges make it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        first = pair_ranks.index(min(pair_ranks))
        if pair_ranks[first] == len(ranks):
            return None
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
