"""A relay, a peer that has reserved there and is called by nobody, and a stranger: three real hosts on loopback."""

# ruff: noqa: TID251  (what is tested is what speaks libp2p)

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage

from node.p2p.circuits import HOP, STOP, peer_id_message, reach, read_message, write_message
from node.p2p.host import HostLimits, connect, listening_port, peer_of, running_host
from node.p2p.relaying import CircuitRelay, RelayLimits
from node.p2p.reserving import Reservations
from node.protocol.peers import Address

ECHO = TProtocol("/test/echo/1")
SECONDS = 20.0
DEFAULT = RelayLimits()


@dataclass
class Member:
    """A host and where it listens."""

    host: IHost
    address: Address

    @property
    def node(self) -> bytes:
        """Its public key."""
        return self.address.node

    async def call(self, other: Address) -> None:
        """Be connected to it directly."""
        await connect(self.host, other, seconds=SECONDS)

    async def echo(self, other: bytes, data: bytes = b"hello") -> bytes:
        """What the other says to it: the same, if all is well."""
        with trio.fail_after(SECONDS):
            stream = await self.host.new_stream(peer_of(other), [ECHO])
            await stream.write(data)
            got = b""
            while len(got) < len(data):
                got += await stream.read(len(data) - len(got))
            await stream.reset()
            return got

    async def ask(self, relay: Address, request: HopMessage) -> int:
        """With what status a relay answers."""
        stream = await self.host.new_stream(peer_of(relay.node), [HOP])
        await write_message(stream, request)
        answer = await read_message(stream, HopMessage)
        await stream.reset()
        return answer.status

    async def reserve(self, relay: Address) -> int:
        """Ask for a reservation as an honest peer does."""
        return await self.ask(relay, HopMessage(type=HopMessage.RESERVE))

    async def ask_for(self, relay: Address, target: bytes) -> int:
        """Ask for a circuit, and leave it at once."""
        return await self.ask(relay, HopMessage(type=HopMessage.CONNECT, peer=peer_id_message(target)))


@dataclass
class Scene:
    """`unwanted`: with whom the relay and the home want nothing. `needed`: whether the home needs a relay."""

    stack: contextlib.AsyncExitStack
    limits: RelayLimits
    unwanted: set[bytes] = field(default_factory=set)
    needed: bool = True

    async def begin(self) -> None:
        """Start the three, and wait until the home has reserved."""
        nursery = await self.stack.enter_async_context(trio.open_nursery())
        self.stack.callback(nursery.cancel_scope.cancel)
        self.relay, self.home, self.stranger, self.friend = [await self.join() for _ in range(4)]
        self.relaying = CircuitRelay(self.relay.host, self.limits, unwanted=self.unwanted.__contains__)
        self.relay.host.set_stream_handler(HOP, self.relaying.serve)
        self.reservations = Reservations(
            self.home.host,
            self.home.node,
            relays=lambda: [self.relay.address],
            needed=lambda: self.needed,
            changed=lambda: None,
            unwanted=self.unwanted.__contains__,
        )
        self.home.host.set_stream_handler(STOP, self.reservations.serve)
        nursery.start_soon(self.reservations.run)
        await self.stranger.call(self.relay.address)
        await self.friend.call(self.relay.address)
        await self.settle(self.reservations.addresses)

    async def join(self) -> Member:
        """One more host, connected to nobody."""
        key = Ed25519PrivateKey.generate()
        host = await self.stack.enter_async_context(running_host(key, "/ip4/127.0.0.1/tcp/0", HostLimits()))
        host.set_stream_handler(ECHO, echo)
        node = key.public_key().public_bytes_raw()
        return Member(host, Address("ip4", "127.0.0.1", listening_port(host), node))

    async def visitor(self) -> Member:
        """One more host, connected to the relay."""
        member = await self.join()
        await member.call(self.relay.address)
        return member

    @property
    def circuit(self) -> Address:
        """Where the home is reached."""
        return self.reservations.addresses()[0]

    async def settle(self, condition: Callable[[], object]) -> None:
        """Wait until it holds; raises trio.TooSlowError."""
        with trio.fail_after(SECONDS):
            while not condition():  # noqa: ASYNC110  (what is waited for is no event)
                await trio.sleep(0.02)

    async def assert_sound(self) -> None:
        """Relay and home are alive and in touch, and an honest peer reaches the home."""
        assert await self.friend.echo(self.relay.node) == b"hello"
        await self.settle(self.reservations.addresses)
        await reach(self.friend.host, self.circuit, seconds=SECONDS)
        assert await self.friend.echo(self.home.node) == b"hello"
        await self.friend.host.disconnect(peer_of(self.home.node))


async def echo(stream: INetStream) -> None:
    """Send back what comes."""
    while data := await stream.read(2**16):
        await stream.write(data)


def leaf(error: BaseException) -> BaseException:
    """The first in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def on_circuits(
    limits: RelayLimits = DEFAULT, *, seconds: float = 200.0
) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[], None]]:
    """Make a test of a coroutine that plays in a scene, on a trio loop of its own."""

    def decorate(play: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
        async def main() -> None:
            with trio.fail_after(seconds):
                async with contextlib.AsyncExitStack() as stack:
                    scene = Scene(stack, limits)
                    await scene.begin()
                    await play(scene)

        def test() -> None:
            try:
                trio.run(main)
            except BaseExceptionGroup as group:
                raise leaf(group) from None  # one nursery of libp2p in another make a group in a group
            finally:
                # libp2p leaves the sockets of connections to the garbage collector.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)
                    gc.collect()

        test.__doc__ = play.__doc__
        return test

    return decorate
