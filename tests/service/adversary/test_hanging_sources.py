"""Sources that hang or flood, more of them than good ones: what an outsider's relays cost a worker that joins."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from broadcast_scene import PUBLIC, RUN_ID, Scene, fetched, row

from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS, Behaviour, HostileExchange, HostileRelay, prove_then
from shardcast import Client, DownloadLimits
from shardcast.errors import NotServed
from shardcast.fetch.hedging import first_accepted

pytestmark = pytest.mark.system  # waits on real clocks

ENOUGH_S = 40.0
"""On a busy machine; each hanging source alone would be waited for that long."""
SOON = DownloadLimits(last_resort_s=1.0)

Start = Callable[["str | Behaviour"], Awaitable[str]]


@pytest.fixture
async def hostile(scene: Scene) -> AsyncIterator[Start]:
    """Start a relay of a behaviour before the scene's origin; returns its URL."""
    relays: list[HostileRelay] = []

    async def start(behaviour: str | Behaviour) -> str:
        relays.append(HostileRelay(scene.url, BEHAVIOURS[behaviour] if isinstance(behaviour, str) else behaviour))
        return await relays[-1].start()

    yield start
    for relay in relays:
        await relay.stop()


def joining(scene: Scene, *sources: str, **options: Any) -> Client:
    """A worker's client as it is without any setting, but for `options`."""
    return Client(RUN_ID, PUBLIC, sources, scene.folder / "joining", **options)


@pytest.mark.parametrize("behaviour", ["hangs on everything", "hangs on heads", "hangs on manifests"])
async def test_the_good_source_gets_its_turn_after_sources_that_hang(
    scene: Scene, hostile: Start, behaviour: str
) -> None:
    """Only three sources were asked for the newest version, and manifests of one after the other."""
    bad = [await hostile(behaviour) for _ in range(6)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, *bad, scene.url) as client:
        assert await fetched(client) == scene.weights


async def test_more_hanging_sources_than_slots_do_not_hold_the_slots(scene: Scene, hostile: Start) -> None:
    """Sixteen requests in flight, and each hung for half a minute."""
    bad = [await hostile("hangs on chunks") for _ in range(20)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, *bad, scene.url) as client:
        assert await fetched(client) == scene.weights
        assert row(client.sources_status(), scene.url)["bytes_received"] > 0


async def test_sources_that_served_well_and_then_hang_are_left(scene: Scene, hostile: Start) -> None:
    """Measured once as the best, they were waited for with four chunks each."""
    bad = [await hostile("four good chunks, then hangs") for _ in range(4)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, *bad, scene.url) as client:
        assert await fetched(client) == scene.weights


@pytest.mark.parametrize(
    "behaviour", ["endless interim responses on everything", "endless chunk extensions on everything"]
)
async def test_bytes_that_are_no_body_are_limited_as_well(scene: Scene, hostile: Start, behaviour: str) -> None:
    """2.2 GB were read from one source, at 33 s of processor time."""
    sent = 0

    async def counted(exchange: HostileExchange) -> None:
        nonlocal sent
        write = exchange.writer.write

        def count(data: bytes) -> None:
            nonlocal sent
            write(data)
            sent += len(data)

        exchange.writer.write = count  # type: ignore[method-assign]
        await BEHAVIOURS[behaviour].act(exchange)

    url = await hostile(Behaviour("everything", counted))
    async with asyncio.timeout(ENOUGH_S), joining(scene, url, scene.url) as client:
        assert await fetched(client) == scene.weights
        described = row(client.sources_status(), url)
    assert (described["state"], described["code"]) == ("quarantined", "malformed")
    assert sent < 8 * 2**20, "what the sockets between hold, and not what it would have sent"


async def test_a_last_resort_serves_a_worker_whose_every_relay_hangs(scene: Scene, hostile: Start) -> None:
    """The operator's own source is not in the trees, and is what remains when strangers fill them."""
    bad = [await hostile("hangs on everything") for _ in range(4)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, download_limits=SOON) as client:
        client.set_sources(bad, stripes=[bad[:2], bad[2:]], last_resort=[scene.url])
        assert await fetched(client) == scene.weights


SLOWLY = "a rate just above the limit"


async def test_first_parents_that_trickle_from_their_first_byte_are_gone_round(scene: Scene, hostile: Start) -> None:
    """Before anything was delivered there was no rate to compare with, and a stripe waited for its parent alone."""
    bad = [await hostile(SLOWLY) for _ in range(2)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, download_limits=SOON) as client:
        client.set_sources([], stripes=[[bad[0], scene.url], [bad[1], scene.url]])
        assert await fetched(client) == scene.weights


async def test_more_trickling_sources_than_slots_do_not_hold_the_slots(scene: Scene, hostile: Start) -> None:
    bad = [await hostile(SLOWLY) for _ in range(20)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, *bad, scene.url, download_limits=SOON) as client:
        assert await fetched(client) == scene.weights


async def test_proven_sources_that_then_have_nothing_yet_are_left_to_wait(scene: Scene, hostile: Start) -> None:
    """To answer that a chunk has not come yet cost a source nothing, and held four of sixteen slots each time."""
    waits = BEHAVIOURS["waits, then has no chunk yet"].act
    bad = [await hostile(Behaviour("chunks", prove_then(waits, chunks=4))) for _ in range(4)]
    async with asyncio.timeout(ENOUGH_S), joining(scene, *bad, scene.url) as client:
        assert await fetched(client) == scene.weights


async def test_who_shows_a_head_first_cannot_withhold_its_manifest() -> None:
    """The others did not have it yet when they were asked, and were not asked again."""
    asked = 0

    async def ask(url: str) -> str:
        nonlocal asked
        if url == "first":
            await asyncio.sleep(3600)
        asked += 1
        if asked < 3:
            raise NotServed("it is on its way")
        return url

    async with asyncio.timeout(ENOUGH_S):
        assert await first_accepted(["first", "later"], ask, failed=lambda _url, _error: None) == "later"


async def test_a_relay_that_is_stopped_as_somebody_connects_loses_no_socket() -> None:
    """A connection that was accepted and forgotten hangs for whoever made it, and fails a test at random."""
    for turns in range(5):
        relay = HostileRelay("http://127.0.0.1:9", BEHAVIOURS["hangs on everything"])
        host, _, port = (await relay.start()).removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as caller:
            caller.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await relay.stop()
            async with asyncio.timeout(ENOUGH_S):
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(caller, 1) == b"", f"stopped in turn {turns}"
    gc.collect()  # of a whole session's objects: half a second
