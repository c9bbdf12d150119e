"""A run in which everything that may happen happens in any order, for tests of what must hold all the same."""

from __future__ import annotations

import random

from actors import Actors

from node.protocol.admission import Outcome
from node.protocol.reasons import Reason, Refusal

STORMS = [("sqlite", 0), ("sqlite", 1), ("sqlite", 2), ("postgresql", 3)]
"""Databases and seeds: PostgreSQL, whose every statement goes to another process, takes three times as long."""


class Storm:
    """Five workers that are right most of the time, verifiers that die, training: one random event after the other."""

    def __init__(self, actors: Actors, seed: int) -> None:
        self.actors, self.rng = actors, random.Random(seed)
        self.names = [f"n{i}" for i in range(5)]
        self.head, self.training_now, self.held = 0, False, []
        actors.register(*self.names, admitted=0)
        actors.publish(0)

    def step(self) -> None:
        self.actors.now += self.rng.random() * 3
        getattr(
            self, self.rng.choice(["lease", "submit", "submit", "verify", "verify", "verify", "assign", "publish"])
        )()

    def lease(self) -> None:
        name = self.rng.choice(self.names)
        try:
            leases = self.actors.lease(name, held=tuple(range(max(0, self.head - 2), self.head + 1)), count=3)
        except Refusal as refusal:
            assert refusal.reason is Reason.BANNED
            self.names[self.names.index(name)] = name + "+"
            self.actors.register(name + "+", admitted=0)
        else:
            self.held += [(name, lease) for lease in leases]

    def submit(self) -> None:
        if not self.held:
            return
        name, lease = self.held.pop(self.rng.randrange(len(self.held)))
        try:
            self.actors.submit(name, lease.lease_id, draw=self.rng.random())
        except Refusal as refusal:
            assert refusal.reason in (Reason.STALE_POLICY, Reason.EXPIRED_LEASE)

    def verify(self) -> None:
        claimed = self.actors.claim()
        if claimed is not None and self.rng.random() < 0.9:
            weights = [0.5, 0.3, 0.2] if claimed.recheck else [0.93, 0.05, 0.02]
            self.actors.decide(claimed, self.rng.choices(list(Outcome), weights)[0])

    def assign(self) -> None:
        self.training_now = self.training_now or self.actors.assign() is not None

    def publish(self) -> None:
        if self.training_now:
            self.head, self.training_now = self.head + 1, False
            self.actors.publish(self.head)
