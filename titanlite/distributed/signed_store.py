"""Values in a store that only ranks of this start can have written.

Any process that reaches the store's port can list and set its keys. So each value carries an
HMAC-SHA256 over the start, the key and the value, with a secret that was never in the store. A
value without a valid signature is ignored, and reported once. Callers put a counter into their
values, to detect an old value that is written again.
"""

from __future__ import annotations

import hmac
import secrets
from typing import cast

import torch.distributed as dist

from titanlite.distributed.rank_tree import RankTree
from titanlite.log import logger

SECRET_BYTES = 32
MAX_TRIES = 5  # to replace a forged value, in one call


def share_secret() -> bytes:
    """Send a new secret from rank 0 to all ranks, over gloo's connections, not through the store.

    Every rank must call it at the same point.
    """
    return RankTree().broadcast(secrets.token_bytes(SECRET_BYTES))


class SignedStore:
    """A store of signed texts, for one start of the ranks."""

    def __init__(self, store: dist.Store, start_id: str, secret: bytes):
        self._store, self._start_id, self._secret = store, start_id, secret
        self._forgery_reported = False

    def set(self, key: str, text: str) -> None:
        """Write a text under a key."""
        self._store.set(key, self._sign(key, text))

    def read(self, keys: list[str]) -> list[str]:
        """The texts under these keys; "" where there is none with a valid signature."""
        if self._store.check(keys):  # reading a missing key would wait for it
            values = self._store.multi_get(keys)
        elif len(keys) == 1:
            values = [b""]
        else:
            values = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        return [self._verify(key, value) for key, value in zip(keys, values, strict=True)]

    def set_first(self, key: str, text: str) -> str:
        """Write a text unless a rank has already; return the stored text, "" after MAX_TRIES."""
        own, stored = self._sign(key, text), b""
        for _ in range(MAX_TRIES):
            # The value stored before, if any, is forged: replace it. torch's stub says str, but
            # bytes work too, and a forged value may not be UTF-8.
            stored = self._store.compare_set(key, cast(str, stored), own)
            if verified := self._verify(key, stored):
                return verified
        return ""

    def _sign(self, key: str, text: str) -> str:
        return f"{self._signature(key, text.encode())} {text}"

    def _verify(self, key: str, value: bytes) -> str:
        if not value:
            return ""
        signature, _, text = value.partition(b" ")
        if hmac.compare_digest(signature, self._signature(key, text).encode()):
            return text.decode()
        if not self._forgery_reported:
            self._forgery_reported = True
            logger.warning(
                "the ranks' store has a value of %s that no rank signed: ignored."
                " Other processes can reach the store's port; see SECURITY.md",
                key,
            )
        return ""

    def _signature(self, key: str, text: bytes) -> str:
        prefix = f"{len(self._start_id)} {self._start_id} {len(key)} {key} ".encode()
        return hmac.digest(self._secret, prefix + text, "sha256").hex()
