"""Blobs that rotted, or that somebody exchanged for others that are whole: `swarmproof check` reads them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select, update
from swarm import Swarm, running

from coordinator.integrity.check import check_state
from coordinator.integrity.differences import Difference
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.schema import groups, submissions
from coordinator.training.groups import decode_group, encode_group
from node.protocol.admission import Outcome


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    """A run with two admitted groups of two nodes, measured and kept by a real verifier."""
    with running(tmp_path_factory.mktemp("run"), tiny_policy_path) as swarm:
        for _ in range(2):
            peer = swarm.peer()
            lease = peer.lease()
            assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED
        yield swarm


def check(swarm: Swarm) -> list[Difference]:
    found: list[Difference] = []
    check_state(swarm.home, (), report=found.append)
    return found


def column(swarm: Swarm, table: object, name: str) -> list[Any]:
    with swarm.home.database.read() as connection:
        return list(connection.execute(select(table.c[name]).order_by(table.c.submission)).scalars())


@contextmanager
def rows_set(swarm: Swarm, table: object, name: str, values: list[Any]) -> Iterator[None]:
    """One column of both rows, as the block has it."""
    keys, before = column(swarm, table, "submission"), column(swarm, table, name)

    def write(these: list[str]) -> None:
        with swarm.home.database.write() as connection:
            for key, value in zip(keys, these, strict=True):
                connection.execute(update(table).where(table.c.submission == key).values({name: value}))

    write(values)
    try:
        yield
    finally:
        write(before)


def test_an_honest_run_has_no_difference(swarm: Swarm) -> None:
    assert check(swarm) == []


@contextmanager
def requests_as_blobs(swarm: Swarm) -> Iterator[None]:
    """The run as of a database whose rows had no requests."""
    requests = column(swarm, submissions, "envelope")
    for request in requests:
        swarm.home.blobs.put(request)
    with rows_set(swarm, submissions, "envelope", [None] * len(requests)):
        yield


def test_a_signed_request_is_served_from_its_row_or_its_blob(swarm: Swarm) -> None:
    """An auditor has to find those of a run that began before rows had them, too."""
    requests, names = column(swarm, submissions, "envelope"), column(swarm, submissions, "request")

    def served() -> list[bytes]:
        return [swarm.peer().send("GET", f"/v1/blobs/{name}").body for name in names]

    assert served() == requests
    assert not any(swarm.home.blobs.path(name).exists() for name in names), "a file for each upload"
    with requests_as_blobs(swarm):
        assert served() == requests
        assert check(swarm) == []


def test_a_request_that_rotted_in_its_row_is_named_and_not_served(swarm: Swarm) -> None:
    name, *_ = column(swarm, submissions, "request")
    first, *others = column(swarm, submissions, "envelope")
    with rows_set(swarm, submissions, "envelope", [first[:-1] + bytes([first[-1] ^ 1]), *others]):
        (found,) = check(swarm)
        assert swarm.peer().send("GET", f"/v1/blobs/{name}").status == 404
    assert (found.table, found.key, found.can_repair) == ("blobs", name, False)


@pytest.mark.parametrize("name", ["body", "evidence"])
@pytest.mark.parametrize("damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), None], ids=["flipped", "gone"])
def test_a_blob_that_rotted_is_named(swarm: Swarm, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    assert_named(swarm, name, damage)


def test_a_request_that_rotted_as_a_blob_is_named(swarm: Swarm) -> None:
    with requests_as_blobs(swarm):
        assert_named(swarm, "request", None)


def assert_named(swarm: Swarm, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    blob = column(swarm, submissions, name)[0]
    blobs = swarm.home.blobs
    assert isinstance(blobs, FolderBlobs)
    path = blobs.path(blob)
    whole = path.read_bytes()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(whole))
    try:
        found = check(swarm)
    finally:
        path.write_bytes(whole)
    assert {(one.table, one.key, one.can_repair) for one in found} >= {("blobs", blob, False)}
    assert ("missing" if damage is None else "damaged") in found[0].stored
    assert f"{name} of submission" in found[0].derived


def test_a_group_that_was_exchanged_for_another_is_named(swarm: Swarm) -> None:
    """Whole, and admitted: only not what this node did in this slot."""
    with rows_set(swarm, groups, "blob", column(swarm, groups, "blob")[::-1]):
        assert [one.stored for one in check(swarm)] == ["other tokens than were submitted"] * 2


def test_a_group_with_other_rewards_is_named(swarm: Swarm) -> None:
    first, second = column(swarm, groups, "blob")
    group = decode_group(swarm.home.blobs.get(first, max_bytes=2**24))
    forged = msgspec.structs.replace(group, rewards=tuple(1.0 - reward / 2 for reward in group.rewards))
    with rows_set(swarm, groups, "blob", [swarm.home.blobs.put(encode_group(forged)), second]):
        (one,) = check(swarm)
    assert one.stored == "another policy or other rewards than were logged"


def test_a_request_that_is_another_nodes_is_named(swarm: Swarm) -> None:
    names, requests = (column(swarm, submissions, name)[::-1] for name in ("request", "envelope"))
    with rows_set(swarm, submissions, "request", names), rows_set(swarm, submissions, "envelope", requests):
        found = check(swarm)
    assert {(one.table, one.column) for one in found} == {("submissions", "request"), ("blobs", "")}
    assert sum("another run's, node's or body's request" in one.stored for one in found) == 2
