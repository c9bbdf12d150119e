"""The nodes of a run: registration, counts and lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, func, insert, literal, select, tuple_, update

from coordinator.storage import instances, locks, profiles
from coordinator.storage.schema import nodes
from coordinator.storage.standing import is_unproven
from node.protocol.messages import Registration
from node.protocol.standing import Standing

_NODE, _NEW_NODE = select(nodes.c.node).where(nodes.c.node == bindparam("node")), insert(nodes)
_SAME_NODE = update(nodes).where(nodes.c.node == bindparam("of_node"))

ORDERS: Final = {"credit": nodes.c.tokens, "seen": nodes.c.seen_at, "rejected": nodes.c.rejected}
"""The columns by which nodes are listed, the largest first; each has an index."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node's row; times are in Unix seconds."""

    node: str
    engine: str
    admitted: int
    rejected: int
    tokens: int
    verified: int
    strikes: int
    not_before: float
    registered_at: float
    seen_at: float

    @property
    def standing(self) -> Standing:
        return Standing(self.verified, self.strikes)


_ROW: Final = select(*(nodes.c[name] for name in NodeRow.__dataclass_fields__))


def register(connection: Connection, node: str, registration: Registration, *, now: float) -> None:
    """Insert or update a node; raises Refusal while another instance of its key is active."""
    locks.leasing(connection)
    columns = instances.instance_columns(connection, node, registration, now=now)
    columns |= {"software": registration.software, "engine": registration.engine, "seen_at": now}
    if connection.execute(_SAME_NODE, columns | {"of_node": node}).rowcount == 0:
        connection.execute(_NEW_NODE, columns | {"node": node, "registered_at": now})
    profiles.replace(connection, node, registration)


def is_registered(connection: Connection, node: str) -> bool:
    """Return whether the node is registered."""
    return connection.execute(_NODE, {"node": node}).first() is not None


def find(connection: Connection, node: str) -> NodeRow | None:
    """Return a node's row, None if it is not registered."""
    row = connection.execute(_ROW.where(nodes.c.node == node)).first()
    return None if row is None else NodeRow(*row)


def list_named(connection: Connection, names: Sequence[str]) -> list[NodeRow]:
    """Return the rows of these nodes, in this order."""
    found = {row.node: NodeRow(*row) for row in connection.execute(_ROW.where(nodes.c.node.in_(names)))}
    return [found[name] for name in names if name in found]


def count_registered(connection: Connection) -> int:
    """Return how many nodes have registered."""
    return int(connection.execute(select(func.count()).select_from(nodes)).scalar_one())


def count_seen_since(connection: Connection, since: float) -> int:
    """Return how many nodes were seen at `since` or later."""
    return int(connection.execute(select(func.count()).where(nodes.c.seen_at >= since)).scalar_one())


def count_unproven_seen_since(connection: Connection, since: float) -> int:
    """Return how many nodes whose last submission was not admitted were seen at `since` or later."""
    return int(connection.execute(select(func.count()).where(nodes.c.seen_at >= since, is_unproven())).scalar_one())


def count_banned(connection: Connection, *, ban_after: int) -> int:
    """Return how many nodes have at least `ban_after` strikes."""
    return int(connection.execute(select(func.count()).where(nodes.c.strikes >= ban_after)).scalar_one())


def list_by(connection: Connection, order: str, *, after: tuple[float, str] | None, most: int) -> list[NodeRow]:
    """Return at most `most` nodes in descending `order`, one of ORDERS, after the row with this (value, node id)."""
    by = ORDERS[order]
    query = _ROW.order_by(by.desc(), nodes.c.node.desc())
    if after is not None:
        value = after[0] if order == "seen" else int(after[0])
        query = query.where(tuple_(by, nodes.c.node) < tuple_(literal(value, by.type), literal(after[1])))
    return [NodeRow(*row) for row in connection.execute(query.limit(most))]


def list_by_prefix(connection: Connection, prefix: str, *, after: str, most: int) -> list[NodeRow]:
    """Return at most `most` nodes whose id begins with `prefix` and sorts behind `after` ("" for the first ones)."""
    # Hexadecimal digits sort before "g", in every collation.
    query = _ROW.where(nodes.c.node >= prefix, nodes.c.node < f"{prefix}g", nodes.c.node > after)
    return [NodeRow(*row) for row in connection.execute(query.order_by(nodes.c.node).limit(most))]


def list_active(connection: Connection, *, seen_since: float, most: int) -> list[NodeRow]:
    """Return at most `most` nodes in order of registration: by most credit, then most rejections, then seen last.

    Uses indices only. Registration is free, so it alone gains no place.
    """
    columns, found = nodes.c, dict[str, None]()
    for column, above in ((columns.tokens, 0), (columns.rejected, 0), (columns.seen_at, seen_since)):
        query = select(columns.node).where(column > above).order_by(column.desc(), columns.node.desc()).limit(most)
        found |= dict.fromkeys(connection.execute(query).scalars())
    rows = connection.execute(_ROW.where(columns.node.in_(list(found)[:most])).order_by(columns.registered_at))
    return [NodeRow(*row) for row in rows]
