"""Descriptors of a run that is nobody's: of the size of real ones, each newer than the one before."""

from __future__ import annotations

import secrets
import time
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.run.descriptors import VALID_SECONDS
from node.protocol.run import (
    DESCRIPTOR_DOMAIN,
    DESCRIPTOR_VERSION,
    Descriptor,
    EnvironmentSpec,
    PolicyHead,
    RunSpec,
    run_id_of,
)
from shardcast.envelope import seal
from shardcast.wire import encode

BYTES: Final = 1600
"""Size of each envelope, within one relay's address: that of a run with a coordinator, a peer and few relays."""


class Signer:
    """The key of a run, and its descriptors."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._head = 0
        self.run_id = run_id_of(self._key.public_key().public_bytes_raw())
        self._relays: tuple[str, ...] = ()
        while len(self._sealed()) < BYTES:
            self._relays += (f"http://relay-{len(self._relays)}.example:8720",)

    def next(self) -> tuple[int, bytes]:
        """Return the next head's version and the envelope that names it."""
        self._head += 1
        return self._head, self._sealed()

    def _sealed(self) -> bytes:
        now = int(time.time())
        described = Descriptor(
            run_id=self.run_id,
            version=self._head,
            spec=RunSpec(name="network", environments=(EnvironmentSpec(name="arithmetic"),)),
            endpoints=("http://127.0.0.1:8700",),
            relays=self._relays,
            peers=(),
            head=PolicyHead(version=self._head, manifest_digest=secrets.token_hex(32)),
            revoked=(),
            issued_at=now,
            expires_at=now + VALID_SECONDS,
        )
        return seal(encode(described), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=self._key)
