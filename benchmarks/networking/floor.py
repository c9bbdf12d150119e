"""Cost of a hop, by its parts and as a whole, as the floor of a network's measurements.

The parts that nobody gets around: an envelope over TCP on loopback, from one thread to another, and the check of a
signature. The whole: two idle nodes and one link, so what libp2p's Noise and Yamux in Python and two event loops add.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from typing import Final

from benchmarks.broadcasting.processes import NodeSwarm
from benchmarks.networking.envelopes import BYTES, Signer
from benchmarks.networking.reference import ComparedSide, start_links
from node.protocol.run import open_descriptor

ROUNDS: Final = 200
HOPS: Final = 30
GAP_SECONDS: Final = 0.3
"""Longer than a link waits between two descriptors."""


def check_ms() -> float:
    """Return the median time to check one descriptor."""
    signer = Signer()
    taken = []
    for _ in range(ROUNDS):
        _, envelope = signer.next()
        start = time.perf_counter()
        open_descriptor(envelope, run_id=signer.run_id, now=time.time())
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def tcp_ms() -> float:
    """Return half of the median time for an envelope to go over TCP and come back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_echo, args=(server,), daemon=True)
        echo.start()
        with socket.create_connection(server.getsockname()) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            taken = [_round(client) for _ in range(ROUNDS)]
        echo.join()
    return 1000 * statistics.median(taken) / 2


def hop_ms() -> float:
    """Return the median time from a node's store to its only neighbour's."""
    signer = Signer()
    with NodeSwarm() as swarm:
        side = ComparedSide(start_links(swarm, 2, signer.run_id), signer)
        time.sleep(1.0)
        for _ in range(HOPS):
            side.publish_calmly()
            time.sleep(GAP_SECONDS)
        found = side.calm().quantile_ms(0.5)
    return float("nan") if found is None else found


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(2 * BYTES):
            connection.sendall(data)


def _round(client: socket.socket) -> float:
    start, left = time.perf_counter(), BYTES
    client.sendall(bytes(BYTES))
    while left:
        left -= len(client.recv(left))
    return time.perf_counter() - start
