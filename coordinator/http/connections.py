"""Connection limits: number, number per address, and timeouts of request heads and of slow readers.

uvicorn has no timeout for a request head or for a peer that does not read the response. What a head and a body may be
is bounded by `request_guard`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import termios
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI

from coordinator.errors import CannotListen
from coordinator.http.request_guard import StrictHttpProtocol
from shardcast.rate_limit import canonical_address, network_of
from shardcast.serve import open_files

SEND_BUFFER_BYTES = 256 * 1024
"""Kernel send buffer of a connection: bytes sent before a slow reader is noticed."""

ACCEPTED_AT_ONCE, QUEUED = 4, 2048
"""Accepted in one turn of the event loop, each a descriptor before its quota is known; and queued by the kernel."""

SHED_AMONG = 64
"""The longest waiting connections among which one is chosen to be ended: looking at all would cost a flood nothing."""

UNREAD_CHECKS = 5
"""How often a reader is looked at within its time. A pause of this process, however long, counts as one of them."""

NOSNIFF = ("x-content-type-options", "nosniff")
"""Header of every response: a blob that a stranger uploaded must not run as a script or a page of this origin."""

UNSENT_SECONDS = 60
SHUTDOWN_SECONDS = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Connection limits of one server; `proxies` are addresses without a per-address limit."""

    connections: int = 1024
    connections_per_address: int = 256
    head_bytes: int = 16 * 1024
    head_seconds: float = 10.0
    idle_seconds: float = 30.0
    unread_seconds: float = 30.0
    proxies: Collection[str] = ()


DEFAULT_CONNECTION_LIMITS = ConnectionLimits()


class ConnectionQuota:
    """Open connections, in all and per address.

    `awaiting` are those that wait for their peers, the longest waiting first: idle, or with a part of a head or of a
    message's body. To hold one costs a peer nothing.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.refused = 0
        self.awaiting: dict[LimitedProtocol, None] = {}
        self._from = Counter[str]()
        self._proxies = frozenset(map(canonical_address, limits.proxies))

    def __len__(self) -> int:
        return self._from.total()

    def acquire(self, address: str) -> bool:
        """Count a connection and return True, or return False if a limit is reached.

        Where all are taken, one that waits for its peer makes room: half-open connections must not silence the
        coordinator.
        """
        key = self._key(address)
        full = self._from[key] >= self.limits.connections_per_address and key not in self._proxies
        if full or (len(self) >= self.limits.connections and not self._shed()):
            self.refused += 1
            return False
        self._from[key] += 1
        return True

    def release(self, address: str) -> None:
        """Uncount a connection that `acquire` counted."""
        self._from -= Counter((self._key(address),))

    def _shed(self) -> bool:
        """End one of the longest waiting connections, of whoever has most of all; return whether there was one."""
        longest = islice(self.awaiting, SHED_AMONG)
        chosen = max(longest, key=lambda waiting: self._from[self._key(waiting.address)], default=None)
        if chosen is None:
            return False
        self.refused += 1
        chosen.end()
        return True

    def _key(self, address: str) -> str:
        """Return a proxy's own address, and anybody else's network."""
        alone = canonical_address(address)
        return alone if alone in self._proxies else network_of(address)


class LimitedProtocol(StrictHttpProtocol):
    """HTTP protocol with timeouts for the request head and for slow readers; subclasses set `quota`."""

    quota: ClassVar[ConnectionQuota]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head_bytes = self.quota.limits.head_bytes
        self.address, self._is_counted = "", False
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self.quota.acquire(self.address):
            transport.abort()
            return
        self._is_counted = True
        # uvicorn is then notified of every response that the kernel did not take at once, however short.
        transport.set_write_buffer_limits(high=0)
        self._start_head_timer()
        self._note_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection at once, unsent data and all, and give its place away."""
        self._release()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_head_timer()
        else:
            self._stop_head_timer()
        self._note_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_waiting()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless its next request is here and the event loop has yet to read it.

        uvloop calls what is due before it reads: after a pause, requests of a whole crowd would end unanswered.
        """
        if self._has_unread():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _has_unread(self) -> bool:
        if self.transport.is_closing():
            return False
        waiting = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
        return any(waiting)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Keep this connection's place among those that wait for their peers, or take it from them.

        Uploads are none of them: only the holder of a lease is asked for one (`routes.submissions.submitter`).
        """
        if self.cycle is None or self.cycle.response_complete:
            waits = not self.transport.get_write_buffer_size()  # an answer that is still being read is not cut off
        else:
            waits = self.cycle.more_body and self.scope["method"] != "PUT"
        if waits and self._is_counted and not self.transport.is_closing():
            self.quota.awaiting.setdefault(self)
        else:
            self.quota.awaiting.pop(self, None)

    def _start_head_timer(self) -> None:
        """Start the timeout of one request head, unless it is running."""
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.quota.limits.head_seconds, self.transport.abort)

    def _release(self) -> None:
        if self._is_counted:
            self.quota.release(self.address)
            self._is_counted = False
        self.quota.awaiting.pop(self, None)
        self._stop_head_timer()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self, checks: int = UNREAD_CHECKS) -> None:
        """Abort unless the write buffer shrinks within so many checks; nothing is added while writing is paused."""
        buffered = self.transport.get_write_buffer_size()

        def check_progress() -> None:
            if self.transport.get_write_buffer_size() < buffered:
                self._watch_reader()
            elif checks > 1:
                self._watch_reader(checks - 1)
            else:
                self.transport.abort()

        seconds = self.quota.limits.unread_seconds / UNREAD_CHECKS
        self._unread_timer = self.loop.call_later(seconds, check_progress)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def server_config(app: FastAPI, limits: ConnectionLimits = DEFAULT_CONNECTION_LIMITS) -> uvicorn.Config:
    """Return the uvicorn configuration for `app`; X-Forwarded-For is trusted from `limits.proxies` alone."""

    class BoundProtocol(LimitedProtocol):
        quota = ConnectionQuota(limits)

    app.state.connections = BoundProtocol.quota  # for the metrics
    return uvicorn.Config(
        app,
        http=BoundProtocol,
        ws="none",
        log_config=None,  # use this process's logging configuration
        log_level="warning",
        access_log=False,
        server_header=False,
        headers=[NOSNIFF],
        proxy_headers=bool(limits.proxies),
        # Set even if empty: the default trusts loopback and FORWARDED_ALLOW_IPS. A dual-stack socket shows IPv4
        # addresses as mapped into IPv6.
        forwarded_allow_ips=[*limits.proxies, *(f"::ffff:{each}" for each in limits.proxies if ":" not in each)],
        backlog=ACCEPTED_AT_ONCE,  # asyncio accepts that many in one turn; `coordinator.http.shutdown` queues more
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


def allow_connections(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise this process's limit of open files to what its connections need; return the limits that it has room for."""
    connections = open_files.allow_connections(limits.connections)
    if connections < limits.connections:
        log.warning(
            "%d connections need %d open files, more than the hard limit (ulimit -Hn): taking %d at a time; raise the "
            "limit or lower --max-connections",
            limits.connections,
            limits.connections + open_files.OTHER_FILES,
            connections,
        )
    return replace(limits, connections=connections)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket, whose options accepted sockets inherit; raises CannotListen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # Bounds how long the kernel keeps unsent data of a closed connection, or a peer that vanished.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_SECONDS * 1000)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listening
