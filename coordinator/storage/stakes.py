"""What nodes have staked: an interface, and the operator's own ledger behind it.

A registry elsewhere (a chain, a bank) implements `StakeRegistry` and keeps what it has to do in the transaction that
it is given, so that a stake is taken exactly when the verdict behind it is in the log.
"""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection, func, insert, select

from coordinator.storage.schema import stakes


class StakeRegistry(Protocol):
    """Stakes by node, in whole units of the registry's own."""

    def held(self, connection: Connection, node: str) -> int:
        """What the node has at stake now."""

    def slash(self, connection: Connection, node: str, *, submission: str, now: float) -> int:
        """Take all of it because of this rejected submission, once; return how much that was."""


class LocalLedger:
    """The operator's own book, in the run's database: amounts that only ever get added, never changed."""

    def held(self, connection: Connection, node: str) -> int:
        """The sum of the node's entries."""
        total = select(func.coalesce(func.sum(stakes.c.amount), 0)).where(stakes.c.node == node)
        return int(connection.execute(total).scalar_one())

    def slash(self, connection: Connection, node: str, *, submission: str, now: float) -> int:
        """Enter the loss of all that is held."""
        held = self.held(connection, node)
        if held > 0:
            self.enter(connection, node, -held, why=f"rejected {submission}", now=now)
        return max(0, held)

    def enter(self, connection: Connection, node: str, amount: int, *, why: str, now: float) -> None:
        """Add an entry; `why` is the node's only one of that name (a receipt's number, say). Raises IntegrityError."""
        connection.execute(insert(stakes).values(node=node, amount=amount, why=why, at=now))

    def balances(self, connection: Connection) -> list[tuple[str, int]]:
        """Every node that has or had a stake, and what it is now."""
        query = select(stakes.c.node, func.sum(stakes.c.amount)).group_by(stakes.c.node).order_by(stakes.c.node)
        return [(node, int(amount)) for node, amount in connection.execute(query)]
