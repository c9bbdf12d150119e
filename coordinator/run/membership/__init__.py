"""Which new keys may register: one port, and one implementation per policy of docs/run-toml.md, [membership]."""

from __future__ import annotations

from typing import assert_never

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UnsetType

from coordinator.run.home import Home
from coordinator.run.membership.base import MembershipPolicy, OpenMembership
from coordinator.run.membership.by_invite import MembershipByInvite
from coordinator.run.membership.by_stake import MembershipByStake
from coordinator.run.membership.by_work import MembershipByWork
from shardcast.wire import derive

__all__ = ["MembershipPolicy", "membership_of"]


def membership_of(home: Home, *, key: Ed25519PrivateKey) -> MembershipPolicy:
    """Return the policy of the run's rules; `key` is the run's, so that its coordinators derive the same secrets."""
    rules = home.spec.membership
    if isinstance(rules, UnsetType):
        return OpenMembership()
    match rules.policy:
        case "invite":
            return MembershipByInvite(run_id=home.run_id, run_key=home.public_key)
        case "stake":
            return MembershipByStake(stake=rules.stake)
        case "work":
            secret = derive("swarmproof/1 puzzle secret", key.private_bytes_raw())
            return MembershipByWork(rules, home.spec, run_id=home.run_id, secret=secret)
        case other:
            assert_never(other)
