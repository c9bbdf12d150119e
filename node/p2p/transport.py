"""TCP and Yamux with the limits that py-libp2p 0.8.1 lacks.

There a peer may send any number of bytes beyond its window, open any number of streams, and read nothing, forever; here
such a connection is closed. Honest traffic is small and rare, far from these limits.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, Final, cast

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, IRawConnection, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux import yamux
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

from shardcast.rate_limit import TokenBucket

MAX_STREAMS: Final = 64
"""Per connection, including half-closed streams and those not read to their end."""

MAX_HELD_BYTES: Final = 2**20
"""Received and unread bytes per connection; four Yamux windows."""

WRITE_SECONDS: Final = 10.0
"""Deadline for a peer to read 64 KiB."""

READS_PER_SECOND: Final = 1000.0
BURST_READS: Final = 8000
YAMUX_FRAMES_PER_SECOND: Final = 300.0
BURST_YAMUX_FRAMES: Final = 3000
"""Rate limit per connection, in TCP reads and Yamux frames; an envelope takes a few of both."""

# libp2p doubles the window up to 16 MiB while a stream is read fast, which a peer could then fill unread.
yamux.MAX_WINDOW_SIZE = yamux.DEFAULT_WINDOW_SIZE


async def _update_window(stream: yamux.YamuxStream, *, bytes_read: int = 0) -> None:  # noqa: ARG001  (libp2p's name)
    """Send a window update once half of the window is free, as Yamux's specification does.

    libp2p updates after each read, which makes up two thirds of a link's packets, and grants twice the bytes that were
    read.
    """
    async with stream.window_lock:
        buffered = len(stream.conn.stream_buffers.get(stream.stream_id, b""))
        free = stream.target_recv_window - (stream.recv_window + buffered)
        if free < stream.target_recv_window // 2:
            return
        stream.recv_window += free
    await stream.send_window_update(free, skip_lock=True)


yamux.YamuxStream._auto_tune_and_send_window_update = _update_window  # type: ignore[method-assign,assignment]  # noqa: SLF001


class TrioTokenBucket:
    """Token bucket on a clock of its own, which can be waited for."""

    def __init__(self, *, rate: float, burst: int, clock: Callable[[], float] = trio.current_time) -> None:
        self._bucket, self._clock = TokenBucket(rate=rate, burst=burst), clock

    async def acquire(self) -> None:
        """Take a token, waiting for it."""
        wait_seconds = self._bucket.take_or_owe(self._clock())
        if wait_seconds > 0:
            await trio.sleep(wait_seconds)

    def try_acquire(self) -> bool:
        """Take a token if one is available; return whether it was."""
        return self._bucket.try_take(self._clock())


class TcpStream(TrioTCPStream):
    """TCP stream whose writes are completed despite cancellation, or close the connection.

    Half a Noise message would leave the peer unable to read any stream.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self._bucket = TrioTokenBucket(rate=READS_PER_SECOND, burst=BURST_READS)
        self._remote = _remote(stream)

    async def read(self, n: int | None = None) -> bytes:
        """Read at most `n` bytes, none at the end."""
        await self._bucket.acquire()
        return await super().read(n)

    async def write(self, data: bytes) -> None:
        """Write all of `data`; raises ConnectionClosedError."""
        with trio.CancelScope(deadline=trio.current_time() + WRITE_SECONDS, shield=True) as scope:
            await super().write(data)
        if scope.cancelled_caught:
            self.stop()
            raise ConnectionClosedError("peer does not read", transport="tcp")

    def stop(self) -> None:
        """Close the socket at once."""
        self.stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return (host, port), also for IPv6, which libp2p omits."""
        return self._remote


def _remote(stream: trio.SocketStream) -> tuple[str, int] | None:
    try:
        host, port = stream.socket.getpeername()[:2]
        ip = ipaddress.ip_address(host.partition("%")[0])
    except (OSError, ValueError):
        return None
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return str(mapped or ip), port


class BoundedMuxer(yamux.Yamux):
    """Yamux that closes the connection of a peer with too many streams or unread bytes."""

    def __init__(self, secured: ISecureConn, peer_id: ID) -> None:
        super().__init__(cast("ISecureConn", _RateLimited(secured)), peer_id, is_initiator=secured.is_initiator)
        self.opened_at = self.used_at = trio.current_time()
        self.tcp: TcpStream | None = None

    async def accept_stream(self) -> IMuxedStream:
        """Accept the peer's next stream; raises MuxedConnUnavailable."""
        stream = await super().accept_stream()
        self.used_at = trio.current_time()
        if len(self.streams) > MAX_STREAMS:
            raise MuxedConnUnavailable("too many streams")
        return stream

    async def open_stream(self) -> yamux.YamuxStream:
        """Open a stream."""
        self.used_at = trio.current_time()
        return await super().open_stream()

    async def _read_data_body(self, length: int) -> bytes:
        held = sum(map(len, self.stream_buffers.values()))
        if held + length > MAX_HELD_BYTES:
            # The one error that closes the connection wherever it is raised.
            raise trio.TooSlowError
        return await super()._read_data_body(length)


class _RateLimited:
    """Secured connection with rate-limited reads."""

    def __init__(self, secured: ISecureConn) -> None:
        self._secured = secured
        self._bucket = TrioTokenBucket(rate=YAMUX_FRAMES_PER_SECOND, burst=BURST_YAMUX_FRAMES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._secured, name)

    async def read(self, n: int | None = None) -> bytes:
        await self._bucket.acquire()
        return await self._secured.read(n)


class Upgrader(TransportUpgrader):
    """Upgrades every connection to a `BoundedMuxer`."""

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Negotiate Yamux; raises MuxerUpgradeFailure."""
        try:
            await self.muxer_multistream.select_transport(cast("IRawConnection", conn))
        except MultiselectError as error:
            raise MuxerUpgradeFailure("no common muxer") from error
        return BoundedMuxer(conn, peer_id)
