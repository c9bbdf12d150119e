"""The run's descriptor: signed anew when what it says has changed or grows old, and each version only once.

A version lies in the database before anybody sees it, so that no restart and no second process on the same database
ever signs two descriptors of one version: others would show both as a proof against the operator.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from coordinator.run.home import Home
from coordinator.run.relays import RelayRegistry
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
"""What is not a new policy waits for so long after the last version: relays come and go, and two coordinators that were
started with different contacts would else outbid each other, many times a second."""

LOOK_SECONDS = 0.05
"""How old an answer may be that is given without looking at the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contacts:
    """Where others find the run, as its operator says: coordinators, peers to begin with, and keys to shun.

    Every coordinator process of a run has to be started with the same ones.
    """

    endpoints: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    revoked: tuple[str, ...] = ()


NOWHERE = Contacts()


@dataclass(frozen=True, slots=True)
class Issued:
    """A signed version, and digests of what it says: of the policy and the rules, the contacts, and the relays."""

    version: int
    envelope: bytes
    policy: str
    contacts: str
    relays: str
    issued_at: float

    def is_good(self, wanted: Issued, *, now: float) -> bool:
        """Whether it may still be given out where `wanted` would say how things are."""
        age = now - self.issued_at
        if not 0 <= age < RENEW_SECONDS or self.policy != wanted.policy:
            return False
        return (self.contacts, self.relays) == (wanted.contacts, wanted.relays) or age < SETTLE_SECONDS


class Descriptors:
    """Signs the descriptors of one run."""

    def __init__(self, home: Home, *, key: Ed25519PrivateKey, relays: RelayRegistry, contacts: Contacts) -> None:
        self._home, self._key, self._relays, self._contacts = home, key, relays, contacts
        self._lock = threading.Lock()
        self._looked: tuple[float, Issued] | None = None
        self._issued = -1
        self._dispute_said = False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the operator says that coordinators are."""
        return self._contacts.endpoints

    def newest(self, *, now: float) -> Issued:
        """The version that holds now."""
        with self._lock:
            if self._looked is None or not 0 <= now - self._looked[0] < LOOK_SECONDS:
                self._looked = now, self._look(now)
            return self._looked[1]

    def _look(self, now: float) -> Issued:
        urls = tuple(self._relays.urls(now=now))
        with self._home.database.read() as connection:
            wanted, last = self._wanted(connection, urls, now), _last(connection)
        if last is not None and last.is_good(wanted, now=now):
            return last
        with self._home.database.write() as connection:
            locks.deciding(connection)
            wanted, last = self._wanted(connection, urls, now), _last(connection)
            if last is not None and last.is_good(wanted, now=now):
                return last
            if last is not None:
                self._look_for_dispute(last, wanted)
            # By the clock, if it is ahead: an operator who goes back to yesterday's backup signs no version again.
            version = max(int(now), 0 if last is None else last.version + 1)
            issued = self._issue(connection, self._described(connection, urls, version, now), now)
        self._issued = issued.version
        return issued

    def _look_for_dispute(self, last: Issued, wanted: Issued) -> None:
        """Contacts change when a coordinator starts; later, somebody else has changed them back."""
        if self._dispute_said or self._issued < 0 or last.version == self._issued or last.contacts == wanted.contacts:
            return
        self._dispute_said = True
        log.warning(
            "another coordinator of this run tells nodes other endpoints, peers or revoked keys than this one: give "
            "all the same --endpoint and --revoke, and where one runs the peer, the others --no-peer --introduce"
        )

    def _wanted(self, connection: Connection, urls: tuple[str, ...], now: float) -> Issued:
        described = self._described(connection, urls, 0, now)
        return Issued(0, b"", *_digests(described), now)

    def _described(self, connection: Connection, urls: tuple[str, ...], version: int, now: float) -> Descriptor:
        head = newest_head(connection)
        return Descriptor(
            run_id=self._home.run_id,
            version=version,
            spec=self._home.spec,
            endpoints=self._contacts.endpoints,
            relays=urls,
            peers=self._contacts.peers,
            head=None if head is None else PolicyHead(version=head[0], manifest_digest=head[1]),
            revoked=self._contacts.revoked,
            issued_at=int(now),
            expires_at=int(now) + VALID_SECONDS,
        )

    def _issue(self, connection: Connection, described: Descriptor, now: float) -> Issued:
        envelope = seal(encode(described), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=self._key)
        issued = Issued(described.version, envelope, *_digests(described), now)
        content = f"{issued.policy} {issued.contacts} {issued.relays}"
        add_descriptor(connection, StoredDescriptor(issued.version, content, envelope, now))
        return issued


def _digests(described: Descriptor) -> tuple[str, str, str]:
    """Of what a descriptor says, whatever its version and dates: of the run and its policy, contacts, and relays."""
    bare = structs.replace(described, version=0, issued_at=0, expires_at=0)
    policy = structs.replace(bare, endpoints=(), relays=(), peers=(), revoked=())
    contacts = structs.replace(bare, relays=(), head=None)
    relays = structs.replace(bare, endpoints=(), peers=(), revoked=(), head=None)
    return digest(encode(policy)), digest(encode(contacts)), digest(encode(relays))


def _last(connection: Connection) -> Issued | None:
    row = newest_descriptor(connection)
    if row is None:
        return None
    policy, contacts, relays = row.content.split(" ")
    return Issued(row.version, row.envelope, policy, contacts, relays, row.issued_at)
