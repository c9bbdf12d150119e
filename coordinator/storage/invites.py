"""How many keys each invite has let in."""

from __future__ import annotations

from sqlalchemy import Connection, func, insert, select

from coordinator.storage.schema import invited


def count_uses(connection: Connection, invite: str) -> int:
    """Return how many keys the invite with this id has let in."""
    return int(connection.execute(select(func.count()).where(invited.c.invite == invite)).scalar_one())


def use(connection: Connection, invite: str, node: str, *, now: float) -> None:
    """Record that the invite lets in `node`, in the transaction that registers the node."""
    connection.execute(insert(invited).values(node=node, invite=invite, at=now))
