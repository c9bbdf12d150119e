"""Whole tables of any schema revision, for backup and restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, func, insert, inspect, select, text

from coordinator.storage.database import migrations
from coordinator.storage.schema import metadata as newest_schema

VERSION_TABLE: Final = "alembic_version"
_ROWS_AT_ONCE: Final = 200
_LARGE_ROWS_AT_ONCE: Final = 20
_SEQUENCE: Final = "SELECT pg_get_serial_sequence(:table, :column)"


class WholeTable:
    """A reflected table; `kinds` are the Python types of its columns by name."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.name = str(table.name)
        self.kinds: dict[str, type] = {str(column.name): column.type.python_type for column in table.columns}

    def rows(self, connection: Connection) -> Iterator[Sequence[Any]]:
        """Yield all rows in the order of the primary key, in bounded memory."""
        at_once = _LARGE_ROWS_AT_ONCE if bytes in self.kinds.values() else _ROWS_AT_ONCE
        query = select(self._table).order_by(*self._table.primary_key)
        yield from connection.execute(query.execution_options(yield_per=at_once))

    def insert(self, connection: Connection, rows: list[dict[str, object]]) -> None:
        """Insert `rows`, if there are any; raises DatabaseFault."""
        if rows:
            connection.execute(insert(self._table), rows)


def whole_tables(connection: Connection, *, newest: bool) -> list[WholeTable]:
    """Return the database's tables, each after those that it references; `newest`: this release's schema only."""
    schema = MetaData()
    schema.reflect(connection, only=lambda name, _: not newest or name in newest_schema.tables or name == VERSION_TABLE)
    return [WholeTable(table) for table in schema.sorted_tables]


def table_names(connection: Connection) -> list[str]:
    """Return the names of all tables in the database, other applications' included."""
    return inspect(connection).get_table_names()


def revision(connection: Connection) -> str:
    """Return the schema's revision, "None" in an empty database."""
    return str(MigrationContext.configure(connection).get_current_revision())


def newest_revision() -> str:
    """Return this release's schema revision."""
    return str(ScriptDirectory.from_config(migrations()).get_current_head())


def known_revisions() -> frozenset[str]:
    """Return the schema revisions that this release can migrate."""
    return frozenset(step.revision for step in ScriptDirectory.from_config(migrations()).walk_revisions())


def continue_sequences(connection: Connection) -> None:
    """Set PostgreSQL's sequences behind the inserted rows; SQLite does so itself."""
    if connection.dialect.name != "postgresql":
        return
    for table in newest_schema.sorted_tables:
        column = table.autoincrement_column
        if column is None:
            continue
        sequence = connection.execute(text(_SEQUENCE), {"table": table.name, "column": column.name}).scalar()
        last = connection.execute(select(func.max(column))).scalar()
        if sequence is not None and last is not None:
            connection.execute(select(func.setval(sequence, last)))


def keeps_nul(connection: Connection) -> bool:
    """Return whether text columns accept NUL characters, which PostgreSQL's do not."""
    return connection.dialect.name != "postgresql"
