"""Broadcast errors, classed by whose fault they are.

ShardcastError
├── PeerFault              a peer sent something no honest peer sends
│   ├── Malformed          bytes that are not what they claim to be
│   ├── BadSignature       not signed by the key that must sign
│   ├── Stale              expired, or older than what was already seen
│   ├── Equivocation       two signed manifests for one version
│   └── CorruptChunk       a chunk whose digest is not the manifest's
├── NetworkFault           nobody could serve it in time
│   ├── Unreachable        connection refused, reset, or timed out
│   ├── NotServed          the peer responds, but does not have it
│   │   └── NoVersionYet   it has no version at all: the run may not have begun
│   └── TooSlow            below the minimum rate, or past the deadline
└── LocalFault             this machine: disk full, permissions, a bad setting

Every error carries `code`, a stable identifier for machines, and a sentence for people.
"""

from __future__ import annotations


class ShardcastError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "shardcast_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class PeerFault(ShardcastError):
    code = "peer_fault"


class Malformed(PeerFault):
    code = "malformed"


class BadSignature(PeerFault):
    code = "bad_signature"


class Stale(PeerFault):
    code = "stale"


class Equivocation(PeerFault):
    code = "equivocation"


class CorruptChunk(PeerFault):
    code = "corrupt_chunk"


class NetworkFault(ShardcastError):
    code = "network_fault"


class Unreachable(NetworkFault):
    code = "unreachable"


class NotServed(NetworkFault):
    code = "not_served"


class NoVersionYet(NotServed):
    code = "no_head"


class TooSlow(NetworkFault):
    code = "too_slow"


class LocalFault(ShardcastError):
    code = "local_fault"
