"""One key, one machine: who may work with it, when another one takes over, and what the refused one is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from actors import spec_of
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, update

from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.storage.instances import INSTANCE_SECONDS
from coordinator.storage.schema import nodes
from node.protocol.messages import LeaseRequest, Registration
from node.protocol.reasons import Reason, Refusal

NODE = "ab" * 32
ALPHA, BETA = "0a" * 16, "0b" * 16
NAMES = {ALPHA: "alpha", BETA: "beta"}


@pytest.fixture
def run(tmp_path: Path, database_url: str | None) -> Iterator[Coordinator]:
    key = Ed25519PrivateKey.generate()
    home = create_home(
        tmp_path, public_key=key.public_key().public_bytes_raw(), spec=spec_of(), database_url=database_url
    )
    yield Coordinator(home, key=key)
    home.database.close()


def register(run: Coordinator, instance: str, *, now: float, node: str = NODE) -> None:
    registration = Registration(software="s", engine="e", instance=instance, name=NAMES.get(instance, ""))
    with run.home.database.write() as connection:
        run.register(connection, node, registration, now=now)


def lease(run: Coordinator, instance: str, *, now: float, node: str = NODE) -> None:
    with run.home.database.write() as connection:
        run.lease(connection, node, LeaseRequest(held_versions=(), slots=1, instance=instance), now=now)


def refused(call: Callable[[], None]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


def recorded(run: Coordinator) -> tuple[str, str, float]:
    with run.home.database.read() as connection:
        query = select(nodes.c.instance, nodes.c.instance_name, nodes.c.instance_seen_at)
        return tuple(connection.execute(query.where(nodes.c.node == NODE)).one())  # type: ignore[return-value]


def test_the_second_machine_is_told_which_one_is_first_and_when_it_was_heard(run: Coordinator) -> None:
    register(run, ALPHA, now=1000.0)
    lease(run, ALPHA, now=1030.0)
    for attempt in (register, lease):
        refusal = refused(lambda attempt=attempt: attempt(run, BETA, now=1042.4))
        assert refusal.reason is Reason.KEY_IN_USE
        assert refusal.detail == "This key is at work on alpha, heard 12 s ago."
    assert recorded(run) == (ALPHA, "alpha", 1030.0), "a refused machine changes nothing"
    lease(run, ALPHA, now=1043.0)


def test_a_restart_is_never_refused(run: Coordinator) -> None:
    for now in (1000.0, 1000.5, 1001.0):
        register(run, ALPHA, now=now)
    assert recorded(run)[2] == 1001.0


def test_a_machine_that_was_silent_for_two_minutes_makes_way_and_is_refused_when_it_comes_back(
    run: Coordinator,
) -> None:
    register(run, ALPHA, now=1000.0)
    refused(lambda: register(run, BETA, now=1000.0 + INSTANCE_SECONDS - 0.1))
    register(run, BETA, now=1000.0 + INSTANCE_SECONDS)
    assert recorded(run)[:2] == (BETA, "beta")
    back = refused(lambda: lease(run, ALPHA, now=1000.0 + INSTANCE_SECONDS + 3))
    assert (back.reason, back.detail) == (Reason.KEY_IN_USE, "This key is at work on beta, heard 3 s ago.")


def test_lease_requests_keep_the_place_and_so_does_registering(run: Coordinator) -> None:
    register(run, ALPHA, now=1000.0)
    for act, now in ((lease, 1100.0), (register, 1200.0), (lease, 1300.0)):
        act(run, ALPHA, now=now)
        refused(lambda now=now: register(run, BETA, now=now + 119))


def test_who_takes_a_silent_machines_place_says_its_name_first(run: Coordinator) -> None:
    """Else the next one to be refused would be told the name of a machine that is gone."""
    register(run, ALPHA, now=1000.0)
    assert refused(lambda: lease(run, BETA, now=1200.0)).reason is Reason.UNKNOWN_IDENTITY
    register(run, BETA, now=1201.0)
    lease(run, BETA, now=1202.0)
    assert recorded(run) == (BETA, "beta", 1202.0)


def test_a_machine_that_was_alone_goes_on_after_any_silence(run: Coordinator) -> None:
    """Its network was away for an hour, or the coordinator was."""
    register(run, ALPHA, now=1000.0)
    lease(run, ALPHA, now=5000.0)


def test_a_clock_that_was_ahead_locks_nobody_out(run: Coordinator) -> None:
    register(run, ALPHA, now=90_000.0)
    register(run, BETA, now=1000.0)
    assert recorded(run)[1] == "beta"


def test_nodes_of_an_earlier_release_have_no_machine_and_get_one(run: Coordinator) -> None:
    register(run, ALPHA, now=1000.0)
    with run.home.database.write() as connection:
        connection.execute(update(nodes).values(instance="", instance_name="", instance_seen_at=0.0))
    assert refused(lambda: lease(run, BETA, now=1001.0)).reason is Reason.UNKNOWN_IDENTITY
    register(run, BETA, now=1002.0)
    lease(run, BETA, now=1003.0)


def test_a_key_that_nobody_knows_is_unknown_and_other_keys_are_not_in_the_way(run: Coordinator) -> None:
    assert refused(lambda: lease(run, ALPHA, now=1000.0)).reason is Reason.UNKNOWN_IDENTITY
    register(run, ALPHA, now=1000.0)
    register(run, BETA, now=1000.0, node="cd" * 32)


def test_a_machine_without_a_name_is_another_machine(run: Coordinator) -> None:
    register(run, "0c" * 16, now=1000.0)
    assert "at work on another machine, heard 1 s ago" in refused(lambda: register(run, BETA, now=1001.0)).detail


def test_a_ban_is_what_a_banned_node_hears_on_its_own_machine(run: Coordinator) -> None:
    register(run, ALPHA, now=1000.0)
    with run.home.database.write() as connection:
        connection.execute(update(nodes).values(strikes=10_000))
    assert refused(lambda: lease(run, ALPHA, now=1001.0)).reason is Reason.BANNED
    assert refused(lambda: lease(run, BETA, now=1001.0)).reason is Reason.KEY_IN_USE
