"""Training or validation: a hash of the text decides, so copies of a document are on one side."""

from __future__ import annotations

import xxhash

TRAIN, VALIDATION = "train", "validation"


def is_held_out(text: str, validation_share: float) -> bool:
    """Whether a document goes to validation."""
    digest = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))
    return digest < validation_share * 2**64
