"""Accepting connections from strangers: bounded in number, per address, and in time.

aiohttp bounds the request line and headers, and closes a connection that sends no complete request within
`idle_timeout_s`. What it lacks is added here: connections per address and in all, refused at accept, and
TCP_USER_TIMEOUT, which ends a peer that stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http import HttpProcessingError

from shardcast.errors import LocalFault

logger = logging.getLogger(__name__)


class _NotAboutStrangers(logging.Filter):
    """Drops aiohttp's traceback for each request that is not HTTP: anyone could fill the log with them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_NotAboutStrangers())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What strangers may take. Behind a NAT or on loopback one address is many nodes."""

    max_connections: int = 4096
    max_connections_per_address: int = 512
    idle_timeout_s: float = 30.0
    transfer_timeout_s: float = 120.0
    max_wait_s: float = 30.0
    max_request_line_bytes: int = 1024
    max_header_bytes: int = 2048
    max_headers: int = 32
    unread_timeout_s: float = 60.0


DEFAULT_SERVER_LIMITS = ServerLimits()


class Listener:
    """One bound port that serves one aiohttp application; use `listen` to make one."""

    def __init__(self, runner: web.AppRunner, bound: socket.socket, limits: ServerLimits) -> None:
        self._runner = runner
        self._socket = bound
        self._limits = limits
        self.refused = 0
        self._accepting = asyncio.create_task(self._accept_forever())

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        server = self._runner.server
        return 0 if server is None else len(server.connections)

    async def stop(self) -> None:
        """Stop accepting, then close what is open."""
        self._accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting
        self._socket.close()
        await self._runner.cleanup()

    async def _accept_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._socket)
            except OSError as error:  # out of descriptors, or reset before it was accepted
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            try:
                await self._admit(connection, str(address[0]))
            except OSError:
                connection.close()

    async def _admit(self, connection: socket.socket, address: str) -> None:
        server = self._runner.server
        if server is None or not self._has_room(server, address):
            self.refused += 1
            connection.close()
            return
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(server, connection)

    def _has_room(self, server: web.Server, address: str) -> bool:
        peers = [handler.peername for handler in server.connections]
        from_here = sum(1 for peer in peers if peer is not None and peer[0] == address)
        return len(peers) < self._limits.max_connections and from_here < self._limits.max_connections_per_address


async def listen(
    app: web.Application, *, host: str = "127.0.0.1", port: int = 0, limits: ServerLimits = DEFAULT_SERVER_LIMITS
) -> Listener:
    """Serve `app` until `stop()`; port 0 takes a free one. Raises LocalFault "cannot_bind"."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise LocalFault(f"cannot listen on {host}:{port}: {error.strerror or error}", code="cannot_bind") from error
    bound.setblocking(False)
    # Accepted sockets inherit it. Keepalive probes do not notice a peer that is alive and reads nothing.
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
    return Listener(runner, bound, limits)
