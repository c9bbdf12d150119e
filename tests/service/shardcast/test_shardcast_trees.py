"""Relays in striped trees: the origin sends a version once, everybody carries a share, and the dead are gone round."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from shardcast import DownloadLimits
from shardcast.tree import Member, plan

CHUNKS = 96
SIZE = CHUNKS * 4096


async def sent(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url + "/v1/status") as response:
        return int((await response.json())["bytes_out"])


async def tree(swarm: Any, count: int, **options: Any) -> tuple[str, Any, dict[str, Any]]:
    """An origin and `count` relays that fetch as the plan says."""
    url, server = swarm.origin()
    relays = dict([await swarm.relay(url, name=f"relay{number}", **options) for number in range(count)])
    planned = plan([url], [Member(id=each, url=each) for each in relays])
    for each, relay in relays.items():
        relay.set_upstreams([], stripes=planned.parents(each))
    return url, server, {"relays": relays, "plan": planned}


async def fetched(client: Any, version: int) -> bytes:
    head = await client.wait_head(after=version - 1, timeout_s=60)
    assert head is not None
    return bytes((await client.fetch(head, timeout_s=60)).read_bytes())


async def test_the_origin_sends_a_version_once_however_many_relays_there_are(
    swarm: Any, http: aiohttp.ClientSession
) -> None:
    url, server, made = await tree(swarm, 6)
    clients = []
    for number in range(4):
        client = swarm.client(name=f"client{number}")
        client.set_sources([], stripes=made["plan"].sources_for(f"worker {number}"))
        clients.append(client)
    waiting = [asyncio.create_task(fetched(client, 1)) for client in clients]
    before = await sent(http, url)
    weights = swarm.weights(SIZE)
    await asyncio.to_thread(server.publish, weights, version=1)
    assert set(await asyncio.gather(*waiting)) == {weights.read_bytes()}
    egress = (await sent(http, url) - before) / SIZE
    assert egress < 2, "six relays and four workers would take ten; where one is late, chunks are raced"
    shares = [await sent(http, each) / SIZE for each in made["relays"]]
    assert min(shares) > 0.2, "leaves of one tree are interior in another: every uplink carries its share"


async def test_a_dead_relay_is_gone_round(swarm: Any) -> None:
    """Its children in every stripe turn to their backups, and the version arrives all the same."""
    _, server, made = await tree(swarm, 5, download_limits=DownloadLimits(race_after_s=0.2, stall_s=10))
    dead = next(iter(made["relays"]))
    await made["relays"][dead].stop()
    swarm._relays.remove(made["relays"][dead])
    client = swarm.client()
    client.set_sources([], stripes=made["plan"].sources_for("worker"))
    weights = swarm.weights(SIZE)
    await asyncio.to_thread(server.publish, weights, version=1)
    assert await asyncio.wait_for(fetched(client, 1), 60) == weights.read_bytes()


async def test_a_worker_that_serves_is_as_good_as_a_relay(swarm: Any, http: aiohttp.ClientSession) -> None:
    """Ten thousand workers over two hundred relays are limited by the relays' links, unless they help each other."""
    url, server = swarm.origin()
    first = swarm.client(url, name="first")
    served = f"http://127.0.0.1:{await first.serve()}"
    second = swarm.client(served, name="second")
    waiting = asyncio.create_task(fetched(second, 1))
    weights = swarm.weights(SIZE)
    await asyncio.to_thread(server.publish, weights, version=1)
    assert await fetched(first, 1) == weights.read_bytes()
    assert await waiting == weights.read_bytes()
    assert await sent(http, url) < 1.1 * SIZE
    changed = bytearray(weights.read_bytes())
    changed[1000] ^= 1
    weights.write_bytes(changed)
    await asyncio.to_thread(server.publish, weights, version=2)
    assert await fetched(first, 2) == bytes(changed)
    assert await fetched(second, 2) == bytes(changed)
    assert second.fetched.by_delta == 1, "deltas are passed on, too"
