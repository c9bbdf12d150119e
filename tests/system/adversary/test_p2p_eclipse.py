"""Eclipse: whoever a newcomer meets first lies to it, or is not there. It believes nothing, says why, and gets out."""

# ruff: noqa: E402, TID251  (liars speak libp2p, where it is installed)

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from coordinator.lab.processes.layout import free_ports

trio = pytest.importorskip("trio")
pytest.importorskip("libp2p")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.custom_types import TProtocol
from p2p_attacker import Gone, hostile, new_source
from p2p_scene import Process, SmallCoordinator, descriptor, record
from ports import free_port
from prepared_replies import OTHER_KEY, RUN_ID, sealed_descriptor
from waiting import until

from node.p2p.frames import write_frame
from node.p2p.host import HostLimits, listening_port, running_host
from node.p2p.links import PROTOCOL
from node.p2p.peers_file import save_peers
from node.protocol.peers import Address

Lie = Callable[[], list[bytes]]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A peer that knows version 7, which is the newest."""
    coordinator = SmallCoordinator()
    coordinator.post(descriptor(7), 7)
    process = Process(tmp_path_factory.mktemp("honest"), "--coordinator", coordinator.url, "--run-id", RUN_ID)
    until(lambda: version(process) == 7)
    yield process
    process.close()
    coordinator.close()


def version(process: Process) -> int:
    return process.status()["descriptor_version"]


def neighbours(process: Process) -> int:
    return len(process.status()["network"]["neighbours"])


@contextlib.asynccontextmanager
async def liars(*lies: Lie) -> AsyncIterator[list[Address]]:
    """Peers that listen like any other, and say to everybody who calls what is theirs to say, and nothing else."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for lie in lies:
            key, source = Ed25519PrivateKey.generate(), new_source()
            host = await stack.enter_async_context(running_host(key, f"/ip4/{source}/tcp/0", HostLimits()))
            host.set_stream_handler(TProtocol(PROTOCOL), functools.partial(tell, lie))
            addresses.append(Address("ip4", source, listening_port(host), key.public_key().public_bytes_raw()))
        yield addresses


async def tell(lie: Lie, stream) -> None:
    for frame in lie():
        await write_frame(stream, frame)
    while await stream.read(4096):
        pass


def silence() -> list[bytes]:
    return []


def another_run() -> list[bytes]:
    return [sealed_descriptor(key=OTHER_KEY)]


def forgery() -> list[bytes]:
    good = descriptor(99)
    return [good[:-64] + OTHER_KEY.sign(good[:-64])]


def garbage() -> list[bytes]:
    return [b"\x00" * 400]


def expired() -> list[bytes]:
    now = int(time.time())
    return [descriptor(8, issued_at=now - 90, expires_at=now - 30)]


def oldest() -> list[bytes]:
    return [descriptor(1)]


def own_kind() -> list[bytes]:
    """Fabricated peers, all of whom would be the liar's."""
    return [record(Ed25519PrivateKey.generate(), (f"127.99.{at}.1", 9)) for at in range(40)]


def joining(folder: Path, *addresses: Address, **options: object) -> Process:
    """A newcomer that is told of these peers."""
    arguments = [part for address in addresses for part in ("--join", str(address))]
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    return Process(folder, "--run-id", RUN_ID, *arguments)


@contextlib.contextmanager
def closing(process: Process) -> Iterator[Process]:
    try:
        yield process
    finally:
        process.close()


def run(scene: Callable[[], object]) -> None:
    """Liars live on this loop; whoever waits for a process does so on a thread."""
    trio.run(scene)


async def eventually(condition: Callable[[], object], *, seconds: float = 120.0) -> None:
    await trio.to_thread.run_sync(functools.partial(until, condition, seconds=seconds))


# -- all that it meets lie


def test_all_bootstrap_peers_lie_and_nothing_of_it_is_believed(tmp_path: Path, honest: Process) -> None:
    """Not by any of them, nor by all together; it says so, and is in the run as soon as one that is honest is there."""
    port = free_port()

    async def scene() -> None:
        async with liars(another_run, forgery, garbage, expired, silence, own_kind) as addresses:
            late = Address("ip4", "127.0.0.1", port, honest.node)
            with closing(joining(tmp_path / "newcomer", *addresses, late)) as newcomer:
                await eventually(lambda: newcomer.log().count("shunned") >= 3)
                await trio.sleep(1)
                assert version(newcomer) == -1
                lines = newcomer.log().splitlines()
                assert sum("signed by the key of another run" in line for line in lines) == 1, "one line for each liar"
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(forward, port, honest.address.port)
                    await eventually(lambda: version(newcomer) == 7)
                    nursery.cancel_scope.cancel()
                assert len(newcomer.log().splitlines()) < 15

    run(scene)


async def forward(port: int, to: int) -> None:
    """The honest peer, reached at another port from now on."""

    async def serve(inward: trio.SocketStream) -> None:
        async def copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async for data in source:
                    await sink.send_all(data)
            nursery.cancel_scope.cancel()

        async with await trio.open_tcp_stream("127.0.0.1", to) as onward, inward, trio.open_nursery() as nursery:
            nursery.start_soon(copy, inward, onward)
            nursery.start_soon(copy, onward, inward)

    await trio.serve_tcp(serve, port, host="127.0.0.1")


def test_silent_liars_that_are_enough_neighbours_do_not_keep_it_from_others(tmp_path: Path, honest: Process) -> None:
    """Ten that answer, keep their links and say nothing; the eleventh is honest."""

    async def scene() -> None:
        async with liars(*[silence] * 10) as addresses:
            with closing(joining(tmp_path / "newcomer", *addresses, honest.address)) as newcomer:
                await eventually(lambda: version(newcomer) == 7)

    run(scene)


def test_a_lying_bootstrap_peer_is_no_match_for_peers_that_are_remembered(tmp_path: Path, honest: Process) -> None:
    met = []

    async def meet() -> None:
        async with hostile(honest.address) as connection:
            stream = await connection.open()
            while not met:
                frame = await connection.frame(stream)
                met.extend([frame] if b"swarmproof/peer" in frame[:32] else [])

    async def scene() -> None:
        async with liars(forgery, silence) as addresses:
            with closing(joining(tmp_path / "newcomer", *addresses)) as newcomer:
                await eventually(lambda: version(newcomer) == 7)

    run(meet)
    save_peers(tmp_path / "newcomer" / "peers", met)
    run(scene)


def test_a_lying_bootstrap_peer_is_no_match_for_a_coordinator(tmp_path: Path) -> None:
    coordinator = SmallCoordinator()
    coordinator.post(descriptor(9), 9)

    async def scene() -> None:
        async with liars(forgery, oldest, silence) as addresses:
            with closing(joining(tmp_path / "newcomer", *addresses, coordinator=coordinator.url)) as newcomer:
                await eventually(lambda: version(newcomer) == 9)

    run(scene)
    coordinator.close()


def test_stale_descriptors_hold_until_one_newer_is_seen_and_never_again(tmp_path: Path, honest: Process) -> None:
    """The oldest one that still holds is all that a liar without the run's key can say; also after a restart."""

    async def scene() -> None:
        async with liars(oldest, oldest, oldest) as addresses:
            folder = tmp_path / "newcomer"
            with closing(joining(folder, *addresses)) as newcomer:
                await eventually(lambda: version(newcomer) == 1)
            with closing(joining(folder, *addresses, honest.address)) as newcomer:
                await eventually(lambda: version(newcomer) == 7)
            (folder / "status.json").unlink()
            with closing(joining(folder, *addresses)) as newcomer:
                await eventually(lambda: neighbours(newcomer) >= 3)
                assert version(newcomer) == 7

    run(scene)


def test_equivocating_descriptors_are_kept_as_evidence(tmp_path: Path) -> None:
    """The run's own key tells nodes different things: whoever sees both has the proof."""

    def one() -> list[bytes]:
        return [descriptor(3, endpoints=("http://192.0.2.1:1",))]

    def other() -> list[bytes]:
        return [descriptor(3, endpoints=("http://192.0.2.2:1",))]

    async def scene() -> None:
        async with liars(one, other) as addresses:
            with closing(joining(tmp_path / "newcomer", *addresses)) as newcomer:
                kept = tmp_path / "newcomer" / "evidence"
                await eventually(lambda: len(list(kept.glob("descriptor-3-*.bin"))) == 2)
                await eventually(lambda: version(newcomer) == 3)
                said = "signed two different descriptors of version 3"
                await eventually(lambda: said in newcomer.log())
                assert newcomer.log().count(said) == 1

    run(scene)


def test_neighbours_that_call_in_do_not_choose_for_a_node_whom_it_calls(tmp_path: Path, honest: Process) -> None:
    """Enough links from outside, before it has found anybody: it must go on to look for peers of its own choice."""
    port = free_port()

    async def scene() -> None:
        late = Address("ip4", "127.0.0.1", port, honest.node)
        with closing(joining(tmp_path / "victim", late)) as victim:
            async with trio.open_nursery() as nursery:
                for _ in range(12):
                    nursery.start_soon(link_in, victim)
                await eventually(lambda: neighbours(victim) == 12)
                nursery.start_soon(forward, port, honest.address.port)
                await eventually(lambda: version(victim) == 7)
                nursery.cancel_scope.cancel()

    async def link_in(victim: Process) -> None:
        async with hostile(victim.address) as connection:
            with contextlib.suppress(Gone):
                await connection.open()
                # What it would have from an honest peer, but older.
                await connection.gone.wait()

    run(scene)


# -- nobody is there


def test_bootstrap_peers_that_are_away_are_named_in_one_line_with_the_reason(tmp_path: Path, honest: Process) -> None:
    """Refused, unknown by name, somebody else, no peer at all, deaf: each in the operating system's own words."""

    async def scene() -> None:
        stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
        away, later = free_ports(2)
        async with trio.open_nursery() as nursery:
            web = await nursery.start(trio.serve_tcp, answer_http, 0)
            deaf = await nursery.start(trio.serve_tcp, say_nothing, 0)
            told = {
                Address("ip4", "127.0.0.1", away, stranger): ("connection refused",),
                Address("dns4", "nobody.invalid", 1, stranger): ("name", "temporary failure in name"),
                Address("ip4", "127.0.0.1", honest.address.port, stranger): ("responds with another key",),
                Address("ip4", "127.0.0.1", port_of(web), stranger): ("responds, ",),
                Address("ip4", "127.0.0.1", port_of(deaf), stranger): (
                    "responds, but does not complete the handshake within 5 s",
                ),
            }
            for number, (address, why) in enumerate(told.items()):
                nursery.start_soon(complains, tmp_path / str(number), address, why)
            nursery.start_soon(recovers, tmp_path / "late", later, honest)
            await eventually(lambda: len(list(tmp_path.glob("*/done"))) == len(told) + 1, seconds=220)
            nursery.cancel_scope.cancel()

    run(scene)


async def complains(folder: Path, address: Address, why: tuple[str, ...]) -> None:
    newcomer = await trio.to_thread.run_sync(joining, folder, address)
    said = f"{address.host}:{address.port}: "

    def complaints() -> list[str]:
        return [line for line in newcomer.log().splitlines() if "no peer reachable" in line]

    def told() -> list[str]:
        return [line for line in complaints() if any(said + reason in line for reason in why)]

    with closing(newcomer):
        await eventually(told)
        seen = len(complaints())
        await trio.sleep(2)
        # Once a minute: on a busy machine the first one may be about a deadline.
        assert len(complaints()) == seen <= 2
        line = told()[0]
        assert "retrying" in line
        assert len(line) < 200
        (folder / "done").touch()


async def recovers(folder: Path, port: int, honest: Process) -> None:
    """One is away, and one is away at first."""
    away = Address("ip4", "127.0.0.1", free_port(), honest.node[::-1])
    newcomer = await trio.to_thread.run_sync(joining, folder, away, Address("ip4", "127.0.0.1", port, honest.node))
    with closing(newcomer):
        await eventually(lambda: newcomer.log().count("connection refused") == 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forward, port, honest.address.port)
            await eventually(lambda: version(newcomer) == 7)
            nursery.cancel_scope.cancel()
        assert "joined the peer-to-peer network" in newcomer.log()
        (folder / "done").touch()


async def answer_http(stream: trio.SocketStream) -> None:
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await stream.receive_some(1000)


async def say_nothing(_: trio.SocketStream) -> None:
    await trio.sleep_forever()


def port_of(listeners: list[trio.SocketListener]) -> int:
    return int(listeners[0].socket.getsockname()[1])
