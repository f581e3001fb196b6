"""Replace mail addresses, IP addresses and secret keys by placeholders.

Mail addresses and public IP addresses are replaced as in FineWeb (https://arxiv.org/abs/2406.17557,
section 3.7), by the placeholders of StarCoder (https://arxiv.org/abs/2305.06161, section 4).
Names, telephone numbers and postal addresses are not found.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]  # pyarrow has no stubs

from titanlite.errors import ConfigError
from titanlite_corpus.filters.rule import RuleResult, TextChange
from titanlite_corpus.filters.text_block import TextBlock, to_numpy

_CONTEXT = 80  # characters of a sample, on both sides of a placeholder
# One search of RE2 is linear in the text, but a search ends only when an earlier match has become
# impossible. So no pattern may begin to match far before one of its own matches without being it,
# and patterns are not joined by "|": a key that never ends would be read again after every match.
_MAIL = (
    r"[A-Za-z0-9][A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b"
)
# Formats as their issuers publish them; those that may contain others are first.
_KEYS = (
    # https://www.rfc-editor.org/rfc/rfc7468
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=:,\s\\-]*?-----END [A-Z ]*PRIVATE KEY-----",
    # JSON Web Token: https://www.rfc-editor.org/rfc/rfc7519
    r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    # https://platform.openai.com/docs/api-reference/authentication
    r"\bsk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}",
    # https://docs.gitlab.com/security/tokens
    r"\bglpat-[A-Za-z0-9_-]{20,}",
    # https://cloud.google.com/docs/authentication/api-keys
    r"\bAIza[A-Za-z0-9_-]{35}",
    # https://api.slack.com/authentication/token-types
    r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    # https://github.blog/engineering/platform-security/behind-githubs-new-authentication-token-formats
    r"\bgh[pousr]_[A-Za-z0-9]{36,}\b",
    r"\bgithub_pat_[A-Za-z0-9_]{82}\b",
    # https://huggingface.co/docs/hub/security-tokens
    r"\bhf_[A-Za-z0-9]{34}\b",
    # https://docs.stripe.com/keys
    r"\b[rs]k_live_[A-Za-z0-9]{24,}\b",
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b",
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_V4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
# 2000::/3, all that is assigned: https://www.iana.org/assignments/ipv6-address-space
_V6 = r"[23][0-9a-fA-F]{3}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{0,4}"
_CANDIDATE = rf"\b(?:{_V4}|{_V6})"
_ADDRESS = re.compile(rf"(?<![\w.:-])(?:{_V4}|{_V6})(?![\w:]|[.-]\w)")


@dataclass(frozen=True)
class PersonalDataConfig:
    """[filter.personal_data] Placeholders for personal data and secrets."""

    mail: str = "<EMAIL>"  # for mail addresses; "": keep them
    ip: str = "<IP_ADDRESS>"  # for public addresses (IPv4 and IPv6); private ones stay; "": keep
    key: str = "<KEY>"  # for private keys, and access keys of well-known services; "": keep them


class PersonalDataRule:
    """The rule "personal_data"."""

    def __init__(self, config: PersonalDataConfig):
        for name in ("mail", "ip", "key"):
            if "\\" in (value := getattr(config, name)):
                raise ConfigError(
                    f'filter.personal_data.{name} = "{value}": must not contain a backslash.'
                )
        self._config = config

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Replace in all documents of the block."""
        config, texts, changes = self._config, block.texts, []
        replacers: tuple[tuple[str, str, Callable[[Any, str], Any]], ...] = (
            ("key", config.key, _replace_keys),
            ("mail", config.mail, lambda texts, new: _replace(_MAIL, texts, new)),
            ("ip", config.ip, _replace_addresses),
        )
        for name, placeholder, replace in replacers:
            if placeholder:
                texts, counts = replace(texts, placeholder)
                changes.append(TextChange(name, counts, _example(texts, placeholder)))
        return RuleResult(texts=None if texts is block.texts else texts, changes=changes)


def _replace(pattern: str, texts: Any, placeholder: str) -> tuple[Any, np.ndarray]:
    """(texts with placeholders, [D] number of them)."""
    counts = to_numpy(pc.count_substring_regex(texts, pattern)).astype(np.int64)
    if counts.any():
        mask = pc.greater(counts, 0)
        changed = pc.replace_substring_regex(texts.filter(mask), pattern, placeholder)
        texts = pc.replace_with_mask(texts, mask, changed)
    return texts, counts


def _replace_keys(texts: Any, placeholder: str) -> tuple[Any, np.ndarray]:
    """As `_replace`, for each pattern of a key; few documents contain any."""
    counts = np.zeros(len(texts), np.int64)
    mask = pc.match_substring_regex(texts, "|".join(_KEYS))  # stops at the first match
    if (found := np.flatnonzero(to_numpy(mask))).size:
        changed = texts.filter(mask)
        for pattern in _KEYS:
            changed, replaced = _replace(pattern, changed, placeholder)
            counts[found] += replaced
        texts = pc.replace_with_mask(texts, mask, changed)
    return texts, counts


def _replace_addresses(texts: Any, placeholder: str) -> tuple[Any, np.ndarray]:
    """As `_replace`, for public IP addresses; few documents contain what looks like one."""
    counts = np.zeros(len(texts), np.int64)
    mask = pc.match_substring_regex(texts, _CANDIDATE)
    changed = []
    for number in np.flatnonzero(to_numpy(mask)):
        found = [0]

        def replace(match: re.Match[str], found: list[int] = found) -> str:
            if not _is_public(match[0]):
                return match[0]
            found[0] += 1
            return placeholder

        changed.append(_ADDRESS.sub(replace, texts[int(number)].as_py()))
        counts[number] = found[0]
    if changed:
        texts = pc.replace_with_mask(texts, mask, pc.cast(changed, texts.type))
    return texts, counts


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _example(texts: Any, placeholder: str) -> Callable[[int], str]:
    def example(document: int) -> str:
        text = texts[document].as_py()
        position = max(0, text.find(placeholder))
        return text[max(0, position - _CONTEXT) : position + len(placeholder) + _CONTEXT]

    return example
