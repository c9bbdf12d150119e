"""What is the same for each database of a session is done for the first one alone: migrating and compiling.

Alembic takes 30 ms of processor time for each SQLite database, and SQLAlchemy compiles each statement anew for each
engine, which takes a short test longer than executing them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # pytest-xdist's own process, whose start the others wait for, has no use for it
    from sqlalchemy import Connection, Engine


@pytest.fixture(scope="session", autouse=True)
def prepared_databases() -> Iterator[None]:
    """Migrate once, and compile each statement once for each kind of database."""
    from coordinator.storage import database

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "upgrade", _Migrated(database.upgrade))
        patch.setattr(database, "create_engine", _OneDialect(database.create_engine))
        yield


class _Migrated:
    """`upgrade` of an empty SQLite database by what the first upgrade left there; of any other as always."""

    def __init__(self, upgrade: Any) -> None:
        self._upgrade, self._statements = upgrade, list[str]()

    def __call__(self, connection: Connection, revision: str = "head") -> None:
        if connection.dialect.name != "sqlite" or revision != "head" or _tables(connection):
            self._upgrade(connection, revision)
            return
        for statement in self._statements:
            connection.exec_driver_sql(statement)
        if not self._statements:
            self._upgrade(connection, revision)
            version = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one()
            self._statements = [*_tables(connection), f"INSERT INTO alembic_version VALUES ('{version}')"]


def _tables(connection: Connection) -> list[str]:
    """The statements that make a database's tables and indexes."""
    return list(connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name NOT GLOB 'sqlite_*'").scalars())


class _OneDialect:
    """`create_engine` whose engines share the dialect of the first that has connected, and with it what is compiled."""

    def __init__(self, create_engine: Any) -> None:
        self._create_engine = create_engine
        self._first: dict[str, Engine] = {}

    def __call__(self, url: Any, **options: Any) -> Engine:
        engine: Engine = self._create_engine(url, **options)
        first = self._first.setdefault(engine.dialect.driver, engine)
        if first.dialect.server_version_info is not None:  # it has connected
            engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
        return engine
