"""Check that every slot had the candidate that the run's pools determine (docs/protocol.md, section 5.1)."""

from __future__ import annotations

from msgspec import UnsetType

from node.protocol.messages import VerdictEntry, candidate_of
from node.protocol.pools import PoolHistory, first_candidate, group_mean, has_pools
from node.protocol.run import PoolsSpec, RunSpec
from node.protocol.slots import slot_problem


class PoolChecker:
    """Replays the pools along the verdicts of a log."""

    def __init__(self, *, run_id: str, spec: RunSpec) -> None:
        self._run_id = run_id
        self._spec = spec
        self._history = PoolHistory()

    def contradiction(self, entry: VerdictEntry) -> str | None:
        """Describe how a verdict is on the wrong candidate; None if it is not."""
        named = not isinstance(entry.candidate, UnsetType)
        if named != isinstance(self._spec.batch.pools, PoolsSpec):
            return "It names a candidate in a run without pools." if named else "It names no candidate."
        if not named:
            return None
        wanted = first_candidate(
            self._spec,
            run_id=self._run_id,
            manifest_digest=entry.manifest_digest,
            slot=entry.slot,
            mean_of=lambda problem: self._history.mean_before(problem, entry.version),
        )
        if wanted == entry.candidate:
            return None
        return f"Slot {entry.version}/{entry.slot} is for candidate {wanted}, and {entry.candidate} was given out."

    def follow(self, entry: VerdictEntry, *, head: int) -> None:
        """Record a group that was admitted while `head` was the newest policy."""
        if not isinstance(self._spec.batch.pools, PoolsSpec) or not entry.rewards:
            return
        if not all(0 <= reward <= 1 for reward in entry.rewards):
            return  # a contradiction in itself (8.1), and sums of any size are none
        problem = slot_problem(
            self._spec,
            run_id=self._run_id,
            manifest_digest=entry.manifest_digest,
            slot=entry.slot,
            candidate=candidate_of(entry),
        )
        if has_pools(self._spec, problem.environment):
            self._history.note(problem, group_mean(entry.rewards), head=head)
