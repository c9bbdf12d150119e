"""Every behaviour of a hostile relay, at a client and a relay with two such sources of three: a little time is lost.

What would break for whom: a joining worker without a policy for minutes, or with a wrong one, because strangers
announced relays.
"""

from __future__ import annotations

import asyncio

import pytest
from broadcast_scene import PUBLIC, RUN_ID, Scene, fetched
from waiting import eventually

from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS, HostileRelay
from shardcast import Client, Relay

ENOUGH_S = 60.0
"""On a busy machine; before sources had to prove themselves, ten of the behaviours cost more on a quiet one."""


def test_there_are_fifty_behaviours() -> None:
    assert len(BEHAVIOURS) >= 50


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_two_hostile_sources_of_three_cost_a_client_and_a_relay_little(scene: Scene, name: str) -> None:
    hostile = [HostileRelay(scene.url, BEHAVIOURS[name]) for _ in range(2)]
    urls = [await relay.start() for relay in hostile]
    relay = Relay([*urls, scene.url], store_dir=scene.folder / "relay", run_id=RUN_ID, publisher_key=PUBLIC)
    try:
        async with asyncio.timeout(ENOUGH_S), Client(RUN_ID, PUBLIC, [*urls, scene.url], scene.folder / "c") as client:
            assert await fetched(client) == scene.weights
            await relay.start()
            await eventually(lambda: relay.newest_whole() == 1, seconds=ENOUGH_S)
            weights = await scene.publish(2)  # a delta, and sources that are known by now
            assert await fetched(client, after=1) == weights
            await eventually(lambda: relay.newest_whole() == 2, seconds=ENOUGH_S)
    finally:
        await relay.stop()
        for one in hostile:
            await one.stop()
    assert sum(one.asked.total() for one in hostile) > 0
