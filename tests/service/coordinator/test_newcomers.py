"""Thousands of nodes at once, all of them new: no lease waits for what each of them has, and the limits hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from actors import PUBLIC_KEY, Actors, spec_of
from sqlalchemy import func, select

from coordinator.run.home import create_home
from coordinator.storage import newcomers
from coordinator.storage.schema import LeaseState, leases
from node.protocol.admission import Outcome

NODES = 60
SHARE = 30
"""Half of the capacity of three steps' groups."""


@pytest.fixture
def actors(tmp_path: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    """Sixty new nodes, and a count of more than two rows that is kept for a second a row."""
    monkeypatch.setattr(newcomers, "FEW", 2)
    monkeypatch.setattr(newcomers, "SECONDS_EACH", 1.0)
    spec = spec_of(groups_per_step=20)
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url)
    actors = Actors(home)
    actors.register(*map(str, range(NODES)), admitted=0)
    actors.publish(0)
    yield actors
    home.database.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A one for each count of all that is in flight."""
    counts, rows = list[int](), newcomers._COUNT.rows
    monkeypatch.setattr(newcomers._COUNT, "rows", lambda *given: counts.append(1) or rows(*given))
    return counts


def ask(actors: Actors, *, place: Callable[[int], str] = "10.{}.0.1".format) -> list[tuple[str, Any]]:
    """The leases that all get who ask for one."""
    return [
        (str(node), lease) for node in range(NODES) for lease in actors.lease(str(node), held=(0,), address=place(node))
    ]


def test_attack_any_number_of_new_keys_at_once_hold_half_of_the_slots_at_most(
    actors: Actors, counted: list[int]
) -> None:
    assert len(ask(actors)) == SHARE
    assert len(counted) < 6, "not for each of them"
    assert ask(actors) == []


def test_attack_any_number_of_new_keys_of_one_place_leave_others_their_share(
    actors: Actors, counted: list[int]
) -> None:
    held = len(ask(actors, place=lambda node: f"10.0.0.{node}"))
    assert held <= 3 * (SHARE - held + 1)
    assert len(counted) < 6
    assert len(ask(actors)) > 0, "from elsewhere"


def test_what_new_nodes_gave_back_or_were_admitted_for_is_given_out_again_a_little_later(actors: Actors) -> None:
    given = ask(actors)
    for node, lease in given[:4]:
        actors.give_back(node, lease)
    for node, lease in given[4:10]:
        actors.submit(node, lease.lease_id)
        assert actors.decide(actors.claim(), Outcome.ADMITTED)
    assert actors.lease("59", held=(0,)) == [], "as far as is known"
    actors.now += SHARE
    again = [lease for node in range(SHARE, NODES) for lease in actors.lease(str(node), held=(0,))]
    assert len(again) == 10


def test_a_clock_that_is_set_back_keeps_no_count_for_ever(actors: Actors) -> None:
    given = ask(actors)
    actors.now -= 10
    actors.give_back(*given[0])
    assert len(actors.lease("59", held=(0,))) == 1


def test_leases_that_lapse_all_at_once_hold_up_no_request_for_all_of_them(
    tmp_path: Path, database_url: str | None
) -> None:
    """After an outage a coordinator would answer nobody while it ends thousands."""
    spec = spec_of(groups_per_step=40)
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url)
    actors = Actors(home)
    actors.register(*map(str, range(NODES)))
    actors.publish(0)
    held = sum(len(actors.lease(str(node), held=(0,), count=3)) for node in range(NODES))
    actors.now += spec.batch.lease_seconds + 1
    active = select(func.count()).where(leases.c.state == LeaseState.ACTIVE)
    for _ in range(held // 64 + 1):
        with home.database.read() as connection:
            before = connection.execute(active).scalar_one()
        given = len(actors.lease("0", held=(0,)))
        with home.database.read() as connection:
            assert connection.execute(active).scalar_one() >= before + given - 64
    with home.database.write() as connection:
        overdue = connection.execute(active.where(leases.c.expires_at <= actors.now)).scalar_one()
    assert overdue == 0
    home.database.close()


@pytest.mark.parametrize("is_kept", [False, True])
def test_attack_new_keys_that_move_on_with_their_slots_leave_others_their_share(
    actors: Actors, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that gets nothing could say that its node, slots and all, is now somewhere else."""
    if not is_kept:
        monkeypatch.setattr(newcomers, "FEW", 1000)
    held = 0
    for node in range(NODES):
        held += len(actors.lease(str(node), held=(0,), address="10.0.0.1"))
        actors.lease(str(node), held=(0,), address="10.9.0.1")
        actors.now += 0.1
    assert held <= 3 * (SHARE - held + 1)


def test_attack_keys_of_one_address_that_move_on_with_their_leases_hold_as_many_as_before(actors: Actors) -> None:
    held = [actors.lease(str(node), held=(0,), address="10.0.0.1", most=2) for node in range(2)]
    assert [len(each) for each in held] == [1, 1]
    for node in range(2):
        actors.lease(str(node), held=(0,), address="10.9.0.1", most=2)
    assert actors.lease("2", held=(0,), address="10.0.0.1", most=2) == []
    assert len(actors.lease("3", held=(0,), address="10.9.0.1", most=2)) == 1
    actors.give_back("0", *held[0])
    assert len(actors.lease("4", held=(0,), address="10.0.0.1", most=2)) == 1
