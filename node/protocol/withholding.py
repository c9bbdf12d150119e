"""Whether what a node did not deliver depends on what it was (docs/protocol.md, section 7.7).

A node that lets slots go whatever they are for loses time. One that lets go what it dislikes would choose, were it not
for others. The probability says how often an honest node would look as uneven by chance. It is evidence for standing,
never of fraud: long problems may simply be too long for a slow machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

EVEN = 0.05
"""Unevenness that is likelier by chance is not worth showing."""
_RAREST = 1e-9

Key = TypeVar("Key")
Kind = int | bool
"""An environment's number, or whether the group had signal."""


@dataclass(frozen=True, slots=True)
class Unevenness:
    """The kind of which a node withheld most beyond its share, and the probability of that much or more by chance."""

    kind: Kind | None = None
    probability: float = 1.0

    @property
    def odds(self) -> str:
        """Describe the probability to people."""
        return odds(self.probability)


@dataclass(slots=True)
class Deliveries:
    """Slots that one node had and delivered, or did not, by kind."""

    delivered: Counter[Kind] = field(default_factory=Counter)
    missed: Counter[Kind] = field(default_factory=Counter)

    def unevenness(self) -> Unevenness:
        """Test the independence of what was missed from its kind, corrected for the number of kinds (Bonferroni)."""
        kinds = sorted(self.delivered.keys() | self.missed.keys())
        total, missed = self.delivered.total() + self.missed.total(), self.missed.total()
        if len(kinds) < 2 or not missed:
            return Unevenness()
        found = {
            kind: at_least(self.missed[kind], of_kind=self.delivered[kind] + self.missed[kind], drawn=missed, of=total)
            for kind in kinds
        }
        worst = min(found, key=found.__getitem__)
        return Unevenness(worst, min(1.0, found[worst] * len(kinds)))


def corrected(found: Mapping[Key, Unevenness]) -> dict[Key, Unevenness]:
    """Return all that is compared in a run with the probabilities that hold for all of it at once (Holm).

    Such a probability says how often any of so many honest nodes looks as uneven. Uncorrected, one in a thousand of
    them is shown with 1 in 1,000. What cannot be uneven is not counted: a node that missed nothing, or had one kind
    alone.
    """
    compared = [key for key, one in found.items() if one.kind is not None]
    compared.sort(key=lambda key: found[key].probability)
    result, least = dict(found), 0.0
    for rank, key in enumerate(compared):
        least = max(least, min(1.0, found[key].probability * (len(compared) - rank)))
        result[key] = replace(found[key], probability=least)
    return result


def odds(probability: float) -> str:
    """Describe a probability to people: "1 in 4,000"."""
    if probability < _RAREST:
        return f"less than 1 in {1 / _RAREST:,.0f}"
    return f"1 in {1 / probability:,.0f}"


def at_least(count: int, *, of_kind: int, drawn: int, of: int) -> float:
    """Return the hypergeometric probability that of `drawn` from `of` slots at least `count` are of a kind.

    `of_kind` of all are of it.
    """
    largest = min(of_kind, drawn)
    if count <= max(0, drawn - (of - of_kind)):
        return 1.0
    all_ways = _log_choose(of, drawn)
    ways = (
        math.exp(_log_choose(of_kind, hits) + _log_choose(of - of_kind, drawn - hits) - all_ways)
        for hits in range(count, largest + 1)
    )
    return min(1.0, math.fsum(ways))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
