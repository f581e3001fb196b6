"""Values in a store that only ranks of this start can have written.

Whoever reaches the store's port can list and set its keys. So each value carries an HMAC-SHA256
over the start, the key and the value, by a secret that was never in the store. A value without a
valid one is ignored, and reported once. The caller puts a counter into its values, so that an old
one that is written again is seen to be old.
"""

from __future__ import annotations

import hmac
import secrets

import torch
import torch.distributed as dist

from titanlite.log import logger

SECRET_BYTES = 32
TRIES = 5  # to replace a forged value, in one call


def share_secret() -> bytes:
    """A new secret of rank 0, on every rank; over gloo's connections, not through the store.

    Every rank must call it at the same point.
    """
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(SECRET_BYTES)), dtype=torch.uint8)
    dist.broadcast(drawn, src=0)  # in host memory, so by gloo also beside NCCL
    return drawn.numpy().tobytes()


class SignedStore:
    """A store of texts, signed; for one start of the ranks."""

    def __init__(self, store: dist.Store, start: str, secret: bytes):
        self.store, self.start, self.secret = store, start, secret
        self.reported = False

    def set(self, key: str, text: str) -> None:
        """Write a text under a key."""
        self.store.set(key, self._sign(key, text))

    def read(self, keys: list[str]) -> list[str]:
        """The texts under these keys; "" where there is none that a rank has signed."""
        if self.store.check(keys):  # because to read a key that is not there is to wait for it
            found = self.store.multi_get(keys)
        else:
            found = [self.store.get(key) if self.store.check([key]) else b"" for key in keys]
        return [self._verify(key, value) for key, value in zip(keys, found, strict=True)]

    def set_first(self, key: str, text: str) -> str:
        """Write a text unless a rank already has; returns the one that stands, or "" if unknown."""
        own, before = self._sign(key, text), b""
        for _ in range(TRIES):
            before = self.store.compare_set(key, before, own)  # a forged one is replaced
            if stands := self._verify(key, before):
                return stands
        return ""

    def _sign(self, key: str, text: str) -> bytes:
        return f"{self._code(key, text.encode())} {text}".encode()

    def _verify(self, key: str, value: bytes) -> str:
        if not value:
            return ""
        code, _, text = value.partition(b" ")
        if hmac.compare_digest(code, self._code(key, text).encode()):
            return text.decode()
        if not self.reported:
            self.reported = True
            logger.warning(
                "the store of the ranks holds a value of %s that no rank has written: ignored."
                " Others can reach its port; see SECURITY.md",
                key,
            )
        return ""

    def _code(self, key: str, text: bytes) -> str:
        about = f"{len(self.start)} {self.start} {len(key)} {key} ".encode()
        return hmac.digest(self.secret, about + text, "sha256").hex()
