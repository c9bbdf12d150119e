"""Probes of announced relays, in a thread as the leader runs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from waiting import until

from coordinator.run.home import Home
from coordinator.run.relay_probes import RelayProbes
from coordinator.storage.relays import RegisteredRelay, relays_seen_since


@contextlib.contextmanager
def probing(home: Home) -> Iterator[None]:
    """Probe what is due while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=RelayProbes(home).run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def registered(home: Home) -> dict[str, RegisteredRelay]:
    """Every announced relay, by its URL."""
    with home.database.read() as connection:
        return {row.url: row for row in relays_seen_since(connection, 0.0)}


def probe(home: Home, url: str) -> None:
    """Probe until `url` was."""
    with probing(home):
        until(lambda: registered(home)[url].probed_at is not None)
