"""Accept connections from strangers, bounded in number, per address, and in time.

aiohttp bounds the request line and headers, and closes a connection that sends no complete request within
`idle_timeout_s`. Added here: limits on connections per address and in total, enforced at accept, and TCP_USER_TIMEOUT,
which ends a peer that stops reading. Where all connections are taken, one that nothing is asked for over makes room:
a handful of addresses could keep all others out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass, replace
from itertools import islice
from traceback import walk_tb
from typing import Final

from aiohttp import web

from shardcast.errors import LocalFault
from shardcast.rate_limit import network_of
from shardcast.serve.open_files import allow_connections
from shardcast.serve.refusals import without_expectations

logger = logging.getLogger(__name__)


class _DropForeignTracebacks(logging.Filter):
    """Drop aiohttp's tracebacks for requests that never reached this package, or anyone could fill the log.

    These are requests that are not HTTP, and what aiohttp itself fails at before calling a handler.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or record.exc_info[1] is None:
            return True
        return any(frame.f_globals.get("__package__") == __package__ for frame, _ in walk_tb(record.exc_info[2]))


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_DropForeignTracebacks())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits on what strangers may use. Behind a NAT, a proxy or on loopback one address is many nodes; None: no limit.

    `max_bytes_per_s` applies to all responses together.
    """

    max_connections: int = 4096
    max_connections_per_address: int | None = 512
    max_bytes_per_s: float | None = None
    idle_timeout_s: float = 30.0
    transfer_timeout_s: float = 120.0
    max_wait_s: float = 30.0
    max_request_line_bytes: int = 1024
    max_header_bytes: int = 2048
    max_headers: int = 32
    unread_timeout_s: float = 60.0


DEFAULT_SERVER_LIMITS = ServerLimits()

SHED_AMONG: Final = 64
"""The oldest idle connections, among which the one that makes room is chosen."""

LARGE_SHARE: Final = 1 / 32
"""Of all connections: a network that holds more loses one though it is in use, where no connection is idle."""


class Listener:
    """One bound port serving one aiohttp application; create it with `listen`."""

    def __init__(self, runner: web.AppRunner, bound: socket.socket, limits: ServerLimits) -> None:
        assert runner.server is not None, "the runner must be set up"
        self._runner = runner
        self._server = runner.server
        self._server.request_handler = without_expectations(self._server.request_handler)
        self._socket = bound
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._opening = set[asyncio.Task[None]]()
        self._networks: dict[web.RequestHandler, str] = {}
        self._held: dict[str, dict[web.RequestHandler, None]] = {}  # by network, each one's oldest first
        self._server.connection_lost = self._lost  # type: ignore[method-assign]
        self._pause: asyncio.TimerHandle | None = None
        self.refused = 0
        self._start_accepting()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        return len(self._networks)

    async def stop(self) -> None:
        """Stop accepting, then close open connections."""
        self._loop.remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
        self._socket.close()
        await asyncio.gather(*self._opening, return_exceptions=True)
        await self._runner.cleanup()

    def _start_accepting(self) -> None:
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept in a callback, not a task: a cancelled task would lose the socket it was about to get."""
        try:
            connection, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # e.g. no descriptors left; the socket stays readable, so pause
            logger.warning("cannot accept connections: %s; retrying", error)
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(0.1, self._start_accepting)
            return
        network = network_of(str(address[0]))
        if not self._make_room(network):
            self.refused += 1
            connection.close()
            return
        connection.setblocking(False)
        handler = self._server()
        self._networks[handler] = network
        self._held.setdefault(network, {})[handler] = None
        task = self._loop.create_task(self._open(connection, handler))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, handler: web.RequestHandler) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: handler, connection)
        except OSError as error:
            logger.debug("connection closed during setup: %s", error)
            connection.close()
            self._forget(handler)

    def _make_room(self, network: str) -> bool:
        """Return whether another connection of `network` fits, after ending one if need be.

        One of the oldest that are idle, of whoever holds most; where none is, of a network that holds a large share.
        """
        of_network, most = len(self._held.get(network, ())), self._limits.max_connections_per_address
        if most is not None and of_network >= most:
            return False
        if self.connections < self._limits.max_connections:
            return True
        idle = islice((one for one in self._networks if one._current_request is None), SHED_AMONG)  # noqa: SLF001
        shed = max(idle, key=lambda one: len(self._held[self._networks[one]]), default=None)
        if shed is None:
            largest = max(self._held.values(), key=len)
            if len(largest) <= max(of_network + 1, LARGE_SHARE * self._limits.max_connections):
                return False
            shed = next(iter(largest))
        self._forget(shed)
        if shed.transport is not None:
            shed.transport.abort()
        self.refused += 1
        return True

    def _lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._forget(handler)
        type(self._server).connection_lost(self._server, handler, exc)

    def _forget(self, handler: web.RequestHandler) -> None:
        network = self._networks.pop(handler, None)
        if network is not None:
            del self._held[network][handler]
            if not self._held[network]:
                del self._held[network]


async def listen(
    app: web.Application, *, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits = DEFAULT_SERVER_LIMITS
) -> Listener:
    """Serve `app` until `stop()`; port 0 picks a free one. Raises LocalFault "cannot_bind"."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise LocalFault(f"cannot listen on {host}:{port}: {error.strerror or error}", code="cannot_bind") from error
    bound.setblocking(False)
    allowed = allow_connections(limits.max_connections)
    if allowed < limits.max_connections:
        logger.warning(
            "taking %d connections at a time: raise the hard limit of open files (ulimit -Hn) for more", allowed
        )
    # Inherited by accepted sockets. Keepalive probes do not detect a live peer that reads nothing.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.unread_timeout_s * 1000))
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        logger=_http_logger,
        handler_cancellation=True,
        keepalive_timeout=limits.idle_timeout_s,
        shutdown_timeout=0.2,
        max_line_size=limits.max_request_line_bytes,
        max_field_size=limits.max_header_bytes,
        max_headers=limits.max_headers,
    )
    await runner.setup()
    return Listener(runner, bound, replace(limits, max_connections=allowed))
