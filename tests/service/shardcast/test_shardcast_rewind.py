"""A worker and a verifier hold one policy whole, and the others that they may need again as deltas back from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from broadcast_swarm import SIZE, contents

from shardcast import Client
from shardcast.store.reading import StoredVersions
from tests.support.waiting import eventually


def whole(folder: Path) -> set[int]:
    return {int(path.name.split("-")[0]) for path in (folder / "versions").glob("*.bin")}


def rewound(folder: Path) -> set[int]:
    return {int(path.name.split("-")[0]) for path in (folder / "rewinds").glob("*.delta")}


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def follow(server: Any, client: Client, folder: Path, *versions: int) -> None:
    path = folder / "file"
    for version in versions:
        path.write_bytes(contents(version))
        await asyncio.to_thread(server.publish, path, version=version)
        head = await client.wait_head(after=version - 1, timeout_s=60)
        assert head is not None
        assert (await client.fetch(head, timeout_s=60)).read_bytes() == contents(version)


async def test_a_follower_holds_one_whole_version_and_needs_no_network_for_the_others(swarm: Any) -> None:
    """A worker that is leased a slot of an older policy must not wait for relays that hold it no more."""
    url, server = swarm.origin()
    client = swarm.client(url, rewind=3)
    await follow(server, client, swarm.folder, *range(6))
    folder = swarm.folder / "client"
    await eventually(lambda: (whole(folder), rewound(folder)) == ({5}, {3, 4}))
    assert disk_bytes(folder) < 1.1 * SIZE
    assert [version for version in range(6) if client.has(version)] == [3, 4, 5]
    client.set_sources([])
    before = client.fetched.bytes_in
    for version in (3, 4):
        digest = swarm.store().get(version).digest
        assert (await client.fetch_archived(version, manifest_digest=digest)).read_bytes() == contents(version)
    assert client.fetched.bytes_in == before
    await eventually(lambda: whole(folder) == {4, 5})  # the last one may be in use


async def test_who_lags_by_a_version_finds_it_whole(swarm: Any) -> None:
    """A verifier that lags would otherwise make each file that it needs from the delta that it has just made of it."""
    url, server = swarm.origin()
    client, folder = swarm.client(url, rewind=4, spare=2), swarm.folder / "client"
    await follow(server, client, swarm.folder, 0, 1)
    for version in (2, 3, 4):
        await client.fetch_archived(version - 2)
        await follow(server, client, swarm.folder, version)
        await eventually(lambda version=version: whole(folder) == {version, version - 1})


async def test_another_process_reads_what_is_rewound(swarm: Any) -> None:
    """`swarmproof export` takes a policy out of a running worker's folder."""
    url, server = swarm.origin()
    client = swarm.client(url, rewind=3)
    await follow(server, client, swarm.folder, *range(4))
    folder = swarm.folder / "client"
    await eventually(lambda: whole(folder) == {3})
    held = StoredVersions(folder)
    assert held.versions() == [1, 2, 3]
    for version in held.versions():
        held.write(version, swarm.folder / "out")
        assert (swarm.folder / "out").read_bytes() == contents(version)
        (swarm.folder / "out").unlink()


async def test_it_goes_on_after_a_restart(swarm: Any) -> None:
    url, server = swarm.origin()
    client = swarm.client(url, rewind=3)
    await follow(server, client, swarm.folder, *range(4))
    await client.close()
    client = swarm.client(url, rewind=3)
    assert [version for version in range(4) if client.has(version)] == [1, 2, 3]
    await follow(server, client, swarm.folder, 4)
    folder = swarm.folder / "client"
    await eventually(lambda: (whole(folder), rewound(folder)) == ({4}, {2, 3}))
    digest = swarm.store().get(2).digest
    assert (await client.fetch_archived(2, manifest_digest=digest)).read_bytes() == contents(2)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 200])
async def test_a_damaged_delta_costs_a_fetch(swarm: Any, damage: bytes) -> None:
    """The disk of a machine that nobody watches must not make its worker sample from another policy."""
    url, server = swarm.origin()
    client = swarm.client(url, rewind=3)
    await follow(server, client, swarm.folder, *range(4))
    folder = swarm.folder / "client"
    await eventually(lambda: rewound(folder) == {1, 2})
    (path,) = (folder / "rewinds").glob("1-*.delta")
    path.write_bytes(path.read_bytes()[: -len(damage) or None] + damage if damage else b"")
    digest = swarm.store().get(1).digest
    assert (await client.fetch_archived(1, manifest_digest=digest)).read_bytes() == contents(1)


async def test_versions_that_are_unlike_stay_whole(swarm: Any) -> None:
    url, server = swarm.origin()
    client = swarm.client(url, keep=3, rewind=3)
    for version in range(5):
        await asyncio.to_thread(server.publish, swarm.weights(SIZE, seed=version), version=version)
        head = await client.wait_head(after=version - 1, timeout_s=60)
        await client.fetch(head, timeout_s=60)
    folder = swarm.folder / "client"
    await client.close()
    assert (whole(folder), rewound(folder)) == ({2, 3, 4}, set())
