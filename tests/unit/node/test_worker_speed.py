"""How many slots a worker leases at once: as many as it ends in time, from what it has seen of its own speed.

What breaks here costs a contributor leases that end before their work does, or leaves the machine idle.
"""

from __future__ import annotations

import pytest

from node.worker.speed import Speed


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_one_slot_until_the_speed_is_known_and_then_as_many_as_half_a_lease_takes():
    clock = Clock()
    speed = Speed(clock=clock)
    assert speed.slots_in_time(64, lease_seconds=60.0) == 1
    mark = speed.begin()
    assert speed.seconds_left(mark) is None
    clock.now += 3.0
    assert speed.finish(mark, tokens=90) == pytest.approx(3.0)
    assert speed.slots_in_time(64, lease_seconds=60.0) == 10
    assert speed.slots_in_time(4, lease_seconds=60.0) == 4
    assert speed.slots_in_time(4, lease_seconds=1.0) == 1
    assert speed.tokens == 90


def test_slots_that_share_the_machine_each_count_for_their_share():
    """Ten slots that took 30 s together are 3 s each: as many again fit into a lease, not a tenth of them."""
    clock = Clock()
    speed = Speed(clock=clock)
    marks = [speed.begin() for _ in range(10)]
    clock.now += 30.0
    for mark in marks:
        speed.finish(mark, tokens=10)
    assert speed.slots_in_time(64, lease_seconds=60.0) == 10
    alone = speed.begin()
    assert speed.seconds_left(alone) == pytest.approx(3.0)
    speed.begin()
    assert speed.seconds_left(alone) == pytest.approx(6.0)


def test_a_slow_first_slot_does_not_keep_the_others_away():
    clock = Clock()
    speed = Speed(clock=clock)
    for seconds, fitting in ((40.0, 1), (1.0, 30), (1.0, 30), (15.0, 30), (15.0, 2)):
        mark = speed.begin()
        clock.now += seconds
        speed.finish(mark, tokens=10)
        assert speed.slots_in_time(64, lease_seconds=60.0) == fitting


def test_a_rate_is_of_the_last_seconds():
    clock = Clock()
    speed = Speed(clock=clock)
    clock.now += 60.0
    mark = speed.begin()
    clock.now += 10.0
    speed.finish(mark, tokens=300)
    assert speed.tokens_per_second == pytest.approx(30.0), "the engine's start does not count"
    clock.now += 20.0
    assert speed.tokens_per_second == pytest.approx(10.0)
    clock.now += 11.0
    assert speed.tokens_per_second == 0.0
