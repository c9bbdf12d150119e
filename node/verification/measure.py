"""Measure what a plan asks for: fetch policies, run prefills, ask environments for rewards. Nothing is judged here.

Submissions share forward passes, but neither a refusal nor a failure is anybody's but the submission's own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from node.environments import DatasetChanged, lacks_answers
from node.episodes.conversation import all_graded, turn_rules
from node.episodes.expected import problem_of
from node.errors import EngineFailed
from node.policy.errors import UnreadablePolicy
from node.policy.file import Blueprint
from node.policy.memory import free_memory
from node.policy.reading import OpenPolicy
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.protocol.turns import Replies
from node.submission.reader import VerifierFailed
from node.verification.deviations import RowMeasured, SpanMeasured
from node.verification.plan import Plan
from node.verification.prefill import Prefill
from node.verification.spans import Span, spans_of

logger = logging.getLogger(__name__)


class PolicyUnavailable(VerifierFailed):
    """A policy is unavailable, that of `version` if one is named: no verdict follows."""

    code = "policy_away"

    def __init__(self, message: str, *, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class EngineAway(PolicyUnavailable):
    """The engine could not hold a policy just now, whatever was to be measured: it died, or memory is used up."""

    code = "engine_away"


class DatasetAway(PolicyUnavailable):
    """A dataset of the run was changed on this disk: no verdict follows on what draws from it."""

    code = "dataset_changed"


class Policies(Protocol):
    """Source of a run's policies; every method raises PolicyUnavailable."""

    async def blueprint(self, version: int) -> Blueprint:
        """Return policy `version` without its weights, for the checks that need no model."""

    async def prefill(self, version: int) -> Prefill:
        """Return policy `version`, ready to measure until the next call."""

    async def file(self, version: int) -> OpenPolicy:
        """Return the file of policy `version`, for a second look."""


class Measurement:
    """Several groups of rollouts, which passed `check_rollouts`, on their way through the policies that drew them.

    `rows` are those of each group that are measured, ascending; None for all. `replies` are what `check_rollouts`
    found of each group's rollouts; None where no environment says anything. Call `measure` once for each of
    `versions`, in any order, then `result` for each group.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Rollout]],
        *,
        spec: RunSpec,
        rows: Sequence[Sequence[int]] | None = None,
        replies: Sequence[Sequence[Replies]] | None = None,
    ) -> None:
        chosen = [range(len(group)) for group in groups] if rows is None else rows
        self._groups = [{row: group[row] for row in own} for group, own in zip(groups, chosen, strict=True)]
        self._spec = spec
        self._ended: dict[int, Refusal | VerifierFailed] = {}
        self._measured: dict[tuple[int, int], dict[int, SpanMeasured]] = {}
        self._spans: dict[int, dict[int, list[Span]]] = {}
        for number, group in enumerate(self._groups):
            for row, rollout in group.items():
                inserted = () if replies is None else replies[number][row]
                for version, span in spans_of(rollout, inserted, row=row, chunk_tokens=spec.proofs.chunk_tokens):
                    self._spans.setdefault(version, {}).setdefault(number, []).append(span)

    @property
    def versions(self) -> list[int]:
        """The policies still to be measured under, ascending."""
        return sorted(version for version in self._spans if self.waiting(version))

    def waiting(self, version: int) -> list[int]:
        """Return the groups still to be measured under policy `version`."""
        return [group for group in self._spans.get(version, {}) if group not in self._ended]

    def measure(self, prefill: Prefill, version: int) -> None:
        """Let policy `version` measure what it is said to have drawn; failures are kept for `result`."""
        groups = self.waiting(version)
        spans = self._spans.pop(version)
        try:
            self._measure(prefill, {group: spans[group] for group in groups})
            return
        except VerifierFailed as error:
            if len(groups) == 1 or isinstance(error, PolicyUnavailable):
                for group in groups:
                    self.fail(group, error)
                return
            logger.warning("measuring %d submissions together failed, now one by one: %s", len(groups), error)
        free_memory()  # what failed may have taken all of it, and its frames are gone by now
        for group in groups:
            self._spans[version] = {group: spans[group]}
            self.measure(prefill, version)

    def _measure(self, prefill: Prefill, spans: dict[int, list[Span]]) -> None:
        asked = [(group, span) for group, own in spans.items() for span in own]
        try:
            with as_verifier_failure("the prefill"):
                found = prefill.measure([span for _, span in asked], spec=self._spec)
        except VerifierFailed as error:
            # A policy that is read, or loaded, while it measures: as if it could not have been loaded.
            if isinstance(error.__cause__, UnreadablePolicy):
                raise PolicyUnavailable(str(error)) from error
            if isinstance(error.__cause__, EngineFailed):
                raise EngineAway(str(error.__cause__)) from error.__cause__
            raise
        answers = list(zip(asked, found, strict=True))
        for (group, span), answer in answers:
            if isinstance(answer, Refusal):
                self._ended.setdefault(group, answer)
            else:
                self._measured.setdefault((group, span.row), {})[span.position] = answer

    def fail(self, group: int, error: VerifierFailed) -> None:
        """Give up measuring a group because of a failure on this side."""
        self._ended.setdefault(group, error)

    def result(self, group: int) -> Mapping[int, RowMeasured]:
        """Return a group's measurements by row; raises its Refusal or VerifierFailed."""
        if group in self._ended:
            raise self._ended[group]
        found = {}
        for row, rollout in self._groups[group].items():
            spans = self._measured[group, row]
            found[row] = RowMeasured.of([spans[at] for at in sorted(spans)], rollout.logprobs, limits=self._spec.limits)
        return found


def measure_rewards(plan: Plan) -> tuple[float, ...]:
    """Return the reward of each row, () where their answers are not here; blocks.

    Raises VerifierFailed, and what the environment raises.
    """
    claim, rules = plan.claim, plan.rules
    number, environment, problem = problem_of(
        rules.spec,
        rules.environments,
        run_id=rules.run_id,
        manifest_digest=claim.manifest_digest,
        slot=claim.slot,
        candidate=claim.candidate,
    )
    if lacks_answers(environment):
        return ()
    completions = [rollout.completion_ids for rollout in claim.rollouts]
    own = turn_rules(plan.blueprint, rules.spec, number)
    rewards = tuple(all_graded(plan.blueprint, environment, problem, completions, rules=own))
    for reward in rewards:
        if not 0.0 <= reward <= 1.0:
            raise VerifierFailed(f"the environment {environment.name} gave the reward {reward}")
    return rewards


@contextlib.contextmanager
def as_verifier_failure(what: str) -> Iterator[None]:
    """Convert exceptions of the block into VerifierFailed, except Refusal; DatasetChanged into DatasetAway."""
    try:
        yield
    except (Refusal, VerifierFailed):
        raise
    except DatasetChanged as error:
        raise DatasetAway(str(error)) from error
    except Exception as error:
        raise VerifierFailed(f"{what} failed: {type(error).__name__}: {error}") from error
