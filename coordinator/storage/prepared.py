"""Statements of the hot paths, compiled once and executed by the driver itself.

SQLAlchemy takes 28 µs of processor time for a statement that SQLite answers in 3 (`SITUATION` of `work_statements`, an
empty database), and a lease has ten of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import (
    BindParameter,
    Connection,
    Delete,
    Insert,
    Select,
    Table,
    TextClause,
    Update,
    bindparam,
    insert,
    literal_column,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import visitors
from sqlalchemy.sql.compiler import SQLCompiler

from coordinator.storage.postgresql import PreparedSession, converting

NOTHING: Mapping[str, Any] = {}
Rows: TypeAlias = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class _Query:
    """A compiled statement: its text, its own constants, and the order of its parameters."""

    text: str
    constants: dict[str, Any]
    order: tuple[str, ...]


class _Numbered(dict[str, str]):
    """The parameters of a text as "$1" and so on, in the order in which it first names them."""

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, f"${len(self) + 1}")


class Prepared:
    """A statement with named parameters; rows are the driver's tuples, and values go to it as they are.

    Of parameters declared as `expanding`, values are lists. Errors are those that SQLAlchemy raises. Its own texts are
    written out: where one might be what an index is limited to, SQLite plans anew at each execution with a parameter.
    """

    def __init__(self, statement: Select[*tuple[Any, ...]] | Insert | Update | Delete | TextClause) -> None:
        self._statement = statement
        self._queries: dict[tuple[Any, ...], _Query] = {}

    def rows(self, connection: Connection, values: Mapping[str, Any] = NOTHING) -> Rows:
        """Execute and return all rows."""
        found: Rows = self._execute(connection, values, fetch=True)
        return found

    def first(self, connection: Connection, values: Mapping[str, Any] = NOTHING) -> tuple[Any, ...] | None:
        """Execute and return the first row, None if there is none."""
        found = self.rows(connection, values)
        return found[0] if found else None

    def scalar(self, connection: Connection, values: Mapping[str, Any] = NOTHING) -> Any:
        """Execute and return the first column of the first row, None if there is no row."""
        found = self.rows(connection, values)
        return found[0][0] if found else None

    def run(self, connection: Connection, values: Mapping[str, Any] = NOTHING) -> int:
        """Execute a statement without rows; return how many it changed."""
        changed: int = self._execute(connection, values, fetch=False)
        return changed

    def send(self, connection: Connection, values: Mapping[str, Any] = NOTHING) -> Callable[[], Rows]:
        """Execute, on PostgreSQL with the next statement whose result is asked for; return what waits for the rows.

        Where nobody calls that, the next statement or the commit raises the error of this one.
        """
        if connection.dialect.name != "postgresql":
            found = self.rows(connection, values)
            return lambda: found
        text, parameters = self.bound(connection, values)
        session = PreparedSession.of(connection)
        sent = converting(connection, text, lambda: session.send(text, parameters))
        return lambda: converting(connection, text, lambda: session.rows(sent))

    def ask(self, connection: Connection, values: Mapping[str, Any] = NOTHING) -> Callable[[], Rows]:
        """As `send`, of rows that may not be needed: SQLite, for which nobody waits, executes once that is called."""
        if connection.dialect.name != "postgresql":
            return lambda: self.rows(connection, values)
        return self.send(connection, values)

    def bound(self, connection: Connection, values: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """Return the statement's text and parameters as the driver takes them."""
        lists = {name: value for name, value in values.items() if isinstance(value, list)}
        key = (connection.dialect.name, *map(len, lists.values()))
        query = self._queries.get(key)
        if query is None:
            query = self._queries[key] = _compile(self._statement, values, connection.dialect, with_lists=bool(lists))
        given = {**query.constants, **values}
        for name, items in lists.items():
            given.update((f"{name}_{number}", item) for number, item in enumerate(items, 1))
        return query.text, [given[name] for name in query.order]

    def _execute(self, connection: Connection, values: Mapping[str, Any], *, fetch: bool) -> Any:
        text, parameters = self.bound(connection, values)
        if connection.dialect.name == "postgresql":
            session = PreparedSession.of(connection)
            result = session.rows if fetch else session.changed
            return converting(connection, text, lambda: result(session.send(text, parameters)))
        try:
            driver: Any = connection.connection.dbapi_connection
            cursor = driver.execute(text, parameters)
            return cursor.fetchall() if fetch else cursor.rowcount
        except connection.dialect.loaded_dbapi.Error as error:
            # Makes of it what SQLAlchemy raises for its own statements, and gives up a broken connection.
            connection._handle_dbapi_exception(error, text, parameters, None, None)  # noqa: SLF001


def run_all(connection: Connection, statements: Sequence[tuple[Prepared, Mapping[str, Any]]]) -> None:
    """Execute statements without rows in order; PostgreSQL is waited for once."""
    for statement, values in statements:
        statement.send(connection, values)
    if connection.dialect.name == "postgresql":
        converting(connection, None, PreparedSession.of(connection).flush)


def fence(connection: Connection) -> None:
    """Have what was sent before fail as an unavailable database, and not as the statements that follow."""
    if connection.dialect.name == "postgresql":
        PreparedSession.of(connection).fence()


def _compile(statement: Any, values: Mapping[str, Any], dialect: Dialect, *, with_lists: bool) -> _Query:
    def written_out(element: Any, **_: Any) -> Any:
        if isinstance(element, BindParameter) and isinstance(element.value, str) and element.key not in values:
            return literal_column("'" + element.value.replace("'", "''") + "'", element.type)
        return None

    statement = visitors.replacement_traverse(statement, {}, written_out)
    if with_lists:  # one parameter for each element
        statement, options = statement.params(values), {"render_postcompile": True}
    else:
        options = {}
    compiled: SQLCompiler = statement.compile(dialect=dialect, compile_kwargs=options)
    # Not those that each execution has to name, so that one without them is an error.
    constants = {
        name: bound.value for bound, name in compiled.bind_names.items() if not bound.required and name not in values
    }
    if compiled.positiontup is not None:
        return _Query(str(compiled), constants, tuple(compiled.positiontup))
    numbered = _Numbered()
    return _Query(str(compiled) % numbered, constants, tuple(numbered))


def insert_into(table: Table, *columns: str) -> Insert:
    """Return the insertion of a row with just these columns, all of which are parameters."""
    return insert(table).values({column: bindparam(column) for column in columns})
