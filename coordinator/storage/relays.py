"""The relays that announced themselves: where they serve, what they hold, and what they got from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select

from coordinator.storage.schema import relays
from node.protocol.reasons import Reason, Refusal


@dataclass(frozen=True, slots=True)
class RegisteredRelay:
    """One relay's last announcement; `received` is JSON, `version` the newest policy that it holds whole."""

    node: str
    url: str
    received: str
    place: str
    version: int | None
    seen_at: float


def put_relay(connection: Connection, relay: RegisteredRelay, *, forget_before: float, most: int) -> None:
    """Store an announcement in place of the node's last one, and forget those not seen since `forget_before`.

    Raises Refusal where there are `most` relays besides.
    """
    connection.execute(delete(relays).where(relays.c.seen_at < forget_before))
    others = connection.execute(select(func.count()).where(relays.c.node != relay.node)).scalar_one()
    if others >= most:
        raise Refusal(Reason.TOO_MANY_REQUESTS, "The list of relays is full.")
    connection.execute(delete(relays).where(relays.c.node == relay.node))
    connection.execute(
        insert(relays).values(
            node=relay.node,
            url=relay.url,
            received=relay.received,
            place=relay.place,
            version=relay.version,
            seen_at=relay.seen_at,
        )
    )


def relays_seen_since(connection: Connection, since: float) -> Sequence[RegisteredRelay]:
    """Return the relays that announced themselves at `since` or later, by their keys."""
    columns = (relays.c[name] for name in RegisteredRelay.__dataclass_fields__)
    found = connection.execute(select(*columns).where(relays.c.seen_at >= since).order_by(relays.c.node))
    return [RegisteredRelay(*row) for row in found]
