"""Withholding and slowness: a source that answers late, partly or never costs seconds, and not the version."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from broadcast_scene import CHUNK, IMPATIENT, SIZE, Between, Scene, Withholds, fetched

from shardcast import DownloadLimits, SourceLimits, TransportLimits
from shardcast.errors import TooSlow
from shardcast.fetch import fetcher as fetching

pytestmark = pytest.mark.system  # waits on real clocks

ENOUGH = 40.0
"""Seconds, on a busy machine; what is withheld here is never answered, or not within a minute."""


@pytest.mark.parametrize("status", [None, 404, 500, 503])
async def test_withheld_deltas_cost_seconds_and_not_the_version(scene: Scene, status: int | None) -> None:
    deltas = set[str]()
    url, _ = await scene.hostile(Withholds, kept=lambda path: path.split("/")[-2] in deltas, status=status)
    client = await scene.client_with_version_1(url, source_limits=SourceLimits(max_backoff_s=0.3), **IMPATIENT)
    weights = await scene.publish(2)
    deltas |= {delta.payload.digest for delta in scene.signed(2).manifest.deltas}
    started = time.monotonic()
    assert await fetched(client, after=1) == weights
    assert time.monotonic() - started < ENOUGH
    assert (client.fetched.by_delta, client.fetched.in_full) == (0, 2)


async def test_withheld_old_manifests_do_not_hold_up_who_is_far_behind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain is found by asking for each manifest in between; every answer could be late."""
    monkeypatch.setattr(fetching, "ROUTE_TIMEOUT_S", 1.0)
    url, hostile = await scene.hostile(Withholds, kept=lambda path: "/versions/" in path)
    client = await scene.client_with_version_1(url, transport_limits=TransportLimits(response_s=30))
    for version in range(2, 8):
        weights = await scene.publish(version)
    started = time.monotonic()
    assert await fetched(client, after=1) == weights
    assert time.monotonic() - started < 30, "not even one of the answers was waited for"
    assert hostile.asked["versions"] > 0


async def test_withheld_deltas_do_not_pile_up_work_at_a_relay(scene: Scene, http: aiohttp.ClientSession) -> None:
    """It tries again with every poll: what still hangs from the last time must not be joined by more."""
    deltas = set[str]()
    bad, _ = await scene.hostile(Withholds, kept=lambda path: path.split("/")[-2] in deltas)
    for version in (2, 3):
        weights = await scene.publish(version)
        deltas |= {delta.payload.digest for delta in scene.signed(version).manifest.deltas}
    url, _ = await scene.relay(bad, **{**IMPATIENT, "poll_s": 0.05})
    assert await fetched(scene.client(url)) == weights
    await asyncio.sleep(1.5)
    passing_on = [task for task in asyncio.all_tasks() if "_pass_on" in repr(task.get_coro())]
    assert len(passing_on) <= 1, "one for each version that lacks deltas"
    async with http.get(url + "/health") as response:
        assert response.status == 200


PATIENT: dict[str, Any] = {
    "download_limits": DownloadLimits(race_after_s=0.1, chunk_wait_s=60, stall_s=60),
    "transport_limits": TransportLimits(response_s=60, idle_s=60),
}
"""No deadline ends an attempt here: only a race against another source can."""


async def test_withholding_is_raced_by_another_source(scene: Scene) -> None:
    (bad, _), good = await scene.hostile(Withholds), await scene.honest()
    started = time.monotonic()
    assert await fetched(scene.client(bad, good, **PATIENT)) == scene.weights
    assert time.monotonic() - started < ENOUGH


async def test_withholding_alone_ends_in_time(scene: Scene) -> None:
    client = scene.client((await scene.hostile(Withholds))[0], **IMPATIENT)
    started = time.monotonic()
    with pytest.raises(TooSlow):
        await fetched(client)
    assert time.monotonic() - started < ENOUGH


class Dribbles(Between):
    async def chunk(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(CHUNK)})
        await response.prepare(request)
        for value in await self.data(request):
            await response.write(bytes([value]))
            await asyncio.sleep(0.05)
        return response


async def test_a_slow_loris_relay_is_dropped_below_the_minimum_rate(scene: Scene) -> None:
    (bad, _), good = await scene.hostile(Dribbles), await scene.honest()
    assert await fetched(scene.client(bad, good)) == scene.weights
    patience = DownloadLimits(race_after_s=0.1, stall_s=6.0)
    alone = scene.client(
        bad, name="alone", transport_limits=TransportLimits(rate_grace_s=0.3), download_limits=patience
    )
    with pytest.raises(TooSlow, match="bytes/s"):
        await fetched(alone)


class Dawdles(Between):
    """Every chunk comes, at just above the minimum rate."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        answer = await self.honest(request.path_qs)
        if "/payloads/" not in request.path:
            return answer
        slow = web.StreamResponse(headers={"Content-Length": str(len(answer.body))})  # type: ignore[arg-type]
        await slow.prepare(request)
        for start in range(0, CHUNK, 256):
            await slow.write(answer.body[start : start + 256])  # type: ignore[index]
            await asyncio.sleep(0.1)  # 2,560 bytes/s, where 2,000 are asked for
        return slow


async def test_a_relay_just_above_the_minimum_rate_hardly_slows_a_fetch(scene: Scene) -> None:
    """All chunks from it would take 160 s; none of them is late enough to be an error."""
    bad, hostile = await scene.hostile(Dawdles)
    client = scene.client(bad, scene.url)
    started = time.monotonic()
    assert len(await fetched(client)) == SIZE
    assert hostile.asked["payloads"] > 0
    assert time.monotonic() - started < ENOUGH


class AnswersAtOnce(Between):
    async def head(self, request: web.Request) -> web.StreamResponse:
        if "wait" in request.query:
            return web.Response(status=204)
        return await super().head(request)


async def test_a_long_poll_that_never_waits_does_not_make_anyone_spin(scene: Scene) -> None:
    """A relay could otherwise burn a core of every worker, or have them flood it for show."""
    bad, hostile = await scene.hostile(AnswersAtOnce)
    client = scene.client(bad)
    assert await client.wait_head(after=1, timeout_s=1) is None
    assert hostile.asked["head"] < 20
    hostile.asked.clear()
    await scene.relay(bad)
    await asyncio.sleep(1)
    assert hostile.asked["head"] < 40


async def test_one_bad_relay_of_three_hardly_slows_a_fetch(scene: Scene) -> None:
    good = [await scene.honest() for _ in range(2)]
    bad, _ = await scene.hostile(Withholds)
    client = scene.client(*good, bad, **PATIENT)
    started = time.monotonic()
    assert await fetched(client) == scene.weights
    assert time.monotonic() - started < ENOUGH
