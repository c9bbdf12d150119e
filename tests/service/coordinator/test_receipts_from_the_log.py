"""A database that somebody changed while the log stayed right: the run's key signs what the log says, or nothing.

A receipt is the run's signed promise. One that contradicts the log convicts an operator who did nothing wrong.
"""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import update
from swarm import RUN_KEY, serve

from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.storage.schema import log_entries, submissions
from node.protocol.admission import Outcome
from node.protocol.messages import Receipt
from node.protocol.reasons import Reason
from node.protocol.receipts import open_receipt


@pytest.fixture
def actors(tmp_path: Path, database_url: str | None) -> Iterator[Actors]:
    actors = Actors(create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=database_url))
    actors.register("a", "b", admitted=0)
    actors.publish(0)
    yield actors
    actors.home.database.close()


@pytest.fixture
def url(actors: Actors) -> Iterator[str]:
    with serve(Coordinator(actors.home, key=RUN_KEY)) as url:
        yield url


def answer(url: str, submission: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"{url}/v1/receipts/{submission}", timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def receipt(url: str, submission: str) -> Receipt:
    status, body = answer(url, submission)
    assert status == 200, body
    return open_receipt(body, signer=PUBLIC_KEY)


def test_a_changed_outcome_in_the_database_never_reaches_a_receipt(actors: Actors, url: str) -> None:
    admitted, rejected = actors.work("a"), actors.work("b", Outcome.REJECTED)
    before = [receipt(url, name) for name in (admitted, rejected)]
    changed = {"outcome": Outcome.ADMITTED, "reason": None, "detail": "forged", "tokens": 10**6, "node": who("a")}
    with actors.home.database.write() as connection:
        connection.execute(update(submissions).values(changed))
    assert [receipt(url, name) for name in (admitted, rejected)] == before
    assert (before[1].outcome, before[1].reason, before[1].tokens) == (Outcome.REJECTED, Reason.WRONG_SEED, 5)


def test_no_receipt_is_signed_for_a_place_in_the_log_that_is_another_submissions(
    actors: Actors, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = actors.work("a"), actors.work("b")
    with actors.home.database.write() as connection:
        places = {"log_index": submissions.c.log_index - 1}
        connection.execute(update(submissions).where(submissions.c.submission == second).values(places))
    with caplog.at_level(logging.ERROR, "coordinator.http.errors"):
        status, body = answer(url, second)
    assert status == 500
    assert b"VSW1" not in body
    assert "swarmproof check --data" in caplog.text
    assert receipt(url, first).log_index == 2


@pytest.mark.parametrize("place", [0, 1, 99, None], ids=["rules", "policy", "beyond", "none"])
def test_no_receipt_is_signed_for_a_place_in_the_log_that_has_no_verdict(
    actors: Actors, url: str, place: int | None
) -> None:
    name = actors.work("a")
    with actors.home.database.write() as connection:
        connection.execute(update(submissions).values(log_index=place))
    assert answer(url, name)[0] == 500


def test_no_receipt_is_signed_for_a_leaf_that_is_not_in_the_tree(actors: Actors, url: str) -> None:
    """A leaf that was rewritten in place: its receipt would name a hash that no checkpoint has."""
    name = actors.work("a")
    honest = receipt(url, name)
    with actors.home.database.write() as connection:
        leaf = connection.execute(log_entries.select().where(log_entries.c.index == honest.log_index)).one().leaf
        forged = bytes(leaf).replace(b'"tokens":5', b'"tokens":6')
        assert forged != bytes(leaf)
        connection.execute(update(log_entries).where(log_entries.c.index == honest.log_index).values(leaf=forged))
    assert answer(url, name)[0] == 500
