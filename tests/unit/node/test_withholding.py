"""How unlikely it is that what a node withheld has nothing to do with what it was."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from math import comb, isclose

from node.protocol.withholding import EVEN, Deliveries, Unevenness, at_least, corrected


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


def test_holm_multiplies_by_how_many_are_left_and_keeps_the_order() -> None:
    found = {
        "a": Unevenness(0, 0.03),
        "b": Unevenness(1, 0.001),
        "nothing to compare": Unevenness(),
        "c": Unevenness(0, 0.02),
        "d": Unevenness(1, 0.5),
    }
    wanted = {"a": 0.06, "b": 0.004, "nothing to compare": 1.0, "c": 0.06, "d": 0.5}
    assert {key: round(one.probability, 9) for key, one in corrected(found).items()} == wanted
    assert [one.kind for one in corrected(found).values()] == [one.kind for one in found.values()]
    assert corrected({}) == {}


def test_of_a_thousand_honest_nodes_none_looks_guilty_and_a_choosy_one_among_them_does() -> None:
    """One at a time, some of them would be shown with less than 1 in 100, and would lose their good name."""
    draw = random.Random(7)
    nodes = {}
    for node in range(1000):
        slots = [(draw.randrange(3), draw.random() < 0.2) for _ in range(60)]
        delivered = Counter(kind for kind, is_missed in slots if not is_missed)
        nodes[node] = Deliveries(delivered, Counter(kind for kind, is_missed in slots if is_missed)).unevenness()
    assert min(one.probability for one in nodes.values()) < 0.01
    assert min(one.probability for one in corrected(nodes).values()) > EVEN
    nodes[1000] = Deliveries(Counter({0: 60, 1: 60, 2: 40}), Counter({2: 20})).unevenness()
    assert corrected(nodes)[1000].probability < EVEN
