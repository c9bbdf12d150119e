"""Connections from strangers: bounded in number, per address, in the bytes of a head, and in time.

uvicorn waits for ever for the end of a request's head, for a body that nobody reads, and for a peer that does not read
its answer. h11 bounds what it holds of an unfinished head or of trailers, and takes one request after the other; that
is why it is named here, and not left to what happens to be installed. What is finished it takes at any length.
"""

from __future__ import annotations

import asyncio
import logging
import re
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
from coordinator.http.errors import error_body
from coordinator.http.rate_limits import address_in, network_of
from node.protocol.reasons import Reason, Refusal

SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, for each connection: so much is sent before a slow reader is noticed, and what it takes is seen in
steps of some tens of KB."""

OTHER_FILES = 1024
"""The database's, three for each of its connections, and blobs under way."""

MAX_HEAD_LINES = 100
LEAST_CHUNK_BYTES, FREE_CHUNKS = 256, 64
"""So many bytes must chunks have on average, but for the first. An empty field takes 4 µs of the thread that serves
everybody, and a chunk of one byte 13 µs."""

UNSENT_SECONDS = 60
SHUTDOWN_SECONDS = 5
log = logging.getLogger(__name__)

_END_OF_HEAD = re.compile(rb"\n\r?\n")
"""As h11 finds it."""

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
        self.refused = 0
        self._from = Counter[str]()
        self._proxies = frozenset(map(address_in, limits.proxies))

    def __len__(self) -> int:
        return self._from.total()

    def enter(self, address: str) -> bool:
        """Count a connection; False if there is no room for it."""
        who = self._who(address)
        crowded = self._from[who] >= self.limits.connections_per_address and who not in self._proxies
        if crowded or len(self) >= self.limits.connections:
            self.refused += 1
            return False
        self._from[who] += 1
        return True

    def leave(self, address: str) -> None:
        """Forget a connection that was counted."""
        who = self._who(address)
        self._from[who] -= 1
        if not self._from[who]:
            del self._from[who]

    def _who(self, address: str) -> str:
        """A proxy alone, not what shares its network; of anybody else the network."""
        alone = address_in(address)
        return alone if alone in self._proxies else network_of(address)


class _Reader(h11.Connection):
    """h11's, for which a head of any length is good once all of it is there, and a chunk of any."""

    def __init__(self, head_bytes: int) -> None:
        super().__init__(h11.SERVER, head_bytes)
        self._head_bytes = head_bytes
        self._chunks = self._body_bytes = 0

    def next_event(self) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        if self.their_state is h11.IDLE:
            self._chunks = self._body_bytes = 0
            self._refuse_long_head()
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks, self._body_bytes = self._chunks + event.chunk_end, self._body_bytes + len(event.data)
            if self._chunks > FREE_CHUNKS + self._body_bytes // LEAST_CHUNK_BYTES:
                raise h11.RemoteProtocolError("chunks are too small")
        return event

    def _refuse_long_head(self) -> None:
        waiting, _ = self.trailing_data
        end = _END_OF_HEAD.search(waiting)
        head = waiting[: end.start()] if end else waiting
        if len(head) > self._head_bytes or head.count(b"\n") > MAX_HEAD_LINES:
            raise h11.RemoteProtocolError("the head is too long")


class GuardedConnection(H11Protocol):
    """uvicorn's, with deadlines for the head of a request and for a reader; `guarded` binds it to a crowd."""

    crowd: ClassVar[Crowd]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Reader(self.crowd.limits.head_bytes)
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
    protocol = guarded(limits)
    app.state.crowd = protocol.crowd  # for the metrics
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,  # its lines go where this project's go, in the same form
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=bool(limits.proxies),
        # Named even where it is empty: the default would trust loopback, or what a variable of the environment says.
        # A socket for both kinds of addresses shows those of IPv4 in the form of IPv6.
        forwarded_allow_ips=[*limits.proxies, *(f"::ffff:{each}" for each in limits.proxies if ":" not in each)],
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
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
