"""The operator's append-only ledger of nodes' stakes."""

from __future__ import annotations

from sqlalchemy import Connection, func, insert, select

from coordinator.storage.schema import stakes


def held(connection: Connection, node: str) -> int:
    """Return the node's current stake, the sum of its entries."""
    total = select(func.coalesce(func.sum(stakes.c.amount), 0)).where(stakes.c.node == node)
    return int(connection.execute(total).scalar_one())


def enter(connection: Connection, node: str, amount: int, *, why: str, now: float) -> None:
    """Add an entry; `why` (a receipt's number, say) makes it idempotent: raises IntegrityError if the node has it."""
    connection.execute(insert(stakes).values(node=node, amount=amount, why=why, at=now))


def slash(connection: Connection, node: str, *, submission: str, now: float) -> None:
    """Take the whole stake, in the transaction of the verdict that rejected `submission`."""
    lost = held(connection, node)
    if lost > 0:
        enter(connection, node, -lost, why=f"rejected {submission}", now=now)


def balances(connection: Connection) -> list[tuple[str, int]]:
    """Return (node, current stake) of every node that has or had one, by node id."""
    query = select(stakes.c.node, func.sum(stakes.c.amount)).group_by(stakes.c.node).order_by(stakes.c.node)
    return [(node, int(amount)) for node, amount in connection.execute(query)]
