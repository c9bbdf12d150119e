"""Who is let in to control a node: every check of a request, in the order of docs/protocol.md, section 14.2.

No network and no thread: bytes and the peer that brought them in, a request or a refusal out. Strangers cost one
signature check each, and no more of them are looked at than a fixed number a second, so that they can neither wear the
node out nor fill the table of nonces, nor keep those out who were let in before.
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


class ControlDoor:
    """The door of one node. `revoked` gives the keys that the run's current descriptor revokes, or None without one.

    `allowed` are the purposes that the node's owner lets the run's operator use. `clock` is Unix time.
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
        """Return the request in `data`, which `peer` (the public key of the channel) brought; raises ControlRefusal."""
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
        self._peers[peer] = bucket  # the last to be forgotten
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        if not bucket.try_take(now):
            raise ControlRefusal(ControlReason.TOO_MANY_REQUESTS)

    def _remember(self, signer: bytes, nonce: str) -> None:
        """Remember a nonce; raises ControlRefusal where it was seen or the table is full.

        Only nonces of those who may ask are kept, so that strangers cannot push anybody's out.
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
