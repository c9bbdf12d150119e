"""Who attacks the peer-to-peer network: it speaks TCP, Noise and Yamux with bytes of its own choice.

Each attacker calls from an address on loopback of its own, as if from another network.
"""

# ruff: noqa: TID251  (the attacker speaks libp2p)

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import AsyncIterator

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport

from node.p2p.host import peer_of
from node.p2p.links import PROTOCOL
from node.protocol.peers import Address

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
HEADER = struct.Struct("!BBHII")
WINDOW = 256 * 1024

_SOURCES = (f"127.0.{a}.{b}" for a, b in itertools.product(range(7, 250), range(1, 250)))


def new_source() -> str:
    """An address on loopback that nobody has called from yet."""
    return next(_SOURCES)


async def raw(address: Address, *, source: str | None = None) -> trio.SocketStream:
    """A TCP connection."""
    return await trio.open_tcp_stream(address.host, address.port, local_address=source)


class Refused(Exception):
    """The victim does not speak this protocol."""


class Gone(Exception):
    """The victim has ended the connection or the stream."""


class Hostile:
    """A Yamux connection over Noise, of which every frame is the attacker's.

    What the victim sends is kept by stream, if `reads`; its windows are opened again, if `grants`.
    """

    def __init__(self, secured: object, tcp: trio.SocketStream, *, grants: bool) -> None:
        self.secured, self.tcp, self.grants = secured, tcp, grants
        self.reads = True
        self.received: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.pongs = 0
        self.why: Exception | None = None
        self.gone = trio.Event()
        self._news = trio.Event()
        self._streams = itertools.count(1, 2)
        self._sending = trio.Lock()

    async def send(self, kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> None:
        """One Yamux frame; raises Gone."""
        await self.send_bytes(HEADER.pack(0, kind, flags, stream, length) + body)

    async def send_bytes(self, data: bytes) -> None:
        try:
            async with self._sending:
                await self.secured.write(data)
        except Exception as error:
            raise Gone from error

    async def data(self, stream: int, body: bytes, *, flags: int = 0, piece: int = 32 * 1024) -> None:
        """Bytes on a stream, whatever its window."""
        for start in range(0, len(body), piece):
            part = body[start : start + piece]
            await self.send(DATA, flags, stream, len(part), part)

    def new_stream(self) -> int:
        return next(self._streams)

    async def open(self, protocol: str = PROTOCOL) -> int:
        """A stream that has been negotiated; raises Refused, or Gone."""
        stream = self.new_stream()
        hello = spoken("/multistream/1.0.0") + spoken(protocol)
        await self.send(DATA, SYN, stream, len(hello), hello)
        answer = await self.read(stream, len(spoken("/multistream/1.0.0")))
        assert answer == spoken("/multistream/1.0.0"), answer
        size = (await self.read(stream, 1))[0]
        said = (await self.read(stream, size)).decode().strip()
        if said != protocol:
            raise Refused(said)
        return stream

    async def read(self, stream: int, size: int, *, seconds: float = 10.0) -> bytes:
        """So many bytes of a stream; raises Gone."""
        with trio.fail_after(seconds):
            while len(self.received.get(stream, b"")) < size:
                if stream in self.ended or self.gone.is_set():
                    raise Gone
                await self._news.wait()
        buffer = self.received[stream]
        data = bytes(buffer[:size])
        del buffer[:size]
        return data

    async def frame(self, stream: int, *, seconds: float = 10.0) -> bytes:
        """The next frame of a link; raises Gone."""
        size = int.from_bytes(await self.read(stream, 4, seconds=seconds))
        return await self.read(stream, size, seconds=seconds)

    async def until_ended(self, stream: int, *, seconds: float = 10.0) -> None:
        """Until the victim has ended the stream, or everything."""
        with trio.fail_after(seconds):
            while stream not in self.ended and not self.gone.is_set():
                await self._news.wait()

    async def listen(self) -> None:
        """Take what comes; ends with the connection."""
        try:
            while self.reads:
                header = await self._exactly(HEADER.size)
                _, kind, flags, stream, length = HEADER.unpack(header)
                if kind == DATA:
                    body = await self._exactly(length) if length else b""
                    self.received.setdefault(stream, bytearray()).extend(body)
                    if length and self.grants:
                        await self.send(WINDOW_UPDATE, 0, stream, length)
                elif kind == PING and flags & ACK:
                    self.pongs += 1
                elif kind == PING:
                    await self.send(PING, ACK, 0, length)
                elif kind == GO_AWAY:
                    break
                if flags & (FIN | RST):
                    self.ended.add(stream)
                self._note()
        except Exception as error:  # noqa: BLE001  (an end of the connection, however libp2p tells it)
            self.why = error
        if self.reads:
            self.gone.set()
        self._note()

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self.tcp)

    def _note(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self.secured.read(size - len(data))
            if not piece:
                raise Gone
            data += piece
        return data


def spoken(text: str) -> bytes:
    """A message of multistream-select: its length and a line."""
    line = text.encode() + b"\n"
    assert len(line) < 128
    return bytes([len(line)]) + line


async def negotiated(connection: object, protocol: str) -> None:
    """Agree on a protocol as whoever calls does."""
    chosen = [TProtocol(protocol)]
    await MultiselectClient().select_one_of(chosen, MultiselectCommunicator(connection), 10)


async def shaken(
    address: Address, *, key: Ed25519PrivateKey | None = None, source: str | None = None
) -> tuple[object, trio.SocketStream]:
    """A connection that has shaken hands as the owner of `key`, without a muxer yet."""
    tcp = await raw(address, source=source)
    try:
        connection = RawConnection(TrioTCPStream(tcp), True)
        await negotiated(connection, NOISE)
        pair = create_new_key_pair((key or Ed25519PrivateKey.generate()).private_bytes_raw())
        transport = Transport(pair, create_noise_key_pair().private_key)
        return await transport.secure_outbound(connection, peer_of(address.node)), tcp
    except BaseException:
        await trio.aclose_forcefully(tcp)
        raise


async def muxed(address: Address, *, key: Ed25519PrivateKey | None, source: str) -> tuple[object, trio.SocketStream]:
    """A connection that has shaken hands and agreed on the muxer."""
    secured, tcp = await shaken(address, key=key, source=source)
    try:
        await negotiated(secured, "/yamux/1.0.0")
    except BaseException:
        await trio.aclose_forcefully(tcp)
        raise
    return secured, tcp


@contextlib.asynccontextmanager
async def hostile(
    address: Address,
    *,
    key: Ed25519PrivateKey | None = None,
    source: str | None = None,
    grants: bool = True,
    tries: int = 3,
) -> AsyncIterator[Hostile]:
    """A connection to the victim that follows no rule but the attacker's.

    A handshake that a pause of the machine has outlasted is tried again.
    """
    source = source or new_source()
    for left in reversed(range(tries)):
        try:
            secured, tcp = await muxed(address, key=key, source=source)
            break
        except Exception:
            if not left:
                raise
    connection = Hostile(secured, tcp, grants=grants)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.listen)
        try:
            yield connection
        finally:
            await connection.close()
            nursery.cancel_scope.cancel()
