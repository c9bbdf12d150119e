"""Old versions that an origin keeps as deltas reach whoever asks for them: auditors, and verifiers that are behind."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from broadcast_swarm import SIZE, contents

from coordinator.lab.redteam.relay_behaviours import Behaviour, HostileExchange, HostileRelay, hang, response
from shardcast import DeltaSettings, VersionProgress
from shardcast.errors import NetworkFault, PeerFault
from shardcast.fetch.download import DEFAULT_DOWNLOAD_LIMITS
from tests.support.waiting import eventually

LAST = 13
STAYING = {0, 8, 12, 13}


def whole(folder: Path) -> set[int]:
    return {int(path.name.split("-")[0]) for path in (folder / "versions").glob("*.bin")}


async def archived(
    swarm: Any, *, last: int = LAST, staying: set[int] = STAYING, fold_every: int = 2
) -> tuple[str, Any]:
    """Start an origin with versions 0 to `last`, of which only `staying` are whole."""
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=fold_every), keep_whole=1)
    path = swarm.folder / "file"
    for version in range(last + 1):
        path.write_bytes(contents(version))
        await asyncio.to_thread(server.publish, path, version=version)
    await eventually(lambda: whole(swarm.folder / "origin") == staying)
    return url, server


@pytest.mark.system
async def test_every_old_version_can_be_fetched(swarm: Any) -> None:
    url, _ = await archived(swarm)
    for version in (13, 1, 7, 11, 5, 0, 9):
        client = swarm.client(url, name=f"client-{version}", keep=1)
        path = await client.fetch_archived(version, timeout_s=60)
        assert path.read_bytes() == contents(version)
        assert whole(swarm.folder / f"client-{version}") == {version}
        assert client.fetched.bytes_in < 1.1 * SIZE, "one whole version, and deltas"


@pytest.mark.system
async def test_the_version_that_is_furthest_from_a_whole_one_can_be_fetched(swarm: Any) -> None:
    """Each of the 31 versions between has two deltas: looking at all ways would take more requests than are allowed."""
    url, _ = await archived(swarm, last=33, staying={0, 32, 33}, fold_every=8)
    client = swarm.client(url)
    assert (await client.fetch_archived(31, timeout_s=60)).read_bytes() == contents(31)


async def test_an_auditor_of_all_versions_fetches_one_whole(swarm: Any) -> None:
    url, _ = await archived(swarm)
    client = swarm.client(url)
    for version in range(1, 8):
        path = await client.fetch_archived(version, timeout_s=60)
        assert path.read_bytes() == contents(version)
    assert client.fetched.bytes_in < 1.2 * SIZE


async def test_a_relay_that_is_away_does_not_hide_the_way(swarm: Any) -> None:
    url, _ = await archived(swarm)
    client = swarm.client("http://127.0.0.1:9", url)
    seen = list[VersionProgress]()
    assert (await client.fetch_archived(5, timeout_s=60, progress=seen.append)).read_bytes() == contents(5)
    assert SIZE < seen[-1].total_bytes < 1.1 * SIZE, "what was asked for in vain is not waited for"


async def invented(exchange: HostileExchange) -> None:
    """Send zeros for chunks that nobody has."""
    is_missing = exchange.path.startswith("/v1/payloads/") and exchange.status == 404
    await (exchange.send(response(bytes(65_536))) if is_missing else exchange.honest())


async def silent(exchange: HostileExchange) -> None:
    """Say nothing of chunks that nobody has."""
    is_missing = exchange.path.startswith("/v1/payloads/") and exchange.status == 404
    await (hang(exchange) if is_missing else exchange.honest())


@pytest.mark.system
@pytest.mark.parametrize("act", [invented, silent])
async def test_a_relay_that_lies_or_hangs_about_archived_chunks_does_not_hide_the_way(
    swarm: Any, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    url, _ = await archived(swarm, last=9, staying={0, 8, 9}, fold_every=2)
    monkeypatch.setattr("shardcast.fetch.served_base.PROBE_S", 0.5)
    relay = HostileRelay(url, Behaviour("everything", act))
    client = swarm.client(await relay.start(), url, download_limits=replace(DEFAULT_DOWNLOAD_LIMITS, stall_s=3.0))
    try:
        assert (await client.fetch_archived(7, timeout_s=60)).read_bytes() == contents(7)
    finally:
        await relay.stop()


async def test_a_version_fetched_again_has_the_file_that_its_readers_have_checked(swarm: Any) -> None:
    """Numbers of a file that seems to be another one are all looked at again, for minutes where it is large."""
    url, _ = await archived(swarm, last=3, staying={0, 2, 3})
    client = swarm.client(url)
    first = (await client.fetch_archived(2, timeout_s=60)).stat()
    again = (await client.fetch_archived(2, timeout_s=60)).stat()
    assert (first.st_ino, first.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert again.st_atime_ns > first.st_atime_ns, "or the version used last would not be kept"


async def test_a_version_whose_base_is_gone_is_refused(swarm: Any) -> None:
    """Without a whole version at the end of the deltas there is nothing to apply them to."""
    url, _ = await archived(swarm, last=3, staying={0, 2, 3})
    (base,) = (swarm.folder / "origin" / "versions").glob("0-*.bin")
    base.unlink()
    client = swarm.client(url)
    with pytest.raises(NetworkFault):
        await client.fetch_archived(1, timeout_s=60)
    assert whole(swarm.folder / "client") == set()
    assert list((swarm.folder / "client" / "deltas").iterdir()) == []


async def test_a_base_that_does_not_arrive_takes_no_disk(swarm: Any) -> None:
    """A source may serve some chunks of one version after another, each as large as a policy."""
    url, _ = await archived(swarm, last=3, staying={0, 2, 3})
    served = itertools.count()

    async def some(exchange: HostileExchange) -> None:
        is_chunk = exchange.path.startswith("/v1/payloads/") and exchange.status == 200
        await (exchange.send(response(b"", status=404)) if is_chunk and next(served) > 1 else exchange.honest())

    relay = HostileRelay(url, Behaviour("everything", some))
    client = swarm.client(await relay.start())
    try:
        with pytest.raises((NetworkFault, PeerFault)):
            await client.fetch_archived(1, timeout_s=60)
    finally:
        await relay.stop()
    assert next(served) > 2
    assert {path.name.split("-")[0] for path in (swarm.folder / "client" / "downloads").iterdir()} <= {"1"}


async def test_a_relay_that_holds_two_whole_versions_gives_those_between(swarm: Any) -> None:
    """A newcomer whose download takes longer than a training step must not begin again with every version."""
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=4))
    relay, node = await swarm.relay(url, keep=2)
    path = swarm.folder / "file"
    for version in range(4, 8):
        path.write_bytes(contents(version))
        await asyncio.to_thread(server.publish, path, version=version)
        await eventually(lambda version=version: node.newest_whole() == version)
    await eventually(lambda: whole(swarm.folder / "relay") == {4, 7})
    client = swarm.client(relay)
    for version in (6, 5, 7):
        assert (await client.fetch_archived(version, timeout_s=60)).read_bytes() == contents(version)
    assert client.fetched.bytes_in < 1.2 * SIZE
