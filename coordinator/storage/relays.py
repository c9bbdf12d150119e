"""Relay announcements: URL, newest policy held, and bandwidth from other relays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, func, insert, select

from coordinator.storage.schema import relays
from node.protocol.reasons import Reason, Refusal


@dataclass(frozen=True, slots=True)
class RegisteredRelay:
    """A relay's last announcement; `received` is JSON, `version` the newest policy that it holds completely."""

    node: str
    url: str
    received: str
    place: str
    version: int | None
    seen_at: float


def put_relay(connection: Connection, relay: RegisteredRelay, *, forget_before: float, most: int) -> None:
    """Replace the node's announcement and delete those last seen before `forget_before`.

    Raises Refusal if there are `most` other relays.
    """
    connection.execute(delete(relays).where(relays.c.seen_at < forget_before))
    others = connection.execute(select(func.count()).where(relays.c.node != relay.node)).scalar_one()
    if others >= most:
        raise Refusal(Reason.TOO_MANY_REQUESTS, "The list of relays is full.")
    connection.execute(delete(relays).where(relays.c.node == relay.node))
    connection.execute(insert(relays).values(asdict(relay)))


def relays_seen_since(connection: Connection, since: float) -> Sequence[RegisteredRelay]:
    """Return the relays that announced themselves at `since` or later, by node id."""
    columns = (relays.c[name] for name in RegisteredRelay.__dataclass_fields__)
    found = connection.execute(select(*columns).where(relays.c.seen_at >= since).order_by(relays.c.node))
    return [RegisteredRelay(*row) for row in found]
