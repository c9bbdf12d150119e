"""Where a node's own disk, descriptors and threads let it down: what is served stays right, and nothing piles up."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shardcast import DeltaSettings, Listener, ServerLimits, listen
from shardcast.errors import LocalFault
from shardcast.manifest import seal_manifest
from shardcast.serve.server import make_app
from shardcast.serve.state import ServedState
from shardcast.store.payload_file import PayloadFile
from shardcast.store.versions import Store

CHUNK = 4096


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def data_of(seed: int, chunks: int = 3) -> bytes:
    return random.Random(seed).randbytes(chunks * CHUNK)


def pieces(data: bytes) -> list[bytes]:
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]


def payload_file(folder: Path, publisher: Any, data: bytes) -> PayloadFile:
    return PayloadFile(publisher.payload(data), final=folder / "a.bin", part=folder / "a.part")


def fill(file: PayloadFile, data: bytes) -> None:
    for index in file.missing():
        file.write(index, pieces(data)[index])


def publish(store: Store, publisher: Any, version: int, data: bytes) -> Any:
    signed = seal_manifest(publisher.manifest(data, version=version), publisher.key)
    store.add_manifest(signed)
    file = store.result(signed)
    fill(file, data)
    store.finish(file, signed)
    return signed


# -- descriptors


def test_versions_that_lie_there_hold_no_descriptors(tmp_path: Path, publisher: Any) -> None:
    """An origin keeps every version of a run: after a thousand steps it could not publish any more."""
    store = Store(tmp_path, run_id=publisher.run_id, keep=None, keep_deltas=None)
    before = descriptors()
    for version in range(1, 30):
        publish(store, publisher, version, data_of(version))
    assert len(store.whole_results()) == 29
    for signed, file in store.whole_results():
        assert file.read(0) == pieces(data_of(signed.manifest.version))[0]
    assert descriptors() == before
    store.close()


def test_a_download_that_fails_to_open_leaves_no_descriptor(
    tmp_path: Path, publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, length // 2)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = descriptors()
    for _ in range(5):
        with pytest.raises(LocalFault) as caught:
            payload_file(tmp_path, publisher, data_of(1))
        assert caught.value.code == "disk_full"
    assert descriptors() == before
    assert (tmp_path / "a.part").stat().st_size == 0, "what was reserved in vain is given back"


def test_finishing_what_was_closed_meanwhile_touches_no_descriptor(tmp_path: Path, publisher: Any) -> None:
    """A thread that outlives its cancelled fetch would close whatever got the same number since."""
    file = payload_file(tmp_path, publisher, data_of(1))
    fill(file, data_of(1))
    file.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    with pytest.raises(LocalFault) as caught:
        file.finish()
    assert caught.value.code == "not_held"
    for descriptor in others:
        os.close(descriptor)  # each is still there to be closed


# -- disks


def test_a_sector_that_cannot_be_read_costs_its_chunk(
    tmp_path: Path, publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk says EIO: that is a damaged chunk to fetch again, not the end of the node."""
    data = data_of(1)
    fill(file := payload_file(tmp_path, publisher, data), data)
    file.finish()
    file.close()
    pread = os.pread

    def failing(descriptor: int, length: int, offset: int) -> bytes:
        if offset == CHUNK:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    again = payload_file(tmp_path, publisher, data)
    again.check()
    assert again.missing() == [1]
    assert again.read(2) == pieces(data)[2]
    monkeypatch.undo()
    fill(again, data)
    assert again.finish().read_bytes() == data
    again.close()


@pytest.mark.parametrize("steps", range(6))
def test_a_crash_while_a_damaged_file_becomes_a_part_costs_its_chunk(
    tmp_path: Path, publisher: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Killed after any of the steps in between, the next start still has all the other chunks."""
    data = data_of(1, chunks=5)
    fill(file := payload_file(tmp_path, publisher, data), data)
    file.finish()
    file.close()
    with (tmp_path / "a.bin").open("r+b") as damaged:
        damaged.write(b"rotten")
    broken = payload_file(tmp_path, publisher, data)
    left = iter(range(steps))

    def killing(call: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise OSError(errno.EPERM, "killed here")
            return call(*arguments, **options)

        return wrapped

    monkeypatch.setattr(Path, "rename", killing(Path.rename))
    for name in ("open", "ftruncate", "write"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))
    with pytest.raises(LocalFault):
        broken.check()
    monkeypatch.undo()
    broken.close()
    again = payload_file(tmp_path, publisher, data)
    again.check()
    assert again.missing() == [0]
    again.close()


async def test_a_base_that_was_cut_short_costs_the_chunks_that_it_lacks(swarm: Any) -> None:
    url, server = swarm.origin()
    client = swarm.client(url)
    weights = bytearray(random.Random(1).randbytes(60 * CHUNK))
    for version in (1, 2):
        weights[version::CHUNK] = random.Random(version).randbytes(60)
        (swarm.folder / "weights").write_bytes(weights)
        await asyncio.to_thread(server.publish, swarm.folder / "weights", version=version)
        head = await client.wait_head(after=version - 1, timeout_s=60)
        assert (await client.fetch(head, timeout_s=60)).read_bytes() == weights
        if version == 1:
            (base,) = (swarm.folder / "client" / "versions").iterdir()
            os.truncate(base, 30 * CHUNK)
    assert client.fetched.wrong_chunks == 30
    assert client.fetched.bytes_in < (60 + 30 + 4) * CHUNK


async def test_frozen_layers_that_were_damaged_since_are_fetched(swarm: Any) -> None:
    """What was right when it was checked may be rotten when it is copied: the next version must not fail over it."""
    url, server = swarm.origin(deltas=DeltaSettings(enabled=False))
    client = swarm.client(url)
    weights = bytearray(random.Random(1).randbytes(60 * CHUNK))
    for version in (1, 2):
        weights[0] = version
        (swarm.folder / "weights").write_bytes(weights)
        await asyncio.to_thread(server.publish, swarm.folder / "weights", version=version)
        head = await client.wait_head(after=version - 1, timeout_s=60)
        assert (await client.fetch(head, timeout_s=60)).read_bytes() == weights
        if version == 1:
            (base,) = (swarm.folder / "client" / "versions").iterdir()
            with base.open("r+b") as file:
                file.write(bytes(10 * CHUNK))
    assert client.fetched.bytes_in == (60 + 10) * CHUNK


async def test_a_disk_that_cannot_serve_says_so_without_filling_the_log(
    tmp_path: Path, publisher: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone may ask, and each question would be a traceback."""
    store = Store(tmp_path, run_id=publisher.run_id)
    signed = seal_manifest(publisher.manifest(data_of(1)), publisher.key)
    store.add_manifest(signed)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    listener = await serve(store, publisher)
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{listener.port}/v1/payloads/{signed.manifest.full.digest}/0") as response,
    ):
        body = await response.json()
    assert (response.status, body["code"]) == (503, "disk_full")
    assert str(tmp_path) not in body["message"]
    assert caplog.records == []
    await listener.stop()
    store.close()


# -- one payload, two versions


async def serve(store: Store, publisher: Any) -> Listener:
    served = ServedState(store=store, role="relay", run_id=publisher.run_id, head=lambda: None)
    served.open()
    return await listen(make_app(served, ServerLimits()))


def test_weights_that_are_published_twice_are_served_while_either_is_here(tmp_path: Path, publisher: Any) -> None:
    """A trainer that starts again publishes the same weights under a new version."""
    store = Store(tmp_path, run_id=publisher.run_id, keep=2)
    data = data_of(1)
    first = publish(store, publisher, 1, data)
    again = seal_manifest(publisher.manifest(data, version=2, previous=first.digest), publisher.key)
    name = again.manifest.full.digest
    assert name == first.manifest.full.digest
    store.add_manifest(again)
    assert (held := store.payload(name)) is not None
    assert held.is_complete(), "the first version's file serves until the second has one"
    fill(store.result(again), data)
    store.finish(store.result(again), again)
    store.drop(1)
    assert (held := store.payload(name)) is not None
    assert held.read(1) == pieces(data)[1]
    third = publish(store, publisher, 3, data)
    store.drop(3)
    assert third.manifest.full.digest == name
    assert (held := store.payload(name)) is not None
    assert held.read(1) == pieces(data)[1]
    store.drop(2)
    assert store.payload(name) is None
    store.close()


# -- room


def test_a_manifest_alone_takes_no_room_of_others(tmp_path: Path, publisher: Any) -> None:
    """Else the way to a new version would cost the very base that it begins with."""
    data = data_of(1)
    store = Store(tmp_path, run_id=publisher.run_id, quota_bytes=len(data) + CHUNK)
    publish(store, publisher, 1, data)
    way = publisher.delta(bytes(100), base_version=1)
    between = seal_manifest(publisher.manifest(data_of(2), version=2, deltas=(way,)), publisher.key)
    store.pin(1)
    store.add_manifest(between, only_manifest=True)
    assert store.planned_bytes == len(data)
    store.delta(between, 0)
    with pytest.raises(LocalFault) as caught:
        store.result(between)
    assert caught.value.code == "quota"
    assert store.planned_bytes == len(data) + 100
    store.close()


async def test_two_fetches_may_need_the_same_delta(swarm: Any) -> None:
    """A verifier fetches old versions beside the newest: who is done first must not delete under the other."""
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=1000))
    client = swarm.client(url, keep=5)
    weights, published = bytearray(random.Random(1).randbytes(60 * CHUNK)), dict[int, bytes]()
    for version in range(1, 7):
        weights[version::CHUNK] = random.Random(version).randbytes(60)
        published[version] = bytes(weights)
        (swarm.folder / "weights").write_bytes(weights)
        await asyncio.to_thread(server.publish, swarm.folder / "weights", version=version)
        if version == 1:
            await client.fetch(await client.wait_head(timeout_s=60), timeout_s=60)
    head = await client.wait_head(after=1, timeout_s=60)
    paths = await asyncio.gather(
        client.fetch(head, timeout_s=60), *(client.fetch_archived(version, timeout_s=60) for version in (5, 4, 3, 2))
    )
    assert [path.read_bytes() for path in paths] == [published[version] for version in (6, 5, 4, 3, 2)]
    assert (client.fetched.by_delta, client.fetched.in_full) == (5, 1)
    assert list((swarm.folder / "client" / "deltas").iterdir()) == []


# -- serving


async def test_readers_at_once_get_their_own_chunks_where_sendfile_is_missing(
    tmp_path: Path, publisher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have none, and the way around it reads at the descriptor's own offset."""

    def missing(*_: object) -> int:
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, "sendfile", missing)
    data = data_of(1, chunks=40)
    store = Store(tmp_path, run_id=publisher.run_id)
    signed = seal_manifest(publisher.manifest(data), publisher.key)
    store.add_manifest(signed)
    fill(store.result(signed), data)
    listener = await serve(store, publisher)
    url = f"http://127.0.0.1:{listener.port}/v1/payloads/{signed.manifest.full.digest}"
    async with aiohttp.ClientSession() as http:

        async def chunk(index: int) -> bytes:
            async with http.get(f"{url}/{index}") as response:
                return await response.read()

        for _ in range(2):  # on its way, then whole
            assert await asyncio.gather(*(chunk(index) for index in range(40))) == pieces(data)
            store.finish(store.result(signed), signed)
    await listener.stop()
    store.close()


async def test_asking_for_chunks_that_never_come_leaves_nothing(tmp_path: Path, publisher: Any) -> None:
    """A stranger may ask for each of 100,000 chunks of a version that is dropped before they arrive."""
    store = Store(tmp_path, run_id=publisher.run_id)
    signed = seal_manifest(publisher.manifest(data_of(1, chunks=50)), publisher.key)
    store.add_manifest(signed)
    served = ServedState(store=store, role="relay", run_id=publisher.run_id, head=lambda: None)
    served.open()
    name = signed.manifest.full.digest
    assert set(await asyncio.gather(*(served.chunk(name, index, 0.01) for index in range(50)))) == {None}
    assert len(served._arrivals) == 0
    store.close()
