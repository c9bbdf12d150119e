"""The run's relays: where they say they serve, and who should fetch from whom.

Anybody may register a relay, since nothing that one serves is believed. The registry plans the trees of
`shardcast.tree` over those that announced themselves lately; what it says is advice, and whoever is served badly turns
to somebody else.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from coordinator.storage import locks
from coordinator.storage.database import Database
from coordinator.storage.relays import RegisteredRelay, put_relay, relays_seen_since
from node.protocol.messages import ReceivedFrom, RelayAnnouncement, RelayList
from shardcast.tree import Member, TreePlan, median_reports, plan

RELAY_SECONDS = 60
MAX_RELAYS = 256
PLAN_SECONDS = 5.0
"""A plan is made anew this often at most: so late may a newcomer get its place, and so late a dead relay lose it."""

_RECEIVED = tuple[ReceivedFrom, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: TreePlan | None
    at: float


class RelayRegistry:
    """The relays of one run. `fixed` are those that the operator named, which fetch from nobody here: the origin."""

    def __init__(self, database: Database, *, fixed: Sequence[str], salt: bytes) -> None:
        self._database, self._fixed, self._salt = database, tuple(fixed), salt
        self._lock = threading.Lock()
        self._planned: _Planned | None = None

    def announce(self, node: str, announcement: RelayAnnouncement, *, address: str, now: float) -> None:
        """Note where a relay serves and what it got from others; forgotten unless repeated. Raises Refusal."""
        relay = RegisteredRelay(
            node=node,
            url=announcement.url,
            received=encode_received(announcement.received),
            place=place_of(address),
            version=announcement.version,
            seen_at=now,
        )
        with self._database.write(durable=False) as connection:
            locks.leasing(connection)
            put_relay(connection, relay, forget_before=now - RELAY_SECONDS, most=MAX_RELAYS)

    def urls(self, *, now: float) -> list[str]:
        """Where relays serve: the fixed ones, then the others by their keys."""
        return list(dict.fromkeys((*self._fixed, *(row.url for row in self._fresh(now)))))[:MAX_RELAYS]

    def advice(self, node: str | None, *, address: str, now: float) -> RelayList:
        """Whom `node` should fetch from, a relay or not; without a node, or without an origin, just the list."""
        urls, planned = tuple(self.urls(now=now)), self.plan(now)
        if node is None or planned is None:
            return RelayList(relays=urls)
        return RelayList(relays=urls, stripes=planned.sources_for(node, place_of(address)))

    def plan(self, now: float) -> TreePlan | None:
        """The trees as they are advised; None without an origin or without relays."""
        with self._lock:
            if self._planned is None or not 0 <= now - self._planned.at < PLAN_SECONDS:
                self._planned = _Planned(self._make_plan(now), now)
            return self._planned.plan

    @property
    def fixed(self) -> tuple[str, ...]:
        """What the operator named, from which everything comes."""
        return self._fixed

    def members(self, now: float) -> list[Member]:
        """The relays that can have a place in the trees: each URL once, with what others report of it."""
        rows = _distinct(self._fresh(now), self._fixed)
        reports = _reports(rows)
        return [
            Member(
                id=row.node,
                url=row.url,
                bytes_per_s=median_reports(reports[row.url], subject=row.node, flows=len(reports[row.url])),
                place=row.place,
            )
            for row in rows
        ]

    def _make_plan(self, now: float) -> TreePlan | None:
        members = self.members(now)
        return plan(self._fixed, members, salt=self._salt) if self._fixed and members else None

    def _fresh(self, now: float) -> Sequence[RegisteredRelay]:
        with self._database.read() as connection:
            return relays_seen_since(connection, now - RELAY_SECONDS)


def place_of(address: str) -> str:
    """The network of an address, as far as distance can be told by it: its /24, or its /48 in IPv6 (RFC 6177)."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return str(ipaddress.ip_network((parsed, 24 if parsed.version == 4 else 48), strict=False))


def encode_received(received: tuple[ReceivedFrom, ...]) -> str:
    """For the database."""
    return msgspec.json.encode(received).decode()


def _distinct(rows: Sequence[RegisteredRelay], fixed: tuple[str, ...]) -> list[RegisteredRelay]:
    """Each URL once, as the first key's: who announces another's gets no second place."""
    first = {row.url: row for row in reversed(rows) if row.url not in fixed}
    return sorted(first.values(), key=lambda row: row.node)


def _reports(rows: Sequence[RegisteredRelay]) -> defaultdict[str, dict[str, float]]:
    """For each URL what other relays got from it, by reporter."""
    found = defaultdict[str, dict[str, float]](dict)
    for row in rows:
        for one in msgspec.json.decode(row.received, type=_RECEIVED):
            found[one.url][row.node] = float(one.bytes_per_s)
    return found
