"""A process that speaks the link protocol and means harm: `--kind` says which. It ends when its standard input does.

    silent    calls everybody, is called, takes all frames, and never passes one on
    stale     tells everybody, four times a second, of the first descriptor that it saw
    forged    sends newer descriptors that the run did not sign, and real ones with a flipped bit
    dead      introduces peers that do not exist: at closed ports, and at ports that take calls and say nothing
    flood     sends frames as fast as they are taken, and holds connections open that never shake hands
    garbage   sends lengths that no frame has, noise, halves of frames, and noise to the bare port

All of them call every address that they hear of, and are good peers to the eye until then: they have signed records,
and listen where these say. Who is cut off comes back at once under another key. Each calls from an address of loopback
of its own, as each attacker in the world has a network of his own. They have the lowest priority that the system knows:
what is measured is what their bytes do, not what their processes take of two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio  # noqa: TID251  (an attacker brings his own)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IHost, INetStream  # noqa: TID251
from libp2p.custom_types import TProtocol  # noqa: TID251
from msgspec import structs

from node.discovery.descriptor import MAX_ENVELOPE_BYTES
from node.p2p.frames import read_frame, write_frame
from node.p2p.host import HostLimits, connect, listening_port, peer_of, running_host
from node.p2p.links import PROTOCOL
from node.protocol.peers import Address, Invitation, PeerRecord, open_peer, parse_join, sign_peer
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, PolicyHead, open_descriptor
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import encode

LOOK_SECONDS: Final = 0.5
LIFE_SECONDS: Final = 3.0
"""Lifetime of an identity that is shunned at its first frame."""

LISTEN_SECONDS: Final = 0.3
"""Before that: whom the neighbour introduces is worth knowing."""

LONG_LIFE_SECONDS: Final = 600.0
RECORD_SECONDS: Final = 1800
HELD_OPEN: Final = 16
LIMITS: Final = HostLimits(connections=1024, per_peer=8)
SHORT_LIVED: Final = {"forged", "garbage"}


class Attacker:
    """An attacking process, under one key after another."""

    def __init__(self, kind: str, invitation: Invitation, host: str, rng: random.Random) -> None:
        self.run_id = invitation.run_id
        self.kind, self._host, self._rng = kind, host, rng
        self._known = dict.fromkeys(invitation.peers)
        self._first: bytes | None = None
        self._newest: bytes | None = None
        self._traps: list[int] = []

    async def run(self) -> None:
        """Live one identity after another."""
        async with trio.open_nursery() as nursery:
            if self.kind == "dead":
                await self._set_traps(nursery)
            if self.kind in {"flood", "garbage"}:
                nursery.start_soon(self._knock)
            while True:
                seconds = LIFE_SECONDS if self.kind in SHORT_LIVED else LONG_LIFE_SECONDS
                with trio.move_on_after(seconds), contextlib.suppress(Exception):
                    await self._live(Ed25519PrivateKey.generate())

    async def _live(self, key: Ed25519PrivateKey) -> None:
        called: set[Address] = set()
        async with running_host(key, f"/ip4/{self._host}/tcp/0", LIMITS) as host, trio.open_nursery() as nursery:
            own = Address("ip4", self._host, listening_port(host), key.public_key().public_bytes_raw())
            record = self._record(key, own)

            async def talk(stream: INetStream) -> None:
                await self._talk(stream, record)

            async def call(address: Address) -> None:
                with contextlib.suppress(Exception):
                    await connect(host, address, seconds=LIMITS.dial_seconds)
                    await talk(await _stream(host, address))
                called.discard(address)

            host.set_stream_handler(TProtocol(PROTOCOL), talk)
            while True:
                for address in [one for one in self._known if one not in called and one.node != own.node]:
                    called.add(address)
                    nursery.start_soon(call, address)
                await trio.sleep(LOOK_SECONDS)

    async def _talk(self, stream: INetStream, record: bytes) -> None:
        with contextlib.suppress(Exception):
            await write_frame(stream, record)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._attacks[self.kind].__get__(self), stream)
                while frame := await read_frame(stream, max_bytes=MAX_ENVELOPE_BYTES, idle_seconds=LONG_LIFE_SECONDS):
                    self._learn(frame)
                nursery.cancel_scope.cancel()

    def _learn(self, frame: bytes) -> None:
        now = time.time()
        with contextlib.suppress(PeerFault):
            for address in open_peer(frame, run_id=self.run_id, now=now).addresses:
                self._known.setdefault(address)
        with contextlib.suppress(PeerFault):
            open_descriptor(frame, run_id=self.run_id, now=now)
            self._first, self._newest = self._first or frame, frame

    async def _silent(self, stream: INetStream) -> None:
        while True:
            await trio.sleep(30)
            await write_frame(stream, b"")

    async def _stale(self, stream: INetStream) -> None:
        while True:
            await trio.sleep(0.25)
            if self._first is not None:
                await write_frame(stream, self._first)

    async def _forged(self, stream: INetStream) -> None:
        await trio.sleep(LISTEN_SECONDS)
        if self._newest is None:
            return
        real, _ = open_descriptor(self._newest, run_id=self.run_id, now=time.time())
        lie = structs.replace(real, version=real.version + 1, head=PolicyHead(version=10**6, manifest_digest="0" * 64))
        forged = seal(
            encode(lie), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=Ed25519PrivateKey.generate()
        )
        flipped = bytearray(self._newest)
        flipped[self._rng.randrange(len(flipped))] ^= 1 << self._rng.randrange(8)
        for frame in self._rng.sample((forged, bytes(flipped)), 2):
            await write_frame(stream, frame)

    async def _dead(self, stream: INetStream) -> None:
        while True:
            key = Ed25519PrivateKey.generate()
            port = self._rng.choice([*self._traps, self._rng.randrange(1024, 2048)])
            await write_frame(
                stream, self._record(key, Address("ip4", self._host, port, key.public_key().public_bytes_raw()))
            )
            await trio.sleep(0.05)

    async def _flood(self, stream: INetStream) -> None:
        while True:
            await write_frame(stream, self._newest or b"")

    async def _garbage(self, stream: INetStream) -> None:
        await trio.sleep(LISTEN_SECONDS)
        noise = self._rng.randbytes(200)
        frames = (
            b"\xff\xff\xff\xff" + noise,
            len(noise).to_bytes(4) + noise,
            (1000).to_bytes(4) + noise,
            (MAX_ENVELOPE_BYTES + 1).to_bytes(4),
        )
        await stream.write(self._rng.choice(frames))
        await trio.sleep(LIFE_SECONDS)

    def _record(self, key: Ed25519PrivateKey, address: Address) -> bytes:
        now = int(time.time())
        record = PeerRecord(
            run_id=self.run_id, addresses=(str(address),), issued_at=now, expires_at=now + RECORD_SECONDS
        )
        return sign_peer(record, key=key)

    async def _set_traps(self, nursery: trio.Nursery) -> None:
        for _ in range(HELD_OPEN):
            (listener,) = await trio.open_tcp_listeners(0, host=self._host)
            self._traps.append(listener.socket.getsockname()[1])
            nursery.start_soon(trio.serve_listeners, _swallow, [listener])

    async def _knock(self) -> None:
        """Open bare connections to known addresses: silent ones, or with noise where a handshake belongs."""
        async with trio.open_nursery() as nursery:
            held = trio.CapacityLimiter(HELD_OPEN * 8)

            async def hold(address: Address) -> None:
                async with held:
                    with contextlib.suppress(Exception):
                        stream = await trio.open_tcp_stream(address.host, address.port)
                        async with stream:
                            if self.kind == "garbage":
                                await stream.send_all(self._rng.randbytes(300))
                            await stream.receive_some(1)
                            await stream.receive_some(1000)

            while True:
                for address in list(self._known):
                    if held.available_tokens > 0:
                        nursery.start_soon(hold, address)
                await trio.sleep(0.1)

    _attacks: Final[dict[str, Callable[..., Awaitable[None]]]] = {
        "silent": _silent,
        "stale": _stale,
        "forged": _forged,
        "dead": _dead,
        "flood": _flood,
        "garbage": _garbage,
    }


KINDS: Final = ("forged", "silent", "flood", "stale", "dead", "garbage")


async def _swallow(_stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def _stream(host: IHost, address: Address) -> INetStream:
    return await host.new_stream(peer_of(address.node), [TProtocol(PROTOCOL)])


async def until_told(attacker: Attacker) -> None:
    """Attack until standard input ends."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(attacker.run)
        standard_input = trio.lowlevel.FdStream(os.dup(0))
        while await standard_input.receive_some():
            pass
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--host", required=True, help="the address of loopback to call from")
    options = parser.parse_args()
    yield_to_others()
    # libp2p has no setting for it.
    trio.open_tcp_stream = functools.partial(trio.open_tcp_stream, local_address=options.host)
    trio.run(until_told, Attacker(options.kind, parse_join(options.join), options.host, random.Random()))


def yield_to_others() -> None:
    """Run only when nobody else wants to; each session has a share of its own, which has a priority, too."""
    os.nice(19)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


if __name__ == "__main__":
    main()
