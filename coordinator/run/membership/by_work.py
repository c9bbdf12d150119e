"""Membership by proof of work, whose price rises with the newcomers that wait for slots.

Nothing is kept for those who only ask: a puzzle's salt follows from a secret and the time, the same at each
coordinator, and the price from the nodes that have paid. So asking raises the price for nobody.
"""

from __future__ import annotations

from typing import Final

from msgspec import UnsetType

from coordinator.run.membership.base import MembershipPolicy
from coordinator.storage import newcomers, nodes
from coordinator.storage.database import Connection
from node.protocol.membership import MembershipSpec, ProofOfWork, Puzzle, price_bits, work_bits, work_seed
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from shardcast.wire import derive

SALT_SECONDS: Final = 600
"""A salt is told for so long, and taken for as long again: 600 to 1200 s to solve what takes 56 s at 26 bits."""

WAITING_SECONDS: Final = 60.0
"""Who asked within the last minute waits for a slot; a worker asks every minute at least."""


class MembershipByWork(MembershipPolicy):
    """Takes keys with a proof of work of today's price; see `price_bits`."""

    def __init__(self, rules: MembershipSpec, spec: RunSpec, *, run_id: str, secret: bytes) -> None:
        self._rules, self._spec, self._run_id, self._secret = rules, spec, run_id, secret

    def puzzle(self, connection: Connection, *, now: float) -> Puzzle:
        """Return the current puzzle; it is the same for all keys."""
        window = int(now) // SALT_SECONDS
        expires_at = (window + 2) * SALT_SECONDS
        return Puzzle(salt=self._salt(window), bits=self._price(connection, now=now), expires_at=expires_at)

    def check(self, connection: Connection, node: str, registration: Registration, *, now: float) -> None:
        """Raise Refusal without a proof of work for this key, a salt that still holds, and the current price."""
        proof = registration.work
        if isinstance(proof, UnsetType):
            raise Refusal(Reason.WORK_REQUIRED, f"Node {node[:16]}… sent none.")
        if not self._holds(proof, now=now):
            raise Refusal(Reason.WORK_REQUIRED, "The puzzle's time is over, or it is not this run's.")
        done = work_bits(work_seed(run_id=self._run_id, node=node, salt=proof.salt), proof.counter)
        # Two hashes before anything is counted.
        owed = self._rules.bits if done < self._rules.bits else self._price(connection, now=now)
        if done < owed:
            raise Refusal(Reason.WORK_REQUIRED, f"It has {done} bits for this key, {owed} or more are owed.")

    def _holds(self, proof: ProofOfWork, *, now: float) -> bool:
        window = int(now) // SALT_SECONDS
        return proof.salt in (self._salt(window), self._salt(window - 1))

    def _salt(self, window: int) -> str:
        return derive("swarmproof/1 puzzle salt", self._secret, window.to_bytes(8, "big", signed=True)).hex()

    def _price(self, connection: Connection, *, now: float) -> int:
        waiting = nodes.count_unproven_seen_since(connection, now - WAITING_SECONDS)
        return price_bits(self._rules, waiting=waiting, capacity=newcomers.capacity(connection, self._spec))
