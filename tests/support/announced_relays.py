"""Announced relays: those that hang, and probes in a thread as the leader runs them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

from waiting import until

from coordinator.run.background import background_thread
from coordinator.run.home import Home
from coordinator.run.relay_probes import RelayProbes
from coordinator.storage.relays import RegisteredRelay, relays_seen_since


@contextlib.contextmanager
def hanging() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that takes connections and never says anything: its URL, and the connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        kept = list[socket.socket]()

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", kept
        server.shutdown(socket.SHUT_RDWR)
        for one in kept:
            one.close()


def probing(home: Home) -> AbstractContextManager[None]:
    """Probe what is due while the block runs."""
    return background_thread(RelayProbes(home).run, name="relay probes")


def registered(home: Home) -> dict[str, RegisteredRelay]:
    """Every announced relay, by its URL."""
    with home.database.read() as connection:
        return {row.url: row for row in relays_seen_since(connection, 0.0)}


def probe(home: Home, url: str) -> None:
    """Probe until `url` was."""
    with probing(home):
        until(lambda: registered(home)[url].probed_at is not None)
