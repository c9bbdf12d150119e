"""Tests do not wait for the disk: what they write has to survive a killed process, and no power cut.

Each fsync takes milliseconds, and a test of the run's state makes hundreds. Processes that tests start sync as always.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import pytest

_fsync = os.fsync


def _unless_it_is_a_file(descriptor: int) -> None:
    """Sync what is neither a file nor a folder, such as /dev/full, whose failure a test may want."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        _fsync(descriptor)


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave out this process's fsyncs, and those of its SQLite databases."""
    from coordinator.storage import sqlite

    prepare = sqlite.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", _unless_it_is_a_file)
        patch.setattr(
            sqlite, "prepare", lambda engine, lock, **options: prepare(engine, lock, **options | {"synchronous": "OFF"})
        )
        yield
