"""Slots that no run has: what honest workers and cheats are asked for while limits are sought."""

from __future__ import annotations

import secrets

from node.conversing import graded
from node.engines.base import SampleRequest
from node.environments import load_environment
from node.policy import Blueprint
from node.protocol.run import RunSpec
from node.protocol.slots import slot_problem
from node.protocol.submission import Rollout
from node.verification import expected_of

RUN_ID = "00" * 32


class Slots:
    """Slots of `spec` under a policy whose manifest has a digest that nobody can foresee: no run's own are used up."""

    def __init__(self, spec: RunSpec, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self._spec = spec
        self._environments = [load_environment(environment) for environment in spec.environments]
        self._manifest = secrets.token_hex(32)
        self._next = 0

    def take(self, count: int) -> list[int]:
        """So many that were not taken before."""
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))

    def requests(self, slot: int) -> list[SampleRequest]:
        """What a worker that holds `slot` asks its engine for: one prompt and a seed for each of the group.

        Of an environment of several turns the first alone: rounding has no part in who spoke before.
        """
        expected = expected_of(
            self._spec,
            self.blueprint,
            self._environments,
            run_id=RUN_ID,
            version=0,
            manifest_digest=self._manifest,
            slot=slot,
        )
        return [SampleRequest(tuple(expected.prompt_ids), seed) for seed in expected.seeds]

    def reward(self, slot: int, rollout: Rollout) -> float:
        """What the slot's environment gives for a completion."""
        drawn = slot_problem(self._spec, run_id=RUN_ID, manifest_digest=self._manifest, slot=slot)
        environment = self._environments[drawn.environment]
        return graded(self.blueprint, environment, environment.problem(drawn.problem), rollout.completion_ids)
