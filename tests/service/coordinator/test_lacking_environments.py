"""A node that lacks an environment works on the others, and gains nothing by saying so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from actors import PUBLIC_KEY, Actors, spec_of

from coordinator.run.home import create_home
from coordinator.run.status import package_rows
from node.protocol.admission import Outcome
from node.protocol.environment_spec import EnvironmentSpec, FileSpec, PackageSpec
from node.protocol.messages import Lease
from node.protocol.slots import slot_problem

PACKAGE = PackageSpec(name="largest", version="1.0", lock=FileSpec(digest="1" * 64, bytes=100))
LARGEST = 1
"""Place of the packaged environment in the run's list."""


@pytest.fixture
def actors(tmp_path: Path, database_url: str | None) -> Iterator[Actors]:
    packaged = EnvironmentSpec(name="largest", package=PACKAGE)
    environments = (EnvironmentSpec(name="arithmetic"), packaged)
    spec = msgspec.structs.replace(spec_of(groups_per_step=6), environments=environments)
    actors = Actors(create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url))
    actors.register("lacking", "whole", *(f"n{i}" for i in range(9)))
    actors.publish(0)
    yield actors
    actors.home.database.close()


def environment_of(actors: Actors, lease: Lease) -> int:
    home = actors.home
    where = {"run_id": home.run_id, "manifest_digest": lease.manifest_digest, "slot": lease.slot}
    return slot_problem(home.spec, **where).environment


def everything(actors: Actors, node: str, **asked: object) -> list[Lease]:
    """What a node is leased until it gets nothing more, judged at once."""
    leased = []
    while leases := actors.lease(node, held=(0,), **asked):
        leased += leases
        for lease in leases:
            actors.submit(node, lease.lease_id)
            assert actors.decide(actors.claim(), Outcome.ADMITTED)
    return leased


def test_a_node_is_leased_only_slots_of_what_it_has_and_others_take_the_rest(actors: Actors) -> None:
    here = everything(actors, "lacking", lacks=(LARGEST,))
    assert here
    assert {environment_of(actors, lease) for lease in here} == {0}
    there = everything(actors, "whole")
    assert LARGEST in {environment_of(actors, lease) for lease in there}
    numbers = sorted(lease.slot for lease in here + there)
    assert numbers == list(range(18)), "no slot is lost: three steps of six groups"


def test_a_node_cannot_have_slots_opened_until_they_are_of_what_it_likes(actors: Actors) -> None:
    for i in range(9):
        everything(actors, f"n{i}", lacks=(LARGEST,))
    opened = [lease.slot for lease in everything(actors, "whole")]
    assert max(opened) < 18, "left-over slots count towards what may be in flight"


def test_nobody_lacks_what_swarmproof_itself_brings(actors: Actors) -> None:
    assert {environment_of(actors, lease) for lease in everything(actors, "lacking", lacks=(0, 7))} == {0, LARGEST}


def test_an_operator_sees_which_environment_fails_how_often(actors: Actors) -> None:
    """A package that dies on a verifier costs work and nobody's name: someone has to notice."""
    failed = Counter[bool]()
    while leases := actors.lease("whole", held=(0,)):
        for lease in leases:
            is_packaged = environment_of(actors, lease) == LARGEST
            failed[is_packaged] += 1
            actors.submit("whole", lease.lease_id)
            outcome = Outcome.INDETERMINATE if is_packaged and failed[True] == 1 else Outcome.ADMITTED
            while (claimed := actors.claim()) is not None:  # what failed is tried again
                assert actors.decide(claimed, outcome)
    with actors.home.database.read() as connection:
        (row,) = package_rows(connection, actors.home.spec)
    assert (row["environment"], row["package"], row["version"]) == ("largest", "largest", "1.0")
    assert (row["judged"], row["undecided"]) == (failed[True], 1)
