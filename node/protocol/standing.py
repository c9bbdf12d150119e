"""What a node's slots so far are worth (docs/protocol.md, section 7.6): how much of the next one is measured, how much
credit it has, and whether it may go on.

Pure, and a function of the log alone: the coordinator follows it as it writes the log, everybody else as they read it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from node.protocol.admission import Outcome
from node.protocol.run import StandingSpec


class CreditedVerdict(Protocol):
    """What credit and standing follow from: these fields of a VerdictEntry."""

    @property
    def submission(self) -> str: ...
    @property
    def outcome(self) -> Outcome: ...
    @property
    def tokens(self) -> int: ...
    @property
    def spot(self) -> int | None: ...
    @property
    def recheck(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """`verified`: fully measured slots that were admitted since the last rejection. `strikes`: rejections since the
    last passed probation."""

    verified: int = 0
    strikes: int = 0

    def after(self, outcome: Outcome, *, full: bool, rules: StandingSpec) -> Standing:
        """Return the standing after one more verdict; `full` says that all rows were measured."""
        if outcome is Outcome.REJECTED:
            return Standing(verified=0, strikes=self.strikes + 1)
        if outcome is Outcome.ADMITTED and full:
            verified = self.verified + 1
            return Standing(verified, strikes=0 if verified == rules.probation else self.strikes)
        return self

    def is_banned(self, rules: StandingSpec) -> bool:
        """Return whether the node gets no more work."""
        return self.strikes >= rules.ban_after

    def word(self, rules: StandingSpec) -> str:
        """Return what people call it: on probation, trusted or banned."""
        if self.is_banned(rules):
            return "banned"
        return "trusted" if self.verified >= rules.probation else "on probation"

    def full_rate(self, rules: StandingSpec) -> float:
        """Return the probability, 0 < p <= 1, with which the next slot is measured in full.

        1 on probation, then probation / verified: after k admitted slots in a row the share of bad ones among them is
        below 3 / k with 95 % confidence (the rule of three), so what may pass unseen stays the same while less is
        looked at. Never below the run's floor.
        """
        if self.verified < rules.probation:
            return 1.0
        return max(rules.full_rate_floor, rules.probation / self.verified)


@dataclass(frozen=True, slots=True)
class Draws:
    """Of slots with a first verdict: how many were measured in full, were to be expected, and the variance of that.

    One that was rejected counts as measured in full unless the verdict says otherwise: which of them were, nobody can
    tell, and if they were left out, bad slots that only a full measurement finds would make an honest coin look loaded.
    """

    full: int = 0
    expected: float = 0.0
    variance: float = 0.0

    @classmethod
    def of(cls, rate: float, *, full: bool) -> Draws:
        """Return the draw of one slot that is measured in full with the probability `rate`."""
        return cls(int(full), rate, rate * (1.0 - rate))

    def __add__(self, other: Draws) -> Draws:
        return Draws(self.full + other.full, self.expected + other.expected, self.variance + other.variance)

    def are_chance(self, *, false_alarms: float) -> bool:
        """Return whether honest draws give so few full measurements with probability above `false_alarms`.

        Freedman's inequality (Ann. Probab. 3, 1975) for the sum of expected less measured, a martingale whose steps
        are at most 1: rates may depend on earlier draws.
        """
        nats = -math.log(false_alarms)
        return self.expected - self.full <= nats / 3 + math.sqrt((nats / 3) ** 2 + 2 * nats * self.variance)


@dataclass(frozen=True, slots=True)
class _Pending:
    tokens: int
    since: int  # how many fully measured slots of the node had been admitted before


@dataclass(slots=True)
class Account:
    """One node's standing and credit, from its verdicts in the order of the log; credit is tokens of admitted groups.

    What was measured in full is the node's at once. What was not is its own after `vesting` more slots that were, or
    when it is measured after all; a rejection voids what is pending until then.
    """

    standing: Standing = Standing()
    vested: int = 0
    void: int = 0
    full: int = 0
    drawn: Draws = Draws()
    _pending: OrderedDict[str, _Pending] = field(default_factory=OrderedDict)  # the longest pending first

    @property
    def pending(self) -> int:
        """Tokens that may still become the node's."""
        return sum(one.tokens for one in self._pending.values())

    @property
    def unvested(self) -> frozenset[str]:
        """The submissions behind `pending`."""
        return frozenset(self._pending)

    def follow(self, entry: CreditedVerdict, *, rules: StandingSpec) -> frozenset[str]:
        """Apply the node's next verdict; return the submissions that must be rechecked because of it."""
        if entry.recheck:
            return self._settle(entry, rules=rules)
        if entry.outcome is not Outcome.INDETERMINATE:
            self.drawn += Draws.of(self.standing.full_rate(rules), full=entry.spot is None)
        if entry.outcome is Outcome.ADMITTED:
            self._admit(entry, rules=rules)
        elif entry.outcome is Outcome.REJECTED:
            self.standing = self.standing.after(entry.outcome, full=False, rules=rules)
            return self._void()
        return frozenset()

    def _admit(self, entry: CreditedVerdict, *, rules: StandingSpec) -> None:
        if entry.spot is not None:
            self._pending[entry.submission] = _Pending(entry.tokens, since=self.full)
            self._pending.move_to_end(entry.submission)
            return
        self.standing = self.standing.after(entry.outcome, full=True, rules=rules)
        self.full += 1
        self.vested += entry.tokens
        while self._pending and self.full - next(iter(self._pending.values())).since >= rules.vesting:
            self.vested += self._pending.popitem(last=False)[1].tokens

    def _settle(self, entry: CreditedVerdict, *, rules: StandingSpec) -> frozenset[str]:
        pending = self._pending.pop(entry.submission, None)
        if entry.outcome is Outcome.ADMITTED:
            self.vested += 0 if pending is None else pending.tokens
            return frozenset()
        self.void += 0 if pending is None else pending.tokens
        if entry.outcome is Outcome.REJECTED:
            self.standing = self.standing.after(entry.outcome, full=True, rules=rules)
            return self._void()
        return frozenset()

    def _void(self) -> frozenset[str]:
        owed = self.unvested
        self.void += self.pending
        self._pending.clear()
        return owed
