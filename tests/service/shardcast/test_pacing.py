"""A server with a limited rate: it keeps to it, and who asks for little does not wait for those who ask for much.

What would break for whom: a contributor's line at home is full, and the household throws the relay out; or heads wait
behind weights, and every worker below trains on an old policy; or readers take a relay that was told to be slow for one
that is broken.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from shardcast import ServerLimits, TransportLimits
from shardcast.manifest import KIB, MIB
from shardcast.serve import pacing, server
from shardcast.serve.pacing import ChunkTurn, Pacer


async def order_of(*waits: tuple[str, Any]) -> list[str]:
    """In which order these are allowed, all of them asked for in the same moment."""
    order = list[str]()

    async def wait(name: str, allowed: Any) -> None:
        await allowed
        order.append(name)

    await asyncio.gather(*(wait(*each) for each in waits))
    return order


async def chunk(pacer: Pacer, size_bytes: int = 10_000) -> None:
    """One that has a single piece."""
    turn = ChunkTurn()
    await pacer.allow(size_bytes, turn)
    pacer.end(turn)


async def begun(pacer: Pacer) -> ChunkTurn:
    turn = ChunkTurn()
    await pacer.allow(1, turn)
    return turn


async def spent(pacer: Pacer) -> None:
    """What was saved up is gone, and half a second of what comes: nothing is allowed before all have asked."""
    await pacer.allow(int(pacer._bytes_per_s / 2))


async def test_no_more_than_the_rate_is_allowed() -> None:
    pacer = Pacer(1_000_000)
    started = time.monotonic()
    await asyncio.gather(*(chunk(pacer, 20_000) for _ in range(10)), *(pacer.allow(1_000) for _ in range(100)))
    # The last of them is allowed when those before it have gone, and 20 ms may have been saved up.
    assert time.monotonic() - started >= 0.300 - 0.020 - 0.020


async def test_what_is_small_overtakes_chunks() -> None:
    pacer = Pacer(1_000_000)
    await spent(pacer)
    chunks = [(f"chunk {number}", chunk(pacer)) for number in range(5)]
    assert (await order_of(*chunks, ("head", pacer.allow(700))))[0] == "head"


async def test_a_flood_of_what_is_small_leaves_chunks_half_of_the_rate() -> None:
    """Manifests are small beside weights, but a stranger may ask for any number of them."""
    pacer = Pacer(1_000_000)
    await spent(pacer)
    flood = [("manifest", pacer.allow(pacer.piece_bytes // 2)) for _ in range(20)]
    order = await order_of(*flood, *((f"chunk {number}", chunk(pacer, pacer.piece_bytes)) for number in range(5)))
    assert order[:6] == ["manifest", "manifest", "chunk 0", "manifest", "manifest", "chunk 1"]


async def test_a_chunk_that_was_begun_goes_before_one_that_was_not() -> None:
    """Pieces of all in turn would have every reader wait for its first whole chunk until all are nearly done."""
    pacer = Pacer(1_000_000)
    turn = await begun(pacer)
    await spent(pacer)
    order = await order_of(("new", chunk(pacer)), ("begun", pacer.allow(10_000, turn)), ("head", pacer.allow(1)))
    assert order == ["head", "begun", "new"]


async def test_chunks_that_were_begun_share_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has to be above the least that its reader accepts."""
    # Where the event loop was late, one may be a burst ahead of the other.
    monkeypatch.setattr(pacing, "_BURST_S", 0.0)
    pacer = Pacer(1_000_000)
    turns = {name: await begun(pacer) for name in "ab"}
    await spent(pacer)
    order = list[str]()

    async def send(name: str) -> None:
        for _ in range(5):
            await pacer.allow(10_000, turns[name])
            order.append(name)

    await asyncio.gather(*map(send, turns))
    ahead = [order[:end].count("a") - order[:end].count("b") for end in range(1, 11)]
    assert ahead[-1] == 0
    assert max(map(abs, ahead)) <= 2


async def test_who_has_gone_takes_nothing_from_the_others() -> None:
    pacer = Pacer(1_000_000)
    await spent(pacer)
    gone = asyncio.create_task(chunk(pacer, 3600_000_000))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(60):
        await chunk(pacer)
        await chunk(pacer)


async def test_a_reader_that_asks_for_nothing_more_keeps_nobody_waiting() -> None:
    """It has its chunk begun, and holds the connection."""
    pacer = Pacer(1_000_000)
    for _ in range(5):
        await begun(pacer)
    async with asyncio.timeout(60):
        await chunk(pacer)


# -- a relay


async def test_two_clients_at_once_get_no_more_than_the_rate_and_heads_at_once(
    swarm: Any, http: aiohttp.ClientSession
) -> None:
    """Clients have their own minimum rate and deadlines, at the defaults: none of them may count against the relay."""
    rate, size = 1_000_000.0, 800_000
    origin, publisher = swarm.origin(chunk_bytes=64 * KIB)
    limits = ServerLimits(max_bytes_per_s=rate)
    url, relay = await swarm.relay(origin, server_limits=limits)
    weights = swarm.weights(size)
    await asyncio.to_thread(publisher.publish, weights, version=1)
    clients = [swarm.client(url, name=name) for name in ("one", "other")]
    await eventually(lambda: relay._store.is_whole(1))
    heads = [await client.wait_head() for client in clients]
    started = time.monotonic()
    fetching = [asyncio.create_task(client.fetch(head)) for client, head in zip(clients, heads, strict=True)]
    waits = list[float]()
    while not all(task.done() for task in fetching):
        asked = time.monotonic()
        async with http.get(f"{url}/v1/head") as response:
            assert response.status == 200
            await response.read()
        waits.append(time.monotonic() - asked)
        await asyncio.sleep(0.05)
    taken = time.monotonic() - started
    assert [(await task).read_bytes() for task in fetching] == [weights.read_bytes()] * 2
    assert 2 * size / taken < rate * 1.1
    assert statistics.median(waits) < 1.0, "one of them may find the machine busy"
    for client in clients:
        (row,) = client.sources_status()
        assert (row["state"], row["failures"]) == ("ok", 0)


@pytest.mark.system
async def test_every_chunk_that_is_begun_is_above_the_least_rate_of_its_reader(swarm: Any) -> None:
    """Four at once are asked for: a quarter of the rate for each would be too little."""
    origin, publisher = swarm.origin(chunk_bytes=256 * KIB)
    url, relay = await swarm.relay(origin, server_limits=ServerLimits(max_bytes_per_s=400_000))
    weights = swarm.weights(4 * 256 * KIB)
    await asyncio.to_thread(publisher.publish, weights, version=1)
    await eventually(lambda: relay._store.is_whole(1))
    limits = TransportLimits(rate_grace_s=0.6, min_bytes_per_s=160_000)
    failures = list[int]()
    for attempt in range(5):  # a pause of this machine counts against the relay, too
        client = swarm.client(url, name=f"client{attempt}", transport_limits=limits)
        head = await client.wait_head(timeout_s=60)
        assert (await client.fetch(head)).read_bytes() == weights.read_bytes()
        failures.append(client.sources_status()[0]["failures"])
        if not failures[-1]:
            break
    assert 0 in failures


@pytest.mark.system
async def test_whose_turn_does_not_come_is_told_to_ask_again(
    swarm: Any, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first byte, as long as that costs nothing: a chunk that is cut off half way is sent twice."""
    monkeypatch.setattr(server, "_TURN_TIMEOUT_S", 0.2)
    origin, publisher = swarm.origin()
    url, relay = await swarm.relay(origin, server_limits=ServerLimits(max_bytes_per_s=20_000))
    await asyncio.to_thread(publisher.publish, swarm.weights(40 * KIB), version=1)
    await eventually(lambda: relay._store.is_whole(1))
    name = relay._store.versions()[0].manifest.full.digest

    async def ask(index: int, wait_s: float) -> int:
        async with http.get(f"{url}/v1/payloads/{name}/{index}?wait={wait_s}") as response:
            assert len(await response.read()) == (4 * KIB if response.status == 200 else 0)
            return response.status

    statuses = await asyncio.gather(*(ask(index, 0) for index in range(10)))
    assert set(statuses) == {200, 503}
    assert await asyncio.gather(*(ask(index, 10) for index in range(10))) == [200] * 10


@pytest.mark.system
async def test_slow_readers_do_not_use_up_the_rate(swarm: Any) -> None:
    """Whoever reads nothing of what he asked for would else keep the turn of everybody behind him."""
    size = 16 * MIB
    origin, publisher = swarm.origin(chunk_bytes=4 * MIB)
    url, relay = await swarm.relay(origin, server_limits=ServerLimits(max_bytes_per_s=50_000_000))
    weights = swarm.weights(size)
    await asyncio.to_thread(publisher.publish, weights, version=1)
    await eventually(lambda: relay._store.is_whole(1))
    name = relay._store.versions()[0].manifest.full.digest
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    readers = list[socket.socket]()
    for _ in range(20):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        await asyncio.get_running_loop().sock_connect(reader, address)
        reader.send(f"GET /v1/payloads/{name}/0 HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        readers.append(reader)
    client = swarm.client(url)
    head = await client.wait_head()
    assert (await client.fetch(head, timeout_s=60)).read_bytes() == weights.read_bytes()
    for reader in readers:
        reader.close()


@pytest.mark.parametrize(("most", "accepted"), [(3, 3), (None, 8)])
async def test_connections_of_one_address_may_be_unlimited(swarm: Any, most: int | None, accepted: int) -> None:
    """Behind nginx everybody has its address."""
    url, relay = await swarm.relay(server_limits=ServerLimits(max_connections_per_address=most))
    port = int(url.rsplit(":", 1)[1])
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    listener = relay._listener
    await eventually(lambda: listener.connections + listener.refused == 8)
    assert listener.connections == accepted
    for peer in peers:
        peer.close()
