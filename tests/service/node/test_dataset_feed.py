"""Datasets that are not to be had yet: workers and relays wait for them, and say what for.

A worker that waits for a list of relays that it asked for once, or a relay that has given up without a word, does
nothing for anybody, and its owner does not know why.
"""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dataset_files import damage, environment_of, made, sums
from full_disk import room_for
from msgspec import structs
from waiting import eventually
from worker_swarm import RUN_ID, RUN_KEY

from node.datasets import fetching
from node.datasets.fetching import dataset_feed
from node.environments.base import DatasetChanged
from node.errors import ConfigError
from node.joining.session import JoinSettings
from node.relay.daemon import RelaySettings, run_relay
from shardcast import Origin, OriginServer, publish_content
from shardcast.errors import LocalFault, TooSlow

OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
PUBLIC_KEY = RUN_KEY.public_key().public_bytes_raw()
NOBODY = "http://127.0.0.1:9"
SOON = 120.0
ROOM_BYTES = 128 * 1024


@contextlib.contextmanager
def serving(folder, *files):
    """An origin of the run without policies, which serves `files`; yields its URL."""
    origin = Origin(folder / "other-origin", RUN_KEY, RUN_ID)
    contents = {
        one.spec.digest: publish_content(
            one.path, digest=one.spec.digest, folder=folder / "published", key=RUN_KEY, run_id=RUN_ID
        )
        for one in files
    }
    server = OriginServer(origin, contents=contents)
    try:
        yield f"http://127.0.0.1:{server.start()}"
    finally:
        server.stop()
        for each in (origin, *contents.values()):
            each.close()


def spec_over(spec, *datasets):
    return structs.replace(spec, environments=tuple(environment_of(one) for one in datasets))


def arrived(state, dataset):
    """Whether the dataset is whole in the state of a worker or relay."""
    found = list((state / "datasets" / dataset.spec.digest / "versions").glob("0-*.bin"))
    return bool(found) and found[0].read_bytes() == dataset.path.read_bytes()


def relay_settings(swarm, state, *upstreams, **changes):
    join = JoinSettings(run_id=swarm.run_id, coordinators=(swarm.url,))
    return RelaySettings(join=join, state=state, host="127.0.0.1", port=0, upstreams=upstreams, **changes)


@contextlib.asynccontextmanager
async def relaying(settings):
    stop = asyncio.Event()
    relay = asyncio.create_task(run_relay(settings, key=OTHER_KEY, stop=stop))
    try:
        yield relay
    finally:
        stop.set()
        await asyncio.wait_for(relay, SOON)


@pytest.mark.system
async def test_a_worker_asks_again_who_has_its_dataset(swarm, tmp_path, caplog):
    """The relays that it knew are gone, and the coordinator is away when others have come."""
    dataset = made(tmp_path / "made")
    swarm.coordinator.spec = spec_over(swarm.spec, dataset)
    swarm.coordinator.relays = (NOBODY,)
    with serving(tmp_path, dataset) as url:
        async with swarm.working():
            await swarm.until(lambda: "dataset sums (" in caplog.text and "waiting for it" in caplog.text)
            await swarm.stop()
            swarm.coordinator.relays = (url,)
            await asyncio.sleep(0.3)
            await swarm.start()
            await swarm.until(lambda: arrived(swarm.state, dataset))


async def test_a_worker_whose_dataset_is_damaged_fetches_it_once_and_gives_its_slots_back(swarm, tmp_path, caplog):
    """It dropped slot after slot, each held from others until its lease had lapsed."""
    dataset, coordinator = made(tmp_path / "made"), swarm.coordinator
    coordinator.spec = spec_over(swarm.spec, dataset)
    with serving(tmp_path, dataset) as url:
        coordinator.relays = (*coordinator.relays, url)
        async with swarm.working() as (_, worker):
            await swarm.until(lambda: coordinator.submissions)
            (held,) = (swarm.state / "datasets" / dataset.spec.digest / "versions").glob("0-*.bin")
            damage(held)
            await swarm.until(lambda: "fetching it again" in caplog.text and arrived(swarm.state, dataset))
            returned, submitted = len(coordinator.returned), len(coordinator.submissions)
            assert returned >= 1
            await swarm.until(lambda: len(coordinator.submissions) > submitted)
            (held,) = held.parent.glob("0-*.bin")
            damage(held)
            with pytest.raises(DatasetChanged, match=f"{held.name} was changed: row") as caught:
                await asyncio.wait_for(asyncio.shield(worker), SOON)
            assert caught.value.code == "dataset_changed"
            assert len(coordinator.returned) > returned


async def test_a_dataset_that_nobody_has_does_not_keep_others_waiting(swarm, tmp_path):
    lost, there = made(tmp_path / "lost", sums(3)), made(tmp_path / "made")
    swarm.coordinator.spec = spec_over(swarm.spec, lost, there)
    with serving(tmp_path, there) as url:
        async with relaying(relay_settings(swarm, tmp_path / "relay", url)):
            await swarm.until(lambda: arrived(tmp_path / "relay", there))
        sources = {"run_id": RUN_ID, "publisher_key": PUBLIC_KEY, "sources": (url,), "folder": tmp_path / "auditor"}
        async with dataset_feed(swarm.coordinator.spec, files=swarm.coordinator.spec.files, **sources) as feed:
            with pytest.raises(TooSlow):
                await feed.fetch(timeout_s=1.0)


async def test_a_source_says_what_it_keeps_and_has_sent_of_each_dataset(swarm, tmp_path):
    """An operator whose disk or uplink fills up could not tell a dataset from policies."""
    dataset, never = made(tmp_path / "made"), made(tmp_path / "never", sums(3))
    sources = {"run_id": RUN_ID, "publisher_key": PUBLIC_KEY, "folder": tmp_path / "state"}
    with serving(tmp_path, dataset, never) as url:
        spec = spec_over(swarm.spec, dataset)
        async with dataset_feed(spec, files=spec.files, sources=(url,), **sources) as feed:
            await feed.fetch()
        async with aiohttp.ClientSession(url) as http:
            async with http.get("/v1/status") as answer:
                held = {one.pop("digest"): one for one in (await answer.json())["contents"]}
            async with http.get("/metrics") as answer:
                metrics = await answer.text()
    fetched, other = held[dataset.spec.digest], held[never.spec.digest]
    assert (fetched["chunks_missing"], other["chunks_missing"]) == (0, 0)
    assert fetched["disk_bytes"] >= dataset.spec.bytes
    assert fetched["bytes_out"] >= dataset.spec.bytes
    assert other["bytes_out"] == 0
    assert f'shardcast_content_bytes{{content="{dataset.spec.digest[:16]}"}}' in metrics
    assert f'shardcast_content_sent_bytes_total{{content="{never.spec.digest[:16]}"}} 0.0' in metrics


async def test_a_relay_whose_disk_is_full_says_so_and_goes_on_once_there_is_room(swarm, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(fetching, "MAX_PAUSE_SECONDS", 0.2)
    dataset = made(tmp_path / "made", sums(6000))
    assert dataset.spec.bytes > 2 * ROOM_BYTES
    swarm.coordinator.spec = spec_over(swarm.spec, dataset)
    with serving(tmp_path, dataset) as url:
        with room_for(ROOM_BYTES):
            relay = relaying(relay_settings(swarm, tmp_path / "relay", url))
            await relay.__aenter__()
            await swarm.until(lambda: "dataset sums (" in caplog.text and "cannot be kept" in caplog.text)
        await eventually(lambda: arrived(tmp_path / "relay", dataset), seconds=SOON)
        await relay.__aexit__(None, None, None)


async def test_a_worker_whose_disk_is_full_ends_with_the_reason(swarm, tmp_path):
    dataset = made(tmp_path / "made", sums(6000))
    swarm.coordinator.spec = spec_over(swarm.spec, dataset)
    with serving(tmp_path, dataset) as url:
        swarm.coordinator.relays = (url,)
        with room_for(ROOM_BYTES), pytest.raises(LocalFault) as caught:
            await asyncio.wait_for(swarm.work(asyncio.Event()), SOON)
    assert caught.value.code == "disk_full"


async def test_a_relay_whose_quota_is_too_small_for_the_datasets_does_not_start(swarm, tmp_path):
    """Signed rules may name 4 GiB: a relay's owner who set a limit must not find more on the disk."""
    dataset = made(tmp_path / "made")
    swarm.coordinator.spec = spec_over(swarm.spec, dataset)
    settings = relay_settings(swarm, tmp_path / "relay", NOBODY, quota_bytes=dataset.spec.bytes)
    with pytest.raises(ConfigError, match="--quota-gb") as caught:
        await run_relay(settings, key=OTHER_KEY, stop=asyncio.Event())
    assert caught.value.code == "quota"
