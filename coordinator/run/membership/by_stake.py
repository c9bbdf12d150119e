"""Membership by stake: the operator has noted what the node deposited (`swarmproof stakes`)."""

from __future__ import annotations

from coordinator.run.membership.base import MembershipPolicy
from coordinator.storage import stakes
from coordinator.storage.database import Connection
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal


class MembershipByStake(MembershipPolicy):
    """Takes keys for which at least `stake` is noted."""

    def __init__(self, *, stake: int) -> None:
        self._stake = stake

    def check(self, connection: Connection, node: str, _registration: Registration, *, now: float) -> None:  # noqa: ARG002
        """Raise Refusal while less is noted."""
        held = stakes.held(connection, node)
        if held < self._stake:
            raise Refusal(Reason.STAKE_REQUIRED, f"Node {node} has {held} at stake, {self._stake} are asked for.")
