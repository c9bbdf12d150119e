"""Connections that say nothing: how long a manifest takes from a relay that holds hundreds of them open."""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import time
from urllib.parse import urlsplit

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import Setting, deliver
from benchmarks.broadcasting.processes import NodeSwarm

CONNECTIONS = 500

_TIMEOUT_S = 10.0
_MANIFEST = "/v1/versions/1"


def manifest_ms(host: str, port: int) -> float:
    """Time one request on a connection of its own, connecting included."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("GET", _MANIFEST)
        response = connection.getresponse()
        body = response.read()
    if response.status != 200 or not body:
        raise RuntimeError(f"the relay answered {response.status} where a manifest was asked for")
    return (time.perf_counter() - started) * 1e3


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def measure(setting: Setting, *, requests: int) -> dict[str, float]:
    """Time a relay's manifest without and with idle connections. Raise WorkerNotServed."""
    with NodeSwarm(setting.within) as swarm, contextlib.ExitStack() as opened:
        origin = ours.start_origin(swarm)
        relay = ours.start_relay(swarm, [origin.url])
        worker = ours.start_worker(swarm, [relay.url])
        deliver(setting, origin, [worker]).complete_seconds()
        worker.kill()
        address = urlsplit(relay.url)
        host, port = address.hostname or "", address.port or 0
        quiet = [manifest_ms(host, port) for _ in range(requests)]
        idle = [
            opened.enter_context(socket.create_connection((host, port), timeout=_TIMEOUT_S)) for _ in range(CONNECTIONS)
        ]
        taken = [manifest_ms(host, port) for _ in range(requests)]
        return {
            f"idle_connections_{CONNECTIONS}_p99_ms": percentile(taken, 0.99),
            "idle_connections_0_p99_ms": percentile(quiet, 0.99),
            "idle_connections_still_open": sum(map(is_open, idle)),
        }
