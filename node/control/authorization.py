"""Authorisation of control requests: every check, in the order of docs/protocol.md, section 14.2.

Without IO. An unknown peer costs one signature check, and all of them together are rate limited, so that they can
neither exhaust the node, nor fill the nonce table, nor lock out known peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from node.protocol.control import (
    ControlReason,
    ControlRefusal,
    ControlRequest,
    Purpose,
    check_authority,
    check_request,
    open_control,
    purpose_of,
)
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS
from shardcast.rate_limit import TokenBucket

PEER_PER_SECOND: Final = 1.0
PEER_BURST: Final = 20
STRANGERS_PER_SECOND: Final = 10.0
STRANGERS_BURST: Final = 50
MAX_PEERS: Final = 1024
MAX_KNOWN: Final = 64
MAX_NONCES: Final = 4096
NONCE_SECONDS: Final = 2 * MAX_CLOCK_SKEW_SECONDS + 1


class ControlAuthorizer:
    """Authorisation of one node's control requests, with rate limits and replay protection.

    `allowed` are the purposes that the node's owner permits. `revoked` returns the keys that the current descriptor
    revokes; None without a descriptor. `clock` is Unix time.
    """

    def __init__(
        self,
        *,
        node: bytes,
        run_id: str,
        run_key: bytes,
        allowed: Collection[Purpose],
        revoked: Callable[[], Collection[str] | None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._run_id, self._run_key = node, run_id, run_key
        self._allowed, self._revoked, self._clock, self._monotonic = frozenset(allowed), revoked, clock, monotonic
        self._peers: dict[bytes, TokenBucket] = {}
        self._strangers = TokenBucket(rate=STRANGERS_PER_SECOND, burst=STRANGERS_BURST, now=monotonic())
        self._known: dict[bytes, None] = {}
        self._nonces: dict[tuple[bytes, str], float] = {}

    def let_in(self, peer: bytes, data: bytes) -> ControlRequest:
        """Return the request in `data` from `peer` (the channel's public key); raises ControlRefusal."""
        self._count(peer)
        signer, request = open_control(data)
        now = self._clock()
        check_request(request, signer=signer, peer=peer, node=self._node, run_id=self._run_id, now=now)
        check_authority(
            request, signer=signer, run_key=self._run_key, node=self._node, now=now, revoked=self._revoked()
        )
        self._remember(signer, request.nonce)
        if purpose_of(request.ask) not in self._allowed:
            raise ControlRefusal(ControlReason.NOT_ALLOWED)
        return request

    def _count(self, peer: bytes) -> None:
        now = self._monotonic()
        known = peer in self._known
        if not known and not self._strangers.try_take(now):
            raise ControlRefusal(ControlReason.TOO_MANY_REQUESTS)
        bucket = self._peers.pop(peer, None) or TokenBucket(rate=PEER_PER_SECOND, burst=PEER_BURST, now=now)
        self._peers[peer] = bucket  # most recently used
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        if not bucket.try_take(now):
            raise ControlRefusal(ControlReason.TOO_MANY_REQUESTS)

    def _remember(self, signer: bytes, nonce: str) -> None:
        """Record a nonce; raises ControlRefusal if it was seen or the table is full.

        Only authorised signers' nonces are kept, so that others cannot evict any.
        """
        now = self._monotonic()
        while self._nonces and next(iter(self._nonces.values())) <= now:
            del self._nonces[next(iter(self._nonces))]
        if (signer, nonce) in self._nonces:
            raise ControlRefusal(ControlReason.REPLAYED_REQUEST)
        if len(self._nonces) >= MAX_NONCES:
            raise ControlRefusal(ControlReason.TOO_MANY_REQUESTS)
        self._nonces[signer, nonce] = now + NONCE_SECONDS
        self._known.pop(signer, None)
        self._known[signer] = None
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
