"""The run's descriptor, signed anew when its content changes or it is about to expire.

A version is stored before it is served, so that no restart and no second process signs two descriptors of one version,
which would be equivocation.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from coordinator.run.home import Home
from coordinator.storage import locks
from coordinator.storage.database import Connection
from coordinator.storage.descriptors import StoredDescriptor, add_descriptor, newest_descriptor
from coordinator.storage.steps import newest_head
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, Descriptor, PolicyHead
from shardcast.envelope import seal
from shardcast.wire import digest, encode

log = logging.getLogger(__name__)

VALID_SECONDS = 3600
RENEW_SECONDS = VALID_SECONDS / 2
SETTLE_SECONDS = 10.0
"""Minimum time between versions unless the policy is new: two coordinators with different contacts would supersede each
other many times a second."""

CACHE_SECONDS = 0.05
"""Maximum age of a descriptor that is served without reading the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """What the operator gave: URLs of coordinators and relays, bootstrap peers and revoked keys; the same for every
    coordinator process of a run.
    """

    endpoints: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()


NO_CONTACTS = Contacts()


@dataclass(frozen=True, slots=True)
class IssuedDescriptor:
    """A signed version, with a digest each of its policy and rules, and of its contacts."""

    version: int
    envelope: bytes
    policy: str
    contacts: str
    issued_at: float

    def is_current(self, wanted: IssuedDescriptor, *, now: float) -> bool:
        """Return whether this version may still be served although `wanted` has the run's present content."""
        age = now - self.issued_at
        if not 0 <= age < RENEW_SECONDS or self.policy != wanted.policy:
            return False
        return self.contacts == wanted.contacts or age < SETTLE_SECONDS


class Descriptors:
    """Signs the descriptors of one run."""

    def __init__(self, home: Home, *, key: Ed25519PrivateKey, contacts: Contacts) -> None:
        self._home, self._key, self._contacts = home, key, contacts
        self._lock = threading.Lock()
        self._cached: tuple[float, IssuedDescriptor] | None = None
        self._issued = -1
        self._conflict_logged = False

    @property
    def contacts(self) -> Contacts:
        """What the operator configured."""
        return self._contacts

    def newest(self, *, now: float) -> IssuedDescriptor:
        """Return the current version, at most CACHE_SECONDS old; signs a new one if needed."""
        with self._lock:
            if self._cached is None or not 0 <= now - self._cached[0] < CACHE_SECONDS:
                self._cached = now, self._current(now)
            return self._cached[1]

    def _current(self, now: float) -> IssuedDescriptor:
        with self._home.database.read() as connection:
            wanted, last = self._wanted(connection, now), _last(connection)
        if last is not None and last.is_current(wanted, now=now):
            return last
        with self._home.database.write() as connection:
            locks.deciding(connection)
            wanted, last = self._wanted(connection, now), _last(connection)
            if last is not None and last.is_current(wanted, now=now):
                return last
            if last is not None:
                self._warn_of_conflict(last, wanted)
            # At least the time, so that a run restored from an older backup signs no version again.
            version = max(int(now), 0 if last is None else last.version + 1)
            issued = self._issue(connection, self._described(connection, version, now), now)
        self._issued = issued.version
        return issued

    def _warn_of_conflict(self, last: IssuedDescriptor, wanted: IssuedDescriptor) -> None:
        """Log once if another coordinator has replaced the contacts that this one issued."""
        replaced = 0 <= self._issued != last.version and last.contacts != wanted.contacts
        if replaced and not self._conflict_logged:
            self._conflict_logged = True
            log.warning(
                "another coordinator of this run publishes other endpoints, relays, peers or revoked keys: start all "
                "with the same --endpoint, --relay and --revoke; where one runs the peer, start the others with "
                "--no-peer --introduce"
            )

    def _wanted(self, connection: Connection, now: float) -> IssuedDescriptor:
        described = self._described(connection, 0, now)
        return IssuedDescriptor(0, b"", *_digests(described), now)

    def _described(self, connection: Connection, version: int, now: float) -> Descriptor:
        head = newest_head(connection)
        return Descriptor(
            run_id=self._home.run_id,
            version=version,
            spec=self._home.spec,
            endpoints=self._contacts.endpoints,
            relays=self._contacts.relays,
            peers=self._contacts.peers,
            head=None if head is None else PolicyHead(version=head[0], manifest_digest=head[1]),
            revoked=self._contacts.revoked,
            issued_at=int(now),
            expires_at=int(now) + VALID_SECONDS,
        )

    def _issue(self, connection: Connection, described: Descriptor, now: float) -> IssuedDescriptor:
        envelope = seal(encode(described), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=self._key)
        issued = IssuedDescriptor(described.version, envelope, *_digests(described), now)
        content = f"{issued.policy} {issued.contacts}"
        add_descriptor(connection, StoredDescriptor(issued.version, content, envelope, now))
        return issued


def _digests(described: Descriptor) -> tuple[str, str]:
    """Return the digests of policy and rules, and of contacts, without version and dates."""
    bare = structs.replace(described, version=0, issued_at=0, expires_at=0)
    policy = structs.replace(bare, endpoints=(), relays=(), peers=(), revoked=())
    contacts = structs.replace(bare, head=None)
    return digest(encode(policy)), digest(encode(contacts))


def _last(connection: Connection) -> IssuedDescriptor | None:
    row = newest_descriptor(connection)
    if row is None:
        return None
    policy, contacts = row.content.split(" ")
    return IssuedDescriptor(row.version, row.envelope, policy, contacts, row.issued_at)
