"""Synthetic slots for honest workers and cheats during a calibration."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from node.engines.base import SampleRequest
from node.environments import NO_DATASETS, load_environments
from node.episodes.conversation import graded
from node.episodes.expected import expected_of
from node.policy.file import Blueprint
from node.protocol.run import RunSpec
from node.protocol.slots import slot_problem
from node.protocol.submission import Rollout

RUN_ID = "00" * 32


class SyntheticSlots:
    """Slots of `spec` under a random manifest digest, so that no real slot of a run is revealed."""

    def __init__(self, spec: RunSpec, blueprint: Blueprint, *, datasets: Mapping[str, Path] = NO_DATASETS) -> None:
        self.blueprint = blueprint
        self._spec = spec
        self._environments = load_environments(spec, datasets)
        self._manifest = secrets.token_hex(32)
        self._next = 0

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` new slot numbers."""
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))

    def requests(self, slot: int) -> list[SampleRequest]:
        """Build the requests of a worker that holds `slot`: one prompt, and a seed per group member.

        Of an environment of several turns only the first: rounding does not depend on who spoke before.
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
        """Return the reward of a completion in the slot's environment."""
        drawn = slot_problem(self._spec, run_id=RUN_ID, manifest_digest=self._manifest, slot=slot)
        environment = self._environments[drawn.environment]
        return graded(self.blueprint, environment, environment.problem(drawn.problem), rollout.completion_ids)
