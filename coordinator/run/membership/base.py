"""The port of `coordinator.run.membership`, and the policy of a run that names none."""

from __future__ import annotations

import abc

from coordinator.storage.database import Connection
from node.protocol.membership import Puzzle
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal


class MembershipPolicy(abc.ABC):
    """What a key shows to be registered for the first time. Whoever is registered is never asked again."""

    @abc.abstractmethod
    def check(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Raise Refusal unless the new key `node` may register; record what it uses up.

        Called in the transaction that registers the node, with `locks.leasing` held: one key at a time.
        """

    def puzzle(self, _connection: Connection, *, now: float) -> Puzzle:  # noqa: ARG002
        """Return what a new key has to solve; raises Refusal where the run asks for no work."""
        raise Refusal(Reason.NOT_FOUND, "This run asks new keys for no proof of work.")


class OpenMembership(MembershipPolicy):
    """Every key may register."""

    def check(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Refuse nobody."""
