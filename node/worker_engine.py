"""From leases to rollouts: loads the policy, derives prompts and seeds, runs the engine, keeps its speed.

What a slot asks for is computed from the worker's own verified manifest (docs/protocol.md, section 5); a
lease contributes nothing but the slot's number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from node.engines.base import Engine, EngineError, SampleRequest
from node.environments import load_environment
from node.errors import EngineFailed
from node.policy import PolicyError
from node.protocol.messages import Lease
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.verification import expected_of
from node.worker_policies import PolicyFeed

log = logging.getLogger(__name__)

LEASE_SHARE = 0.5
"""Of a lease's time, what a batch may take judging by the last one; the upload needs some, too."""


class SlotGenerator:
    """One engine and what it needs to work on leased slots. `tokens` counts since the start of the process."""

    def __init__(self, engine: Engine, feed: PolicyFeed, *, spec: RunSpec, run_id: str) -> None:
        self.engine = engine
        self.tokens = 0
        self.tokens_per_second = 0.0
        self._feed = feed
        self._spec = spec
        self._run_id = run_id
        self._environments = [load_environment(environment) for environment in spec.environments]
        self._started: float | None = None
        self._last_seconds: float | None = None
        self._seconds_per_slot: float | None = None

    async def groups(self, leases: Sequence[Lease]) -> list[list[Rollout]]:
        """The rollouts of each lease's slot, all in one batch; raises EngineFailed."""
        await self._load(leases[0].version)
        try:
            requests = [request for lease in leases for request in self._requests(lease)]
            self._started = time.monotonic()
            rollouts = await self.engine.generate(requests)
            seconds = time.monotonic() - self._started
        except Exception as error:
            raise EngineFailed(f"The engine failed: {type(error).__name__}: {error}.") from error
        finally:
            self._started = None
        size = self._spec.sampling.group_size
        if len(rollouts) != size * len(leases):
            raise EngineFailed(f"The engine returned {len(rollouts)} rollouts for {size * len(leases)} requests.")
        self._note(leases, rollouts, seconds)
        return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]

    def slots_in_time(self, most: int) -> int:
        """How many slots fit into a share of a lease's time, at most `most`; one until the speed is known."""
        if self._seconds_per_slot is None:
            return 1
        fitting = self._spec.batch.lease_seconds * LEASE_SHARE / max(self._seconds_per_slot, 1e-6)
        return int(max(1, min(most, fitting)))

    def seconds_left(self) -> float | None:
        """Of the batch under way, judging by the last one; None where that is unknown."""
        if self._started is None or self._last_seconds is None:
            return None
        return self._last_seconds - (time.monotonic() - self._started)

    async def _load(self, version: int) -> None:
        if self.engine.version == version:
            return
        held = self._feed.get(version)
        if held is None:
            raise EngineFailed(f"Policy {version} is not on disk any more.")
        try:
            await self.engine.load(held.path, version=version)
        except (PolicyError, EngineError, OSError, MemoryError) as error:
            self._feed.drop(version)
            raise EngineFailed(f"Policy {version} cannot be loaded here: {error}.", code="policy_unusable") from error

    def _requests(self, lease: Lease) -> list[SampleRequest]:
        expected = expected_of(
            self._spec,
            self.engine.policy,
            self._environments,
            run_id=self._run_id,
            manifest_digest=lease.manifest_digest,
            slot=lease.slot,
        )
        return [SampleRequest(prompt_ids=tuple(expected.prompt_ids), seed=seed) for seed in expected.seeds]

    def _note(self, leases: Sequence[Lease], rollouts: Sequence[Rollout], seconds: float) -> None:
        tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        self.tokens += tokens
        self.tokens_per_second = tokens / max(seconds, 1e-6)
        self._last_seconds = seconds
        self._seconds_per_slot = seconds / len(leases)
        slots = ", ".join(str(lease.slot) for lease in leases)
        rate = self.tokens_per_second
        log.info("policy %d, slots %s: %d tokens, %.0f tokens/s", leases[0].version, slots, tokens, rate)
