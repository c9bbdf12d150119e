"""Statements that go to the driver itself have to mean, and to fail as, what SQLAlchemy's own would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, bindparam, create_engine, select, update
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.storage.prepared import Prepared, insert_into
from coordinator.storage.schema import LeaseState, facts

ADD = Prepared(insert_into(facts, "name", "value"))
NAMED = Prepared(
    select(facts.c.name).where(facts.c.name.in_(bindparam("names", expanding=True))).order_by(facts.c.name)
)
ACTIVE = Prepared(select(facts.c.name).where(facts.c.value == LeaseState.ACTIVE))


@pytest.fixture
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        facts.create(connection)
        for name in "abc":
            assert ADD.run(connection, {"name": name, "value": LeaseState.ACTIVE}) == 1
        yield connection
    engine.dispose()


def test_a_list_may_have_any_length(connection: Connection) -> None:
    for names, found in ((["a", "c"], ["a", "c"]), ([], []), (["b"], ["b"]), (["x", "a"], ["a"])):
        assert [name for (name,) in NAMED.rows(connection, {"names": names})] == found


def test_constants_and_counts_are_those_of_the_statement(connection: Connection) -> None:
    assert ACTIVE.first(connection) == ("a",)
    change = Prepared(update(facts).where(facts.c.name != bindparam("but")).values(value="x"))
    assert change.run(connection, {"but": "b"}) == 2
    assert ACTIVE.rows(connection) == [("b",)]
    assert NAMED.scalar(connection, {"names": ["x"]}) is None


def test_a_parameter_that_is_left_out_is_not_null(connection: Connection) -> None:
    """A lease without its node would be everybody's."""
    with pytest.raises(KeyError):
        ADD.run(connection, {"name": "d"})


def test_errors_are_those_that_callers_wait_for(connection: Connection) -> None:
    """A replayed nonce, and a database that is away, are told by them."""
    with pytest.raises(IntegrityError):
        ADD.run(connection, {"name": "a", "value": "again"})
    facts.drop(connection)
    with pytest.raises(OperationalError):
        ACTIVE.rows(connection)
