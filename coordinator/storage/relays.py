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


@dataclass(frozen=True, slots=True)
class ProbedRelay:
    """What a probe found of a relay, as RegisteredRelay has it."""

    relay: RegisteredRelay
    good_at: float | None
    failed_probes: int


def put_relay(connection: Connection, relay: RegisteredRelay, *, forget_before: float, most: int) -> None:
    """Replace the node's announcement and delete those last seen before `forget_before`.

    What probes found is kept while its URL stays. With `most` other relays, one that serves nothing gives way: of the
    place that has most of those, first one that failed its probes. Where all serve, one of the place that has most
    gives way; raises Refusal if no place has two.
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
        if before.version is None and relay.version is not None:
            values["probed_at"] = None  # now there is something to ask for
    connection.execute(delete(relays).where(relays.c.node == relay.node))
    connection.execute(insert(relays).values(values))


def _least_useful(rows: Sequence[RegisteredRelay]) -> RegisteredRelay:
    # Many keys may announce one good URL: so the good ones of a crowded place are not safe either.
    idle = [row for row in rows if row.good_at is None] or rows
    crowds = Counter(row.place for row in idle)
    if idle is rows and max(crowds.values()) == 1:
        raise Refusal(Reason.TOO_MANY_REQUESTS, "The list of relays is full.")
    return max(idle, key=lambda row: (crowds[row.place], row.failed_probes, -row.seen_at))


def relays_seen_since(connection: Connection, since: float) -> Sequence[RegisteredRelay]:
    """Return the relays that announced themselves at `since` or later, by node id."""
    columns = (relays.c[name] for name in RegisteredRelay.__dataclass_fields__)
    found = connection.execute(select(*columns).where(relays.c.seen_at >= since).order_by(relays.c.node))
    return [RegisteredRelay(*row) for row in found]


def note_probe(connection: Connection, found: ProbedRelay, *, now: float) -> None:
    """Store what a probe found, unless the relay has announced another URL since."""
    same = (relays.c.node == found.relay.node) & (relays.c.url == found.relay.url)
    values = {"good_at": found.good_at, "failed_probes": found.failed_probes, "probed_at": now}
    connection.execute(update(relays).where(same).values(values))
