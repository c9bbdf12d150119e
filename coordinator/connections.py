"""Connections from strangers: bounded in number, per address, in the bytes of a head, and in time.

uvicorn waits for ever for the end of a request's head, for a body that nobody reads, and for a peer that does not read
its answer. h11 bounds what it holds of a head or of trailers, and takes one request after the other; that is why it is
named here, and not left to what happens to be installed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.errors import BadConfiguration
from coordinator.limits import network_of
from coordinator.refusals import error_body
from node.protocol.reasons import Reason, Refusal

SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, for each connection: so much is sent before a slow reader is noticed, and what it takes is seen in
steps of some tens of KB."""

OTHER_FILES = 1024
"""The database's, three for each of its connections, and blobs under way."""

UNSENT_SECONDS = 60
SHUTDOWN_SECONDS = 5
log = logging.getLogger(__name__)

_FLOODS = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket library detected.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What strangers may hold open, and for how long. `proxies` are addresses with all of it to themselves."""

    connections: int = 1024
    connections_per_address: int = 256
    head_bytes: int = 16 * 1024
    head_seconds: float = 10.0
    idle_seconds: float = 30.0
    unread_seconds: float = 30.0
    proxies: Collection[str] = ()


DEFAULT_CONNECTION_LIMITS = ConnectionLimits()


class Crowd:
    """Who is connected."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._from = Counter[str]()
        self._proxies = frozenset(map(network_of, limits.proxies))

    def enter(self, address: str) -> bool:
        """Count a connection; False if there is no room for it."""
        network = network_of(address)
        crowded = self._from[network] >= self.limits.connections_per_address and network not in self._proxies
        if crowded or self._from.total() >= self.limits.connections:
            return False
        self._from[network] += 1
        return True

    def leave(self, address: str) -> None:
        """Forget a connection that was counted."""
        network = network_of(address)
        self._from[network] -= 1
        if not self._from[network]:
            del self._from[network]


class GuardedConnection(H11Protocol):
    """uvicorn's, with deadlines for the head of a request and for a reader; `guarded` binds it to a crowd."""

    crowd: ClassVar[Crowd]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counted: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self.crowd.enter(address):
            transport.abort()
            return
        self._counted = address
        # uvicorn then hears of every answer that the kernel did not take at once, however short.
        transport.set_write_buffer_limits(high=0)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._counted is not None:
            self.crowd.leave(self._counted)
            self._counted = None
        self._stop_head_timer()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        else:
            self._stop_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP: refused like everything else."""
        body = error_body(Refusal(Reason.BAD_REQUEST, msg))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        try:
            head = self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
        except h11.LocalProtocolError:  # an answer is under way already
            self.transport.abort()
            return
        self.transport.write(b"".join((head or b"", self.conn.send(h11.Data(data=body)) or b"")))
        self.transport.close()

    def _await_head(self) -> None:
        """Give the peer time for one head, from its first byte on, however it is cut up; or from the start."""
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.crowd.limits.head_seconds, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self) -> None:
        """Nothing is written while writing is paused, so that what waits gets less, or nobody reads."""
        waiting = self.transport.get_write_buffer_size()

        def look_again() -> None:
            if self.transport.get_write_buffer_size() < waiting:
                self._watch_reader()
            else:
                self.transport.abort()

        self._unread_timer = self.loop.call_later(self.crowd.limits.unread_seconds, look_again)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def guarded(limits: ConnectionLimits) -> type[GuardedConnection]:
    """The protocol of a server with these limits, which its connections share."""

    class Guarded(GuardedConnection):
        crowd = Crowd(limits)

    return Guarded


class _NotAboutStrangers(logging.Filter):
    """Drops uvicorn's line for each request that is not HTTP: anyone could fill the log with them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_FLOODS)


def server_config(app: FastAPI, limits: ConnectionLimits = DEFAULT_CONNECTION_LIMITS) -> uvicorn.Config:
    """How uvicorn serves `app` to strangers. X-Forwarded-For counts only when one of `limits.proxies` says it."""
    logging.getLogger("uvicorn.error").addFilter(_NOT_ABOUT_STRANGERS)
    return uvicorn.Config(
        app,
        http=guarded(limits),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(limits.proxies),
        # Named even where it is empty: the default would trust loopback, or what a variable of the environment says.
        forwarded_allow_ips=list(limits.proxies),
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=limits.head_bytes,
    )


_NOT_ABOUT_STRANGERS = _NotAboutStrangers()


def allow_connections(limits: ConnectionLimits) -> None:
    """Let this process have as many files open as its connections need, as far as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + OTHER_FILES
    if most != resource.RLIM_INFINITY and most < wanted:
        log.warning("%d connections need %d open files, and the system allows %d", limits.connections, wanted, most)
        wanted = most
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), most))


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket; raises BadConfiguration before anything is promised. Accepted sockets inherit its options."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # What the kernel still has of a connection that was closed here, and a peer that has gone without a word.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNSENT_SECONDS * 1000)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise BadConfiguration(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listening
