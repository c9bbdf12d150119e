"""State beside the log that somebody changed, that rotted, or that is of another day: `swarmproof check` names it.

The log is right, and every auditor agrees with it; but training, receipts and the page read tables and blobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import delete, func, insert, select, update
from storm import Storm
from swarm import RUN_KEY

from coordinator.integrity.check import check_state
from coordinator.integrity.differences import Difference
from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.storage import log
from coordinator.storage.log_tree import LogTree
from coordinator.storage.schema import (
    deliveries,
    final_counts,
    groups,
    log_entries,
    log_nodes,
    nodes,
    policies,
    problem_means,
    rejections,
    slots,
    steps,
    submissions,
    verdict_tallies,
)
from coordinator.storage.verdicts import QueueItem
from node.protocol.admission import Outcome
from node.protocol.run import EnvironmentSpec, PoolsSpec, ProblemsSpec, StandingSpec

RULES = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=3)


def check(actors: Actors, *states: Path, repair: bool = False) -> list[Difference]:
    found: list[Difference] = []
    check_state(actors.home, states, repair=repair, with_blobs=False, report=found.append)
    # The policies here have no manifest.
    return [one for one in found if (one.table, one.column) != ("policies", "manifest")]


@pytest.mark.parametrize(
    ("database_url", "seed"), [("sqlite", 0), ("sqlite", 4), ("postgresql", 1)], indirect=["database_url"]
)
def test_in_any_order_of_events_the_tables_are_what_the_log_says(
    tmp_path: Path, database_url: str | None, seed: int
) -> None:
    """Else every operator would be told of differences that nobody made, and repair what is right."""
    spec = spec_of(standing=RULES, groups_per_step=4, steps=8)
    actors = Actors(create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url))
    storm = Storm(actors, seed)
    events = 0
    while storm.head < 8:
        storm.step()
        events += 1
        if events % 150 == 0:
            assert check(actors) == []
    assert check(actors) == []
    actors.home.database.close()


@pytest.fixture
def actors(tmp_path: Path, database_url: str | None) -> Iterator[Actors]:
    """A run whose log has 20 entries or so, of which the checkpoint is kept, as after `GET /v1/log/checkpoint`."""
    actors = Actors(
        create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=spec_of(standing=RULES), database_url=database_url)
    )
    actors.register("a", "b", admitted=0)
    actors.publish(0)
    for _ in range(4):
        actors.work("a")
    actors.work("b", Outcome.REJECTED)
    assert actors.assign() == 0
    actors.publish(1)
    actors.work("b")
    Coordinator(actors.home, key=RUN_KEY).checkpoint()
    yield actors
    actors.home.database.close()


def change(actors: Actors, *statements: Any) -> None:
    with actors.home.database.write() as connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0, statement


NODE_A = nodes.c.node == who("a")
OF_A = submissions.c.node == who("a")
CHANGES: dict[str, tuple[Any, str, str]] = {
    "an outcome": (
        update(submissions).where(submissions.c.outcome == "rejected").values(outcome="admitted", reason=None),
        "submissions",
        "outcome",
    ),
    "tokens": (update(submissions).where(OF_A).values(tokens=99), "submissions", "tokens"),
    "another's request": (update(submissions).where(OF_A).values(request="ab" * 32), "submissions", "request"),
    "credit": (update(nodes).where(NODE_A).values(tokens=10**6), "nodes", "tokens"),
    "a ban that never was": (update(nodes).where(NODE_A).values(strikes=7), "nodes", "strikes"),
    "drift forgotten": (update(nodes).where(NODE_A).values(drift=None), "nodes", "drift"),
    "another policy file": (update(policies).values(result_digest="cd" * 32), "policies", "result_digest"),
    "a group trained on again": (update(groups).values(step=None), "groups", "step"),
    "a reward": (update(groups).values(reward_mean=1.0), "groups", "reward_mean"),
    "a slot leased again": (update(slots).where(slots.c.state == "used").values(state="open"), "slots", "state"),
    "a step not trained": (update(steps).values(finished_at=None), "steps", "finished_at"),
    "counters": (update(verdict_tallies).values(verdicts=77), "verdict_tallies", "verdicts"),
    "counters gone": (delete(verdict_tallies), "verdict_tallies", ""),
    "a rejection forgotten": (delete(rejections), "rejections", ""),
    "slots counted wrong": (update(final_counts).values(number=99), "final_counts", "number"),
    "a tree node": (update(log_nodes).where(log_nodes.c.level == 1).values(hash=b"\x07" * 32), "log_nodes", "hash"),
    "tree nodes gone": (delete(log_nodes).where(log_nodes.c.level == 0), "log_nodes", "hash"),
    "a tree node too many": (insert(log_nodes).values(level=3, index=9, hash=b"\x07" * 32), "log_nodes", ""),
    "a slot held for a group that is not": (
        update(slots).where(slots.c.id.not_in(select(groups.c.slot_id))).values(state="admitted"),
        "slots",
        "state",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_changed_value_is_named_and_repaired(actors: Actors, name: str) -> None:
    statement, table, column = CHANGES[name]
    assert check(actors) == []
    change(actors, statement)
    found = check(actors)
    assert {(one.table, one.column) for one in found} >= {(table, column)}
    assert all(one.can_repair for one in found), found
    assert check(actors) == found, "looking changes nothing"
    assert check(actors, repair=True) == found
    assert check(actors) == []


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_everything_changed_at_once_is_repaired_on_postgresql(actors: Actors) -> None:
    change(actors, *(statement for statement, _, _ in CHANGES.values()))
    assert {one.table for one in check(actors, repair=True)} == {table for _, table, _ in CHANGES.values()}
    assert check(actors) == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_verdict_that_the_log_does_not_have_is_taken_back(actors: Actors) -> None:
    """Somebody's submission was admitted in the table alone, with a group for training."""
    (lease,) = actors.lease("b", held=(1,))
    name = actors.submit("b", lease.lease_id)
    slot = select(submissions.c.slot_id).where(submissions.c.submission == name).scalar_subquery()
    forged = update(submissions).where(submissions.c.submission == name)
    change(
        actors,
        forged.values(state="done", outcome="admitted", tokens=5, log_index=3, decided_at=1.0),
        insert(groups).values(slot_id=slot, submission=name, blob="ab" * 32, reward_mean=1.0, signal=True),
        update(slots).where(slots.c.id == slot).values(state="admitted"),
    )
    found = check(actors, repair=True)
    assert [(one.table, one.stored) for one in found] == [
        ("submissions", "a verdict"),
        ("groups", "a row"),
        ("slots", "admitted"),
    ]
    assert check(actors) == []
    claimed = actors.claim()
    assert claimed is not None
    assert claimed.submission == name
    assert actors.decide(claimed, Outcome.ADMITTED)
    assert check(actors) == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_slot_held_for_no_group_until_its_policy_is_too_old_is_not_given_out_again(actors: Actors) -> None:
    """Whoever worked on it would be told that the policy is stale, and training would wait for the slot."""
    held = select(slots.c.id).where(slots.c.state == "open", slots.c.version == 0)
    change(actors, update(slots).where(slots.c.id.in_(held.scalar_subquery())).values(state="admitted"))
    for version in (2, 3):
        while actors.assign() is None:
            actors.work("a")
        actors.publish(version)
    assert [(one.table, one.stored, one.derived) for one in check(actors, repair=True)] == [
        ("slots", "admitted", "stale")
    ]
    assert check(actors) == []


def test_what_a_node_withheld_cannot_be_changed_unnoticed(actors: Actors) -> None:
    """A node that had the counts of its missed slots changed would look even."""
    with actors.home.database.read() as connection:
        assert connection.execute(select(deliveries)).first() is not None, "a step was taken"
    forged = {"node": who("b"), "environment": 7, "signal": 1, "delivered": 0, "missed": 50}
    change(actors, update(deliveries).values(delivered=99), insert(deliveries).values(forged))
    found = check(actors, repair=True)
    assert {(one.table, one.stored) for one in found} == {("deliveries", "99"), ("deliveries", "a row")}
    assert check(actors) == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("with_tree", [False, True], ids=["leaf", "leaf and tree"])
def test_a_changed_leaf_is_named_and_nothing_is_derived_from_it(actors: Actors, with_tree: bool) -> None:
    """With --repair, too: a forged log must not be written into every table."""
    with actors.home.database.write() as connection:
        leaf = bytes(connection.execute(select(log_entries.c.leaf).where(log_entries.c.index == 2)).scalar_one())
        forged = leaf.replace(b'"tokens":5', b'"tokens":6')
        connection.execute(update(log_entries).where(log_entries.c.index == 2).values(leaf=forged))
        if with_tree:
            tree = LogTree()
            every = connection.execute(select(log_entries.c.leaf).order_by(log_entries.c.index)).scalars().all()
            derived = [node for each in every for node in tree.append(bytes(each))]
            connection.execute(delete(log_nodes))
            log.add_nodes(connection, derived)
    found = check(actors, repair=True)
    assert ("log_entries", "2") in {(one.table, one.key) for one in found} or with_tree
    assert any(one.table == "log" and "log.checkpoint" in one.key for one in found)
    assert found[-1].table == "all other tables"
    assert not any(one.can_repair for one in found)
    with actors.home.database.read() as connection:
        tokens = connection.execute(select(submissions.c.tokens).where(submissions.c.log_index == 2)).scalar_one()
    assert tokens == 5


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_lost_leaf_is_named(actors: Actors) -> None:
    change(actors, delete(log_entries).where(log_entries.c.index == 3))
    assert [(one.table, one.key) for one in check(actors)] == [("log_entries", "3"), ("all other tables", "")]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_lost_row_that_the_log_cannot_give_back_is_named_as_such_and_nothing_is_made_up(actors: Actors) -> None:
    """Of a group the log has the rewards, not the blob: its slot stays used all the same."""
    change(actors, delete(groups).where(groups.c.step == 0))
    found = check(actors, repair=True)
    assert {(one.table, one.stored, one.derived, one.can_repair) for one in found} == {
        ("groups", "nothing", "a row", False)
    }
    assert check(actors) == found


class _Varied(Actors):
    """Groups with signal and without."""

    def decide(self, claimed: QueueItem, outcome: Outcome, *, best: float = 0.5) -> bool:
        return super().decide(claimed, outcome, best=(0.5, 1.0, 0.0)[claimed.slot % 3])


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_pools_and_groups_without_signal_are_followed_too(tmp_path: Path, database_url: str | None) -> None:
    finite = EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=5))
    spec = spec_of(standing=RULES, groups_per_step=2, steps=6)
    batch = msgspec.structs.replace(spec.batch, only_signal=True, pools=PoolsSpec())
    spec = msgspec.structs.replace(spec, batch=batch, environments=(finite,))
    actors = _Varied(create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec, database_url=database_url))
    storm = Storm(actors, 3)
    for _ in range(700):
        storm.step()
    assert check(actors) == []
    with actors.home.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(problem_means)).scalar_one() > 1
        states = set(connection.execute(select(slots.c.state)).scalars())
    assert {"set_aside", "used"} <= states
    change(actors, update(problem_means).values(before=0.25), update(slots).values(candidate=9))
    assert {(one.table, one.column) for one in check(actors, repair=True)} >= {
        ("problem_means", "before"),
        ("slots", "candidate"),
    }
    assert not [one for one in check(actors) if one.table == "problem_means"]
    actors.home.database.close()
