"""Synthetic slots for honest workers and cheats during a calibration."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.engines.base import SampleRequest
from node.environments import NO_DATASETS, load_environments
from node.episodes.conversation import graded, turn_rules
from node.episodes.expected import expected_of
from node.policy.file import Blueprint
from node.protocol.run import RunSpec
from node.protocol.slots import slot_problem
from node.protocol.submission import Rollout
from node.protocol.turns import Replies, TurnRules, replay

RUN_ID = "00" * 32


class SyntheticSlots:
    """Slots of `spec` under a random manifest digest, so that no real slot of a run is revealed."""

    def __init__(self, spec: RunSpec, blueprint: Blueprint, *, datasets: Mapping[str, Path] = NO_DATASETS) -> None:
        self.blueprint = blueprint
        self._spec = spec
        self._environments = load_environments(spec, datasets)
        self._manifest = secrets.token_hex(32)
        self._next = 0
        self._rules: dict[bytes, TurnRules] = {}

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` new slot numbers."""
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))

    def requests(self, slot: int) -> list[SampleRequest]:
        """Build the requests of a worker that holds `slot`: one prompt, and a seed per group member.

        They end as the environment's own rules say, since a level is fitted to the lengths and chunks that workers
        prove. Of an environment of several turns only the first: rounding does not depend on who spoke before.
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
        self._rules |= dict.fromkeys(expected.seeds, expected.rules)
        prompt = tuple(expected.prompt_ids)
        return [SampleRequest(prompt, seed, rules=expected.rules) for seed in expected.seeds]

    def replies(self, rollouts: Sequence[Rollout]) -> list[Replies]:
        """Return what stands between the tokens of rollouts of these slots: the ends of thoughts that were too long."""
        eos_ids, sampling = self.blueprint.eos_ids, self._spec.sampling
        return [
            replay(one.completion_ids, eos_ids=eos_ids, sampling=sampling, rules=self._rules[one.seed]).replies
            for one in rollouts
        ]

    def reward(self, slot: int, rollout: Rollout) -> float:
        """Return the reward of a completion in the slot's environment."""
        drawn = slot_problem(self._spec, run_id=RUN_ID, manifest_digest=self._manifest, slot=slot)
        environment = self._environments[drawn.environment]
        rules = turn_rules(self.blueprint, self._spec, drawn.environment)
        problem = environment.problem(drawn.problem)
        return graded(self.blueprint, environment, problem, rollout.completion_ids, rules=rules)
