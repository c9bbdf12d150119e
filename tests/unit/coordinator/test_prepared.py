"""Statements that go to the driver itself have to mean, and to fail as, what SQLAlchemy's own would."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

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


@pytest.mark.parametrize("constant", ["it's", "50%", ":value ? %(value)s"])
def test_any_constant_is_compared_as_it_is(connection: Connection, constant: str) -> None:
    ADD.run(connection, {"name": "d", "value": constant})
    assert Prepared(select(facts.c.name).where(facts.c.value == constant)).rows(connection) == [("d",)]


def test_an_index_of_some_rows_has_no_statement_planned_at_each_execution(connection: Connection) -> None:
    """SQLite does where a parameter might be the index's constant; a lease took half as long again."""
    connection.exec_driver_sql("CREATE INDEX active ON facts (name) WHERE value = 'active'")
    planned = list[int]()

    def note(action: int, *_: object) -> int:  # called for each step of planning
        planned.append(action)
        return sqlite3.SQLITE_OK

    driver: Any = connection.connection.dbapi_connection
    driver.set_authorizer(note)
    found = Prepared(select(facts.c.name).where(facts.c.value == LeaseState.ACTIVE, facts.c.name > bindparam("after")))
    assert found.rows(connection, {"after": "a"}) == [("b",), ("c",)]
    assert planned
    planned.clear()
    assert found.rows(connection, {"after": "b"}) == [("c",)]
    assert planned == []


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
