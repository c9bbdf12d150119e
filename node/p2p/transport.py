"""What a connection is made of, TCP below and Yamux above, each with the limits that py-libp2p 0.8.1 does not have.

There a peer may send any number of bytes beyond its window, open any number of streams, and take nothing, each for
ever; who does is cut off here. No honest peer comes near: what goes over these connections is small and rare.
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

MAX_STREAMS: Final = 64
"""Of one connection, those included that are open on one side only, or not read to their end."""

MAX_HELD_BYTES: Final = 2**20
"""Of one connection, received and not read yet; four of Yamux's windows."""

WRITE_SECONDS: Final = 10.0
"""In which a peer must take 64 KiB."""

READS_PER_SECOND: Final = 1000.0
BURST_READS: Final = 8000
YAMUX_FRAMES_PER_SECOND: Final = 300.0
BURST_YAMUX_FRAMES: Final = 3000
"""So much attention a connection gets, in reads of TCP and in frames of Yamux: an envelope takes a few of both."""

# It doubles while a stream is read fast, up to 16 MiB, which a peer may then send where nothing is read any more.
yamux.MAX_WINDOW_SIZE = yamux.DEFAULT_WINDOW_SIZE


async def _update_window(stream: yamux.YamuxStream, *, bytes_read: int = 0) -> None:  # noqa: ARG001  (libp2p's name)
    """Let the peer send more once half of the window is free, as Yamux's specification and every other one do it.

    libp2p's tells it after each read, which are two of three packets of a link, and twice as many bytes as were read.
    """
    async with stream.window_lock:
        buffered = len(stream.conn.stream_buffers.get(stream.stream_id, b""))
        free = stream.target_recv_window - (stream.recv_window + buffered)
        if free < stream.target_recv_window // 2:
            return
        stream.recv_window += free
    await stream.send_window_update(free, skip_lock=True)


yamux.YamuxStream._auto_tune_and_send_window_update = _update_window  # type: ignore[method-assign,assignment]  # noqa: SLF001


class Pace:
    """A token bucket: `rate` a second, after a burst."""

    def __init__(self, *, rate: float, burst: int, clock: Callable[[], float] = trio.current_time) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left, self._at = float(burst), 0.0

    async def take(self) -> None:
        """Take one; waits for it."""
        self._refill()
        self._left -= 1
        if self._left < 0:
            await trio.sleep(-self._left / self._rate)

    def take_now(self) -> bool:
        """Take one if there is one."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _refill(self) -> None:
        now = self._clock()
        self._left, self._at = min(self._burst, self._left + (now - self._at) * self._rate), now


class TcpStream(TrioTCPStream):
    """TCP as libp2p wants it. What is written is written whole, whoever is cancelled meanwhile, or the connection ends.

    Half a message of Noise leaves the peer with nothing that it can read, on any stream.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self._pace = Pace(rate=READS_PER_SECOND, burst=BURST_READS)
        self._remote = _remote(stream)

    async def read(self, n: int | None = None) -> bytes:
        """At most `n` bytes, none at the end."""
        await self._pace.take()
        return await super().read(n)

    async def write(self, data: bytes) -> None:
        """All of `data`; raises ConnectionClosedError."""
        with trio.CancelScope(deadline=trio.current_time() + WRITE_SECONDS, shield=True) as scope:
            await super().write(data)
        if scope.cancelled_caught:
            self.stop()
            raise ConnectionClosedError("the peer takes nothing", transport="tcp")

    def stop(self) -> None:
        """End it at once."""
        self.stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port, also of IPv6, which libp2p leaves out."""
        return self._remote


def _remote(stream: trio.SocketStream) -> tuple[str, int] | None:
    try:
        host, port = stream.socket.getpeername()[:2]
        ip = ipaddress.ip_address(host.partition("%")[0])
    except (OSError, ValueError):
        return None
    mapped = ip.ipv4_mapped if ip.version == 6 else None
    return str(mapped or ip), port


class Muxer(yamux.Yamux):
    """Yamux that ends the connection of a peer with too many streams, or too much that nobody has read."""

    def __init__(self, secured: ISecureConn, peer_id: ID) -> None:
        super().__init__(cast("ISecureConn", _Paced(secured)), peer_id, is_initiator=secured.is_initiator)
        self.opened_at = self.used_at = trio.current_time()
        self.tcp: TcpStream | None = None

    async def accept_stream(self) -> IMuxedStream:
        """The next stream that the peer opens; raises MuxedConnUnavailable."""
        stream = await super().accept_stream()
        self.used_at = trio.current_time()
        if len(self.streams) > MAX_STREAMS:
            raise MuxedConnUnavailable("too many streams")
        return stream

    async def open_stream(self) -> yamux.YamuxStream:
        """A stream of this node's own."""
        self.used_at = trio.current_time()
        return await super().open_stream()

    async def _read_data_body(self, length: int) -> bytes:
        held = sum(map(len, self.stream_buffers.values()))
        if held + length > MAX_HELD_BYTES:
            # The one error that ends the connection wherever it is raised from.
            raise trio.TooSlowError
        return await super()._read_data_body(length)


class _Paced:
    """A secured connection of which a peer gets only so many reads a second."""

    def __init__(self, secured: ISecureConn) -> None:
        self._secured = secured
        self._pace = Pace(rate=YAMUX_FRAMES_PER_SECOND, burst=BURST_YAMUX_FRAMES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._secured, name)

    async def read(self, n: int | None = None) -> bytes:
        await self._pace.take()
        return await self._secured.read(n)


class Upgrader(TransportUpgrader):
    """Makes every connection one of `Muxer`."""

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Agree on Yamux; raises MuxerUpgradeFailure."""
        try:
            await self.muxer_multistream.select_transport(cast("IRawConnection", conn))
        except MultiselectError as error:
            raise MuxerUpgradeFailure("no muxer") from error
        return Muxer(conn, peer_id)
