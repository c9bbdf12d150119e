"""Relay announcements, and what probes found of each relay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select, update

from coordinator.storage.schema import relays
from node.protocol.reasons import Reason, Refusal


@dataclass(frozen=True, slots=True)
class RegisteredRelay:
    """A relay's last announcement; `received` is JSON, `version` the newest policy that it holds completely.

    `good_at` is when a probe last found that it serves, None if none ever did or the last one failed; `probed_at` the
    time of the last probe; `failed_probes` those that failed since one succeeded.
    """

    node: str
    url: str
    received: str
    place: str
    version: int | None
    seen_at: float
    good_at: float | None = None
    probed_at: float | None = None
    failed_probes: int = 0


def put_relay(connection: Connection, relay: RegisteredRelay, *, forget_before: float, most: int) -> None:
    """Replace the node's announcement and delete those last seen before `forget_before`.

    What probes found is kept while its URL stays. With `most` other relays, one that serves nothing gives way: of the
    place that has most of those, first one that failed its probes. Raises Refusal if all are good.
    """
    connection.execute(delete(relays).where(relays.c.seen_at < forget_before))
    known = relays_seen_since(connection, forget_before)
    before = next((row for row in known if row.node == relay.node), None)
    others = [row for row in known if row.node != relay.node]
    if before is None and len(others) >= most:
        connection.execute(delete(relays).where(relays.c.node == _least_useful(others).node))
    values = asdict(relay)
    if before is not None and before.url == relay.url:
        values |= {name: getattr(before, name) for name in ("good_at", "probed_at", "failed_probes")}
    connection.execute(delete(relays).where(relays.c.node == relay.node))
    connection.execute(insert(relays).values(values))


def _least_useful(rows: Sequence[RegisteredRelay]) -> RegisteredRelay:
    idle = [row for row in rows if row.good_at is None]
    if not idle:
        raise Refusal(Reason.TOO_MANY_REQUESTS, "The list of relays is full.")
    crowds = Counter(row.place for row in idle)
    return max(idle, key=lambda row: (crowds[row.place], row.failed_probes, -row.seen_at))


def relays_seen_since(connection: Connection, since: float) -> Sequence[RegisteredRelay]:
    """Return the relays that announced themselves at `since` or later, by node id."""
    columns = (relays.c[name] for name in RegisteredRelay.__dataclass_fields__)
    found = connection.execute(select(*columns).where(relays.c.seen_at >= since).order_by(relays.c.node))
    return [RegisteredRelay(*row) for row in found]


def note_probe(connection: Connection, relay: RegisteredRelay, *, good_at: float | None, now: float) -> None:
    """Store what a probe of `relay` found, unless it has announced another URL since; `good_at` None: it failed."""
    same = (relays.c.node == relay.node) & (relays.c.url == relay.url)
    failed = 0 if good_at is not None else relays.c.failed_probes + 1
    connection.execute(update(relays).where(same).values(good_at=good_at, probed_at=now, failed_probes=failed))
