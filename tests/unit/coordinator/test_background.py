"""Threads beside a process's work end with it."""

from __future__ import annotations

import threading

import pytest

from coordinator.run.background import background_thread


def test_a_thread_ends_with_its_block_however_that_ends() -> None:
    """A process whose work has failed would else hang in place of being started again."""
    stopped: list[bool] = []

    def wait(stop: threading.Event) -> None:
        stopped.append(stop.wait(10))

    with background_thread(wait, name="waits"):
        pass
    with pytest.raises(ValueError, match="failed"), background_thread(wait, name="waits"):
        raise ValueError("failed")
    assert stopped == [True, True]
