"""The run's relays: their announcements, and the plan of who fetches from whom.

Anybody may register a relay, since clients verify everything they fetch. Nodes are told of those that serve, as probes
found (`coordinator.run.relay_probes`); over these the registry plans the trees of `shardcast.tree`. The plan is
advisory, and clients switch away from bad sources.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from coordinator.storage import locks
from coordinator.storage.database import Database
from coordinator.storage.facts import ORIGIN, read_fact
from coordinator.storage.places import place_of
from coordinator.storage.relays import RegisteredRelay, put_relay, relays_seen_since
from node.client.ssrf import Reach, reach_of
from node.protocol.messages import ReceivedFrom, RelayAnnouncement, RelayList
from node.protocol.reasons import Reason, Refusal
from shardcast.tree import Member, TreePlan, median_reports, plan

RELAY_SECONDS = 60
MAX_RELAYS = 256
GOOD_SECONDS = 900
"""How long a relay is told about after a probe found it good, where nobody probes it meanwhile."""
PLAN_SECONDS = 5.0
"""Maximum age of a plan, and so the delay until a new relay gets its place or a dead one loses it."""

_RECEIVED = tuple[ReceivedFrom, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: TreePlan | None
    at: float


class RelayRegistry:
    """The relays of one run. `fixed` are the URLs that the operator configured: the roots of the trees.

    `endpoints` are the coordinators' URLs: an origin that is nearer than these is of no use to others.
    """

    def __init__(self, database: Database, *, fixed: Sequence[str], salt: bytes, endpoints: Sequence[str] = ()) -> None:
        self._database, self._fixed, self._salt = database, tuple(fixed), salt
        self._endpoints = tuple(endpoints)
        self._lock = threading.Lock()
        self._planned: _Planned | None = None

    def announce(self, node: str, announcement: RelayAnnouncement, *, address: str, now: float) -> None:
        """Store an announcement from `address`, which expires after RELAY_SECONDS.

        Raises Refusal if the registry is full of good relays, or the URL is nearer than whoever announces it: nodes
        would send requests to themselves, or to their own network.
        """
        _check_distance(announcement.url, address)
        relay = RegisteredRelay(
            node=node,
            url=announcement.url,
            received=msgspec.json.encode(announcement.received).decode(),
            place=place_of(address),
            version=announcement.version,
            seen_at=now,
        )
        with self._database.write(durable=False) as connection:
            locks.leasing(connection)
            put_relay(connection, relay, forget_before=now - RELAY_SECONDS, most=MAX_RELAYS)

    def urls(self, *, now: float) -> list[str]:
        """Return at most MAX_RELAYS relay URLs: the fixed ones, then the good others by node id; the trainer's origin
        where there is none.
        """
        relays = list(dict.fromkeys((*self._fixed, *(row.url for row in self._good(now)))))[:MAX_RELAYS]
        return relays or self._origin()

    def advice(self, node: str | None, *, address: str, now: float) -> RelayList:
        """Return all relays and, per stripe, the sources of `node`; without a node or a plan only the relays."""
        urls, planned = tuple(self.urls(now=now)), self.plan(now)
        if node is None or planned is None:
            return RelayList(relays=urls)
        return RelayList(relays=urls, stripes=planned.sources_for(node, place_of(address)))

    def plan(self, now: float) -> TreePlan | None:
        """Return the current trees; None without fixed relays or without announced ones."""
        with self._lock:
            if self._planned is None or not 0 <= now - self._planned.at < PLAN_SECONDS:
                self._planned = _Planned(self._make_plan(now), now)
            return self._planned.plan

    @property
    def fixed(self) -> tuple[str, ...]:
        """The URLs that the operator configured."""
        return self._fixed

    def members(self, now: float) -> list[Member]:
        """Return the relays to plan with: each URL once, with its bandwidth as the median of others' reports."""
        rows = _distinct(self._good(now), self._fixed)
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

    def _origin(self) -> list[str]:
        """Return the URL that the trainer has announced, unless only the coordinator's own machine can reach it."""
        with self._database.read() as connection:
            origin = read_fact(connection, ORIGIN)
        if origin is None or any(_is_nearer(origin, endpoint) for endpoint in self._endpoints):
            return []
        return [origin]

    def _good(self, now: float) -> Sequence[RegisteredRelay]:
        with self._database.read() as connection:
            fresh = relays_seen_since(connection, now - RELAY_SECONDS)
        return [row for row in fresh if row.good_at is not None and now - row.good_at < GOOD_SECONDS]


def _is_nearer(url: str, than: str) -> bool:
    """Return whether one URL's host is nearer than the other's; names are as far as anything."""
    one, other = (reach_of(urlsplit(each).hostname or "") for each in (url, than))
    return one is not None and one < (Reach.INTERNET if other is None else other)


def _check_distance(url: str, address: str) -> None:
    announcer, announced = reach_of(address), reach_of(urlsplit(url).hostname or "")
    if announcer is not None and announced is not None and announced < announcer:
        raise Refusal(Reason.BAD_REQUEST, "A relay cannot be nearer to others than it is to the coordinator.")


def _distinct(rows: Sequence[RegisteredRelay], fixed: tuple[str, ...]) -> list[RegisteredRelay]:
    """Return each URL once, of the lowest node id: announcing another relay's URL gains no place."""
    first = {row.url: row for row in reversed(rows) if row.url not in fixed}
    return sorted(first.values(), key=lambda row: row.node)


def _reports(rows: Sequence[RegisteredRelay]) -> defaultdict[str, dict[str, float]]:
    """Return, for each URL, the bytes per second that other relays got from it, by reporter."""
    found = defaultdict[str, dict[str, float]](dict)
    for row in rows:
        for one in msgspec.json.decode(row.received, type=_RECEIVED):
            found[one.url][row.node] = float(one.bytes_per_s)
    return found
