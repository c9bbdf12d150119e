"""How unlikely it is that what a node withheld has nothing to do with what it was."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import comb, isclose

from node.protocol.withholding import Deliveries, at_least


def exact(count: int, *, of_kind: int, drawn: int, of: int) -> float:
    ways = sum(comb(of_kind, k) * comb(of - of_kind, drawn - k) for k in range(count, min(of_kind, drawn) + 1))
    return float(Fraction(ways, comb(of, drawn)))


def test_the_probability_is_the_hypergeometric_one() -> None:
    for of in (1, 2, 7, 40):
        for of_kind in range(of + 1):
            for drawn in range(of + 1):
                for count in range(min(of_kind, drawn) + 1):
                    wanted = exact(count, of_kind=of_kind, drawn=drawn, of=of)
                    assert isclose(at_least(count, of_kind=of_kind, drawn=drawn, of=of), wanted, rel_tol=1e-9)


def test_a_million_slots_are_counted_without_an_overflow() -> None:
    assert at_least(600, of_kind=500_000, drawn=1000, of=1_000_000) < 1e-9
    assert at_least(500, of_kind=500_000, drawn=1000, of=1_000_000) > 0.5


def test_who_misses_nothing_or_has_one_kind_alone_is_even() -> None:
    assert Deliveries(Counter({0: 50, 1: 50})).unevenness().probability == 1.0
    assert Deliveries(Counter({0: 5}), Counter({0: 5})).unevenness().probability == 1.0


def test_who_misses_one_kind_alone_is_found_with_that_kind() -> None:
    uneven = Deliveries(Counter({0: 20, 1: 10}), Counter({0: 0, 1: 6})).unevenness()
    assert uneven.kind == 1
    assert 1e-4 < uneven.probability < 0.05
