"""An operator's clock that jumps by an hour, as a wrong time server has it, and is set right again.

The run would stand still for that hour: nodes would wait out what was reckoned by the other clock, slots would stay
with workers that are gone, and submissions with verifiers that have left them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import select

from coordinator.run.home import create_home
from coordinator.storage import verdicts
from coordinator.storage.schema import nodes

HOUR = 3600


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[Actors]:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of())
    actors = Actors(home)
    actors.register("a", "b")
    actors.publish(0)
    yield actors
    home.database.close()


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_no_node_waits_out_an_hour_that_never_was(actors: Actors, jump: int) -> None:
    actors.lease("a", held=(0,))
    actors.now += max(jump, 0)
    if jump < 0:
        actors.now += 51
    assert actors.lease("b", held=(0,)), "whoever asks next ends the lease, and its node is to wait"
    actors.now -= HOUR
    assert actors.lease("a", held=(0,))


def test_a_slot_that_was_leased_in_the_future_is_given_out_again(actors: Actors) -> None:
    actors.now += HOUR
    taken = [lease.slot for lease in actors.lease("a", held=(0,), count=3)]
    actors.now -= HOUR
    assert [lease.slot for lease in actors.lease("b", held=(0,), count=3)] == taken


@pytest.mark.parametrize("ended", ["returned", "lapsed"])
def test_a_slot_that_was_given_up_in_the_future_goes_to_its_network_again(actors: Actors, ended: str) -> None:
    """Where all workers are of one network, nobody else is there to take it."""
    (lease,) = actors.lease("a", held=(0,), address="192.168.1.0")
    if ended == "returned":
        actors.now += 40
        actors.give_back("a", lease)
    else:
        actors.now += HOUR
        actors.lease("b", held=(0,), address="192.168.1.0")
        actors.now -= HOUR
    actors.now -= 30
    actors.register("c")
    again = [one.slot for one in actors.lease("c", held=(0,), count=3, address="192.168.1.0")]
    assert lease.slot in again


def test_a_lease_survives_a_clock_that_is_set_back_by_a_moment(actors: Actors) -> None:
    (lease,) = actors.lease("a", held=(0,))
    actors.now -= 2
    actors.lease("b", held=(0,))
    actors.submit("a", lease.lease_id)


def test_no_node_pays_for_a_lease_that_ends_because_the_clock_was_set_right(actors: Actors) -> None:
    """All that were leased meanwhile end at once: their nodes would all wait, and all count as newcomers."""
    actors.now += HOUR
    actors.lease("a", held=(0,))
    actors.now -= HOUR
    assert actors.lease("b", held=(0,)), "whoever asks next ends the lease"
    assert actors.lease("a", held=(0,)), "it kept its time"
    with actors.home.database.read() as connection:
        streak = connection.execute(select(nodes.c.rejected_streak).where(nodes.c.node == who("a"))).scalar()
    assert streak == 0


def test_a_submission_that_was_claimed_in_the_future_is_claimed_again(actors: Actors) -> None:
    (lease,) = actors.lease("a", held=(0,))
    name = actors.submit("a", lease.lease_id)
    actors.now += HOUR
    claimed = actors.claim("first")
    assert claimed is not None
    with actors.home.database.write() as connection:
        verdicts.defer(connection, claimed, until=actors.now + 1)
    actors.now -= HOUR
    again = actors.claim("second")
    assert again is not None
    assert again.submission == name
