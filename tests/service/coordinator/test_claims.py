"""What a verifier claims together: work of one version, so that a policy is loaded once for all that waits under it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of

from coordinator.run.home import Home, create_home
from coordinator.storage import verdicts
from coordinator.storage.verdicts import QueueItem
from node.protocol.admission import Outcome
from node.protocol.messages import VerdictEntry
from node.protocol.run import StandingSpec

VERSIONS, SLOTS = 3, 34
AT_ONCE = 8
RULES = StandingSpec(probation=2, full_rate_floor=0.25, vesting=2, ban_after=3)


@pytest.fixture
def home(tmp_path: Path, database_url: str | None) -> Iterator[Home]:
    home = create_home(
        tmp_path,
        public_key=PUBLIC_KEY,
        spec=spec_of(standing=RULES, groups_per_step=SLOTS, max_async=VERSIONS),
        database_url=database_url,
    )
    yield home
    home.database.close()


def interleaved(actors: Actors) -> list[int]:
    """Work under several policies in turns; the versions, in the order of arrival."""
    nodes = [f"node-{number}" for number in range(VERSIONS * SLOTS)]
    actors.register(*nodes)
    waiting = iter(nodes)
    leased = []
    for version in range(VERSIONS):
        actors.publish(version)
        taken = [(node, actors.lease(node, held=(version,))) for node, _ in zip(waiting, range(SLOTS), strict=False)]
        leased.append([(node, lease) for node, leases in taken for lease in leases])
    versions = []
    for turn in zip_longest(*leased):
        for node, lease in filter(None, turn):
            actors.now += 0.01
            actors.submit(node, lease.lease_id)
            versions.append(lease.version)
    return versions


def claim(actors: Actors, verifier: str = "v") -> list[QueueItem]:
    with actors.home.database.write() as connection:
        return verdicts.claim(
            connection, verifier=verifier, spec=actors.home.spec, now=actors.now, seconds=30.0, most=AT_ONCE
        )


def test_each_policy_is_loaded_once_for_a_hundred_interleaved_submissions(home: Home) -> None:
    """Each time costs gigabytes from disk, or a reload of the engine."""
    actors = Actors(home)
    versions = interleaved(actors)
    assert len(versions) >= 100
    assert len(list(groupby(versions))) > 90
    claimed = []
    while batch := claim(actors):
        assert len({one.version for one in batch}) == 1
        claimed += [one.version for one in batch]
        for one in batch:
            actors.decide(one, Outcome.ADMITTED)
    assert sorted(claimed) == sorted(versions)
    assert [version for version, _ in groupby(claimed)] == [0, 1, 2], "the oldest is the first that is of no use"


def test_work_of_an_old_policy_is_not_held_up_by_newer_work(home: Home) -> None:
    """It arrives last, and is judged next."""
    actors = Actors(home)
    actors.register("slow", *(f"fast-{number}" for number in range(20)))
    actors.publish(0)
    (old,) = actors.lease("slow", held=(0,))
    actors.publish(1)
    for number in range(20):
        actors.submit(f"fast-{number}", actors.lease(f"fast-{number}", held=(1,))[0].lease_id)
    claim(actors)
    actors.now += 1
    late = actors.submit("slow", old.lease_id)
    assert [one.submission for one in claim(actors, "another")] == [late]


def test_a_second_verdict_that_training_waits_for_is_first_whatever_its_version(home: Home) -> None:
    actors = Actors(home)
    actors.register("caught", "old")
    actors.publish(0)
    waiting = actors.lease("old", held=(0,))
    actors.publish(1)
    unseen = [
        actors.submit("caught", lease.lease_id, draw=0.999) for lease in actors.lease("caught", held=(1,), count=2)
    ]
    admitted = claim(actors)
    actors.decide(next(one for one in admitted if one.submission == unseen[0]), Outcome.ADMITTED)
    actors.decide(next(one for one in admitted if one.submission == unseen[1]), Outcome.REJECTED)
    for lease in waiting:
        actors.submit("old", lease.lease_id)
    (recheck,) = claim(actors)
    assert (recheck.submission, recheck.recheck, recheck.version) == (unseen[0], True, 1)
    assert [one.version for one in claim(actors, "another")] == [0]


def test_a_submission_that_ends_its_verifiers_takes_no_others_with_it(home: Home) -> None:
    """What is claimed with it is claimed again as often; given up with it, it would be honest work lost."""
    actors = Actors(home)
    actors.register("poison", *(f"n{number}" for number in range(4)))
    actors.publish(0)
    poison = actors.submit("poison", actors.lease("poison", held=(0,))[0].lease_id)
    for number in range(4):
        actors.submit(f"n{number}", actors.lease(f"n{number}", held=(0,))[0].lease_id)
    batches = []
    for _ in range(40):
        actors.now += 31
        batch = claim(actors)
        batches.append([one.submission for one in batch])
        if any(one.submission == poison and not one.is_hopeless for one in batch):
            continue  # the verifier is killed
        for one in batch:
            actors.decide(one, Outcome.INDETERMINATE if one.is_hopeless else Outcome.ADMITTED)
    assert sum(poison in batch for batch in batches) == verdicts.MAX_CLAIMS + 1
    assert [len(batch) for batch in batches if poison in batch][:3] == [5, 2, 1], "fewer each time"
    outcomes = {entry.submission: entry.outcome for entry in actors.entries() if isinstance(entry, VerdictEntry)}
    assert outcomes.pop(poison) is Outcome.INDETERMINATE
    assert list(outcomes.values()) == [Outcome.ADMITTED] * 4


def test_a_verifier_that_ends_at_once_whenever_it_starts_gives_nothing_up_within_minutes(home: Home) -> None:
    """Its own fault, such as a driver that crashes, would be the end of honest work before anybody could mend it."""
    actors = Actors(home)
    actors.register("honest")
    actors.publish(0)
    actors.submit("honest", actors.lease("honest", held=(0,))[0].lease_id)
    quick = [claim(actors) for _ in range(60)]
    assert [len(batch) for batch in quick] == [1] * verdicts.MAX_ATTEMPTS + [0] * (60 - verdicts.MAX_ATTEMPTS)
    actors.now += 31
    (held,) = claim(actors)
    assert not held.is_hopeless
    assert actors.decide(held, Outcome.ADMITTED)
