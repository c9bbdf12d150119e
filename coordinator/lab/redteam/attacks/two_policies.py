"""Tokens that other policies are said to have drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work
from node.protocol.submission import Rollout

FAR = 1_000_000

Claim = Callable[[int, int], tuple[list[int], list[int]]]
"""From the leased version and a completion's length to segment versions and lengths."""

CLAIMS: dict[str, Claim] = {
    "one that does not exist": lambda version, tokens: ([version + FAR], [tokens]),
    "the next one": lambda version, tokens: ([version + 1], [tokens]),
    "two at once": lambda version, tokens: ([version, version + 1], [1, tokens - 1]),
    "falling": lambda version, tokens: ([version + 1, version], [1, tokens - 1]),
    "the same twice": lambda version, tokens: ([version, version], [1, tokens - 1]),
    "none": lambda _version, _tokens: ([], []),
    "more tokens than there are": lambda version, tokens: ([version], [tokens + 1]),
}


class TwoPolicies(SlotAttack):
    """Two policies for one completion, ones that nobody published, none at all."""

    name = "two-policies"
    about = "says that other policies drew its tokens: two, future ones, none"
    stands_for = "naming policies that do not exist, are older than leased or too new"
    stopped_by = frozenset({"wrong_segments", "wrong_proof_count", "wrong_schema"})

    def __init__(self) -> None:
        self._turn = itertools.cycle(CLAIMS.items())

    async def forge(self, work: Work) -> Forged:
        """One lie after the other, in every row that has tokens enough for it."""
        note, claim = next(self._turn)
        rollouts = [self._claimed(rollout, work.lease.version, claim) for rollout in await work.honest()]
        return submission(rollouts, hostile=rollouts != await work.honest(), note=note)

    def _claimed(self, rollout: Rollout, version: int, claim: Claim) -> Rollout:
        versions, tokens = claim(version, len(rollout.completion_ids))
        if len(tokens) == 2 and tokens[1] < 1:
            return rollout
        return msgspec.structs.replace(rollout, segment_versions=versions, segment_tokens=tokens)
