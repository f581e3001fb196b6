"""Tables over all code points: what separates words, and what each character contributes to a hash.

Words are lower-cased, and accents and punctuation are dropped. The tables follow the version of
Unicode of this Python, so all machines of a cluster need the same Python.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from titanlite.data.random_bits import GOLDEN, mix

SEPARATOR, LETTER, SINGLE, IGNORED = range(4)  # kinds of characters
# SINGLE: a word of its own, in scripts without spaces. IGNORED: accents and format characters.

_CODE_POINTS = 0x110000
_CASES_END = 0x20000  # no cased letter and no letter with an accent has a higher code point
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x30FF),  # iteration mark, Hiragana, Katakana
    (0x3400, 0x4DBF),  # CJK ideographs, extension A
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


@cache
def character_kinds() -> np.ndarray:
    """SEPARATOR, LETTER, SINGLE or IGNORED of each code point, uint8."""
    kind_of = {"Mn": IGNORED, "Cf": IGNORED, "Mc": LETTER}
    categories = map(unicodedata.category, map(chr, range(_CODE_POINTS)))
    listed = (kind_of.get(c, LETTER if c[0] in "LN" else SEPARATOR) for c in categories)
    kinds = np.fromiter(listed, np.uint8, _CODE_POINTS)
    for first, last in _WITHOUT_SPACES:
        part = kinds[first : last + 1]
        part[part == LETTER] = SINGLE
    return kinds


@cache
def character_values() -> np.ndarray:
    """A random uint64 for each LETTER, equal for its cases and accents, or SINGLE; else 0.

    Only the dotless ı keeps a value of its own, although its upper case is I.
    """
    kinds = character_kinds()
    folded = np.arange(_CODE_POINTS, dtype=np.uint64)
    for point in np.flatnonzero(kinds[:_CASES_END] == LETTER).tolist():
        folded[point] = ord(_fold_letter(chr(point), kinds))
    values = mix((folded + np.uint64(1)) * GOLDEN)
    values[(kinds == SEPARATOR) | (kinds == IGNORED)] = 0
    return values


def _fold_letter(letter: str, kinds: np.ndarray) -> str:
    """The letter without case and accents, where it is one character."""
    base = [c for c in unicodedata.normalize("NFD", letter) if kinds[ord(c)] != IGNORED]
    letter = base[0] if len(base) == 1 else letter
    folded = letter.casefold()  # of ς too, which lower() leaves beside the σ of Σ
    return (folded if len(folded) == 1 else letter).lower()
