"""Remove documents that contain words or links of a list.

C4 removed each page with a word of a list (https://arxiv.org/abs/1910.10683, section 2.2). No list
is part of titanlite: those who train decide which words to exclude.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

from titanlite.errors import ConfigError
from titanlite.files import read_regular_file
from titanlite.settings import NotNegative
from titanlite_corpus.filters.rule import Check, RuleResult, above
from titanlite_corpus.filters.text_block import TextBlock, TextParts, to_numpy

# Scripts that do not separate words by spaces.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff]")
_EDGES = r"^[^\p{L}\p{N}]+|[^\p{L}\p{N}]+$"  # what is not a letter or digit around a word
_MAX_HOST = 253  # characters of a domain name (https://www.rfc-editor.org/rfc/rfc1035)
_LINK = re.compile(r"(?:https?://|www\.)[^\s\"'<>()\[\]]+", re.IGNORECASE)


@dataclass(frozen=True)
class BlocklistConfig:
    """[filter.blocklist] Words and links that documents must not contain."""

    words: str = ""  # file with one word or phrase per line; upper and lower case are equal
    max_words: NotNegative = 0  # documents with more of these words are removed
    links: str = ""  # file with one domain or beginning of an address per line
    max_links: NotNegative = 0  # documents with more links to these are removed


class BlocklistRule:
    """The rule "blocklist"."""

    def __init__(self, config: BlocklistConfig):
        if not (config.words or config.links):
            raise ConfigError(
                'filter.rules contains "blocklist", but no list is given.',
                fix="Give a file as filter.blocklist.words or filter.blocklist.links.",
            )
        self._config = config
        entries = _read_list("words", config.words)
        unspaced = [entry for entry in entries if _UNSPACED.search(entry)]
        phrases = [entry.split() for entry in entries if not _UNSPACED.search(entry)]
        self._words = pa.array([p[0] for p in phrases if len(p) == 1], pa.large_string())
        self._phrases = [phrase for phrase in phrases if len(phrase) > 1]
        self._unspaced = "|".join(map(_quote, unspaced))
        self._links = {_normalize_link(entry) for entry in _read_list("links", config.links)}
        self._longest_link = max(map(len, self._links), default=0)

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Count in all documents of the block."""
        checks: list[Check] = []
        if self._config.words:
            checks.append(above("words", self._count_words(block), self._config.max_words))
        if self._config.links:
            links = block.words.sum(self._blocked_links(block.words)[block.words.ids])
            checks.append(above("links", links, self._config.max_links))
        return RuleResult(checks)

    def _count_words(self, block: TextBlock) -> np.ndarray:
        words = block.words
        plain = pc.replace_substring_regex(pc.utf8_lower(words.distinct), _EDGES, "")
        found = words.matching(pc.is_in(plain, self._words)).astype(np.int64)
        for phrase in self._phrases:
            found += _find_phrase(phrase, plain, words)
        counts = words.sum(found)
        if self._unspaced:
            lower = pc.utf8_lower(block.texts)
            counts = counts + to_numpy(pc.count_substring_regex(lower, self._unspaced))
        return counts

    def _blocked_links(self, words: TextParts) -> np.ndarray:
        """Whether each distinct word contains a link to an entry of the list."""
        blocked = np.zeros(len(words.distinct), bool)
        candidates = pc.match_substring_regex(words.distinct, r"(?i)://|www\.")
        for number in np.flatnonzero(to_numpy(candidates)):
            links = _LINK.findall(words.distinct[int(number)].as_py())
            blocked[number] = any(map(self._is_blocked, links))
        return blocked

    def _is_blocked(self, link: str) -> bool:
        """Whether the domain, a domain above it, or a beginning of the path is in the list."""
        plain = _normalize_link(link)
        if len(host := plain.partition("/")[0]) > _MAX_HOST:
            return False
        _, *path = plain[: self._longest_link + 1].split("/")  # what is longer equals no entry
        labels = host.split(".")
        domains = {".".join(labels[n:]) for n in range(len(labels))}
        paths = {"/".join([host, *path[:n]]) for n in range(1, len(path) + 1)}
        return not self._links.isdisjoint(domains | paths)


def _find_phrase(phrase: Sequence[str], plain: Any, words: TextParts) -> np.ndarray:
    """[N] whether the phrase begins at each word."""
    found = np.zeros(len(words.ids), bool)
    masks = [to_numpy(pc.equal(plain, word)) for word in phrase]
    if all(mask.any() for mask in masks) and len(found) >= len(phrase):
        starts = len(found) - len(phrase) + 1
        found[:starts] = words.documents[:starts] == words.documents[len(phrase) - 1 :]
        for shift, mask in enumerate(masks):
            found[:starts] &= mask[words.ids[shift : shift + starts]]
    return found


def _read_list(key: str, path: str) -> list[str]:
    """The lines of a file, in lower case; raises ConfigError."""
    if not path:
        return []
    try:
        lines = read_regular_file(Path(path)).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'filter.blocklist.{key} = "{path}": cannot be read ({reason}).',
            fix="Give a text file (UTF-8) with one entry a line.",
        ) from None
    entries = [line.strip().lower() for line in lines]
    entries = sorted({entry for entry in entries if entry and not entry.startswith("#")})
    if not entries:
        raise ConfigError(f'filter.blocklist.{key} = "{path}": the file has no entries.')
    return entries


def _normalize_link(link: str) -> str:
    """Without scheme, "www.", port, query, and what is not part of an address at its end."""
    plain = re.sub(r"^(?:https?://)?(?:www\.)?", "", link.lower())
    host, slash, path = re.split(r"[?#]", plain)[0].partition("/")
    return (re.sub(r":\d*$", "", host) + slash + path).rstrip("/.,;:!")


def _quote(text: str) -> str:
    """`text` as a regular expression of RE2."""
    return re.sub(r"([^\w\s]|_)", r"\\\1", text)
