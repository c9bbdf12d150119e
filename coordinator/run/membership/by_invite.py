"""Membership by invite: the run's key says how many keys may join, until when."""

from __future__ import annotations

from msgspec import UnsetType

from coordinator.run.membership.base import MembershipPolicy
from coordinator.storage import invites
from coordinator.storage.database import Connection
from node.protocol.membership import check_invite, open_invite
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal


class MembershipByInvite(MembershipPolicy):
    """Takes invites of one run's key; how often each was used is counted in the database."""

    def __init__(self, *, run_id: str, run_key: bytes) -> None:
        self._run_id, self._run_key = run_id, run_key

    def check(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Use up one key of the invite; raises Refusal."""
        if isinstance(registration.invite, UnsetType):
            raise Refusal(Reason.INVITE_REQUIRED, f"Node {node[:16]}….")
        invite = open_invite(registration.invite, run_key=self._run_key, run_id=self._run_id)
        check_invite(invite, node=node, used=invites.count_uses(connection, invite.id), now=now)
        invites.use(connection, invite.id, node, now=now)
