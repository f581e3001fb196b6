"""Any tokenizer as a Hugging Face tokenizer.json that gives the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from titanlite.data.bpe import ranks_of
from titanlite.data.tokenizer import BYTES, SPLIT_PATTERN, Tokenizer, read_ranks
from titanlite.data.tokenizer_definition import added_around_text
from titanlite.errors import DataError

# Finding the pair that makes a token takes about the cube of its bytes; so many take half a minute.
# Published tokenizers, with tokens of up to 128 bytes, have a tenth.
MOST_STEPS = 20_000_000_000


def to_tokenizer_json(tokenizer: Tokenizer, *, bos: bool = False) -> bytes:
    """The content of a tokenizer.json that gives the ids which a model was trained on.

    `bos`: each document began with BOS, so that it adds one before a text; else it adds nothing.
    A file that is one already, and says so, is taken as it is; but truncation and padding, which
    are habits of whoever saved it, are dropped. The ids are the same but for runs of 100,000
    blanks, which are cut here and not there. Raises DataError.
    """
    content = tokenizer.files.get("tokenizer.json")
    if content is None:
        content = _of_ranks(_ranks_of(tokenizer), tokenizer)
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
    """What adds BOS to the ids of a text, or nothing; the given one where it does just that."""
    begin = tokenizer.token_of(tokenizer.bos_id)
    if added_around_text(table) == ([begin, None] if bos else [None]):
        return table.get("post_processor")
    if not bos:
        return None
    return {
        "type": "TemplateProcessing",
        "single": [_piece("SpecialToken", begin, 0), _piece("Sequence", "A", 0)],
        "pair": [
            *(_piece("SpecialToken", begin, 0), _piece("Sequence", "A", 0)),
            *(_piece("SpecialToken", begin, 1), _piece("Sequence", "B", 1)),
        ],
        "special_tokens": {begin: {"id": begin, "ids": [tokenizer.bos_id], "tokens": [begin]}},
    }


def _piece(kind: str, id: str, type_id: int) -> dict[str, Any]:
    return {kind: {"id": id, "type_id": type_id}}


def _ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    if tokenizer.name == BYTES:
        return {bytes([byte]): byte for byte in range(256)}
    return read_ranks(tokenizer.name, tokenizer.files["tokenizer.model"])


def _of_ranks(ranks: dict[bytes, int], tokenizer: Tokenizer) -> bytes:
    """tiktoken merges, again and again, the pair of neighbours that makes the token of least rank.

    Wherever a token is made in a text, the merges inside it are those of its own bytes alone. So
    one pair makes it everywhere, and a list of these pairs in the order of rank says the same.
    """
    try:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library
    except ImportError as missing:
        raise DataError(
            "a tokenizer.json needs tokenizers, which is not installed.",
            fix="pip install tokenizers",
        ) from missing

    if sum(len(token) ** 3 for token in ranks) > MOST_STEPS:
        raise DataError(
            f'tokenizer "{tokenizer.name}": has too many long tokens to be written as'
            f" tokenizer.json; the longest has {max(map(len, ranks)):,} bytes."
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain = Library(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    letters = {byte[0]: letter for byte, letter in zip(ranks_of(plain), alphabet, strict=True)}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    pairs = [pair for token in sorted(ranks, key=ranks.get) if (pair := _made_of(token, ranks))]
    merges = [(spelled(left), spelled(right)) for left, right in pairs]
    ids = {spelled(token): rank for token, rank in ranks.items()}
    # a word that is a token is that token, as in tiktoken, even where no merges lead to it
    made = Library(models.BPE(ids, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, as_letters])
    made.decoder = decoders.ByteLevel()
    names = [tokenizer.decode([id]) for id in range(len(ranks), tokenizer.vocab_size)]
    made.add_special_tokens([AddedToken(name, special=True) for name in names])
    return made.to_str().encode()


def _made_of(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The pair whose merge makes a token; None for a byte, and where no merges lead to it."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        made = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        first = made.index(min(made))
        if made[first] == len(ranks):
            return None
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
