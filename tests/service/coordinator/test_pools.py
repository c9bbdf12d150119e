"""Pools as the database keeps them: what the log says of them, whoever is restarted when, and on either database."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from actors import PUBLIC_KEY, Actors, spec_of
from prometheus_client import CollectorRegistry
from sqlalchemy import update

from coordinator.metrics.run import RunCollector
from coordinator.run.home import create_home, open_home
from coordinator.storage import pools
from coordinator.storage.schema import problem_means, slots
from node.protocol.admission import Outcome
from node.protocol.messages import VerdictEntry, candidate_of
from node.protocol.pools import Pool, group_mean, pool_of
from node.protocol.run import EnvironmentSpec, PoolsSpec, ProblemsSpec, RunSpec
from node.protocol.slots import MOST_CANDIDATES, slot_problem

EASY, NORMAL, HARD = 1.0, 0.5, 0.0
RULES = PoolsSpec(easy=1, normal=2, hard=1, easy_from=0.55, hard_to=0.45)
"""A group's mean is 0.5625, 0.5 or 0.4375, as its best reward is one of the three."""


def pooled_spec() -> RunSpec:
    finite = EnvironmentSpec(name="arithmetic", weight=3, problems=ProblemsSpec(count=12))
    spec = spec_of(groups_per_step=6, max_async=1)
    batch = msgspec.structs.replace(spec.batch, pools=RULES)
    return msgspec.structs.replace(spec, environments=(finite, EnvironmentSpec(name="reverse")), batch=batch)


def begin(folder: Path, database_url: str | None) -> Actors:
    actors = Actors(create_home(folder, public_key=PUBLIC_KEY, spec=pooled_spec(), database_url=database_url))
    actors.register("a")
    return actors


def restarted(actors: Actors) -> Actors:
    """Every process anew, on the same data."""
    home = actors.home
    home.database.close()
    again = Actors(open_home(home.folder))
    again.now, again.files = actors.now, actors.files
    return again


def submitted(actors: Actors, version: int) -> tuple[int, object]:
    """A slot of `version`, and its submission in a verifier's hands."""
    (lease,) = actors.lease("a", held=(version,))
    actors.submit("a", lease.lease_id)
    return lease.slot, actors.claim()


def run(actors: Actors, steps: int, *, restarts: bool = False) -> Actors:
    """Steps of six groups each; the verdict on a seventh comes when the next policy is there already."""
    late = None
    for version in range(steps):
        actors.publish(version)
        if late is not None:
            assert actors.decide(late, Outcome.ADMITTED, best=EASY)
        for _ in range(6 if late is None else 5):
            actors = restarted(actors) if restarts else actors
            slot, claimed = submitted(actors, version)
            assert actors.decide(claimed, Outcome.ADMITTED, best=(EASY, NORMAL, HARD)[slot % 3])
        _, late = submitted(actors, version)
        assert actors.assign() == version
    return actors


def given_out(actors: Actors) -> list[tuple[int, int, int]]:
    """(version, slot, candidate) of every verdict."""
    entries = [entry for entry in actors.entries() if isinstance(entry, VerdictEntry)]
    return [(entry.version, entry.slot, candidate_of(entry)) for entry in entries]


def test_what_is_given_out_is_what_an_auditor_derives_from_the_log(tmp_path: Path, database_url: str | None) -> None:
    """Else an honest coordinator would be called a liar."""
    actors = run(begin(tmp_path, database_url), 8)
    assert actors.reading().problems == []
    assert len({candidate for _, _, candidate in given_out(actors)}) > 3, "hardly a slot went past its first candidate"
    actors.home.database.close()


def test_an_operator_sees_how_large_the_pools_are(tmp_path: Path, database_url: str | None) -> None:
    actors = run(begin(tmp_path, database_url), 4)
    last: dict[int, float] = {}
    for entry in actors.entries():
        if isinstance(entry, VerdictEntry):
            drawn = slot_problem(
                actors.home.spec,
                run_id=actors.home.run_id,
                manifest_digest=entry.manifest_digest,
                slot=entry.slot,
                candidate=candidate_of(entry),
            )
            if drawn.environment == 0:
                last[drawn.problem] = group_mean(entry.rewards or ())
    seen = Counter(pool_of(mean, RULES) for mean in last.values())
    wanted = {"easy": seen[Pool.EASY], "normal": 12 - seen[Pool.EASY] - seen[Pool.HARD], "hard": seen[Pool.HARD]}
    registry = CollectorRegistry()
    registry.register(RunCollector(actors.home))
    shown = {pool: registry.get_sample_value("swarmproof_problems", {"pool": pool}) for pool in wanted}
    assert shown == wanted
    assert wanted["normal"] < 12
    actors.home.database.close()


def test_a_restart_changes_no_slots_problem(tmp_path: Path) -> None:
    """Pools are in the database: in a process's memory, they would be other ones after it was killed."""
    plain, killed = (run(begin(tmp_path / name, None), 5, restarts=name == "killed") for name in ("plain", "killed"))
    assert given_out(plain) == given_out(killed)
    for actors in (plain, killed):
        actors.home.database.close()


def test_a_slot_that_lapses_goes_on_with_the_problem_that_it_had(tmp_path: Path, database_url: str | None) -> None:
    """Else whoever lets leases lapse until the pools have changed would choose among problems."""
    actors = run(begin(tmp_path, database_url), 3)
    actors.register("b")
    actors.publish(3)
    (lease,) = actors.lease("b", held=(3,))
    for best in (EASY, HARD, EASY):
        _, claimed = submitted(actors, 3)
        actors.decide(claimed, Outcome.ADMITTED, best=best)
    actors.now += 60
    (again,) = actors.lease("a", held=(3,))
    assert (again.slot, again.candidate) == (lease.slot, lease.candidate)
    actors.home.database.close()


def test_a_coordinator_that_gives_out_a_favourite_is_seen_in_its_log(tmp_path: Path) -> None:
    actors = run(begin(tmp_path, None), 2)
    actors.publish(2)
    (lease,) = actors.lease("a", held=(2,))
    favourite = (candidate_of(lease) + 1) % MOST_CANDIDATES
    with actors.home.database.write() as connection:
        row = update(slots).where(slots.c.version == 2, slots.c.number == lease.slot)
        connection.execute(row.values(candidate=favourite))
    actors.submit("a", lease.lease_id)
    while (claimed := actors.claim()) is not None:
        actors.decide(claimed, Outcome.ADMITTED)
    assert [problem.code for problem in actors.reading().problems] == ["wrong_pool"]
    actors.home.database.close()


def test_no_slot_of_a_policy_is_opened_by_the_pools_of_a_later_one(tmp_path: Path) -> None:
    """On PostgreSQL a policy and a verdict may come while a lease is made: what the pools were is not known then."""
    actors = run(begin(tmp_path, None), 2)
    where = {"spec": actors.home.spec, "version": 1, "manifest_digest": f"{1:064x}"}
    with actors.home.database.write() as connection:
        connection.execute(update(problem_means).values(head=2))
        with pytest.raises(pools.HeadMoved):
            for number in range(100, 120):
                pools.slot_columns(connection, **where, number=number)
    actors.home.database.close()


def test_a_run_without_pools_names_no_candidate(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(pooled_spec(), batch=spec_of().batch)
    actors = Actors(create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec))
    actors.register("a")
    actors.publish(0)
    (lease,) = actors.lease("a", held=(0,))
    assert lease.candidate is msgspec.UNSET
    actors.submit("a", lease.lease_id)
    actors.decide(actors.claim(), Outcome.ADMITTED)
    assert actors.reading().problems == []
    actors.home.database.close()
