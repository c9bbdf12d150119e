"""Origin to worker through real relays on loopback: what a run relies on when nobody misbehaves."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from ports import free_port
from waiting import SECONDS, eventually

from shardcast import DownloadLimits, Head, Limits, Origin, TransportLimits, VersionProgress, listen, wire
from shardcast.errors import LocalFault, NotServed, ShardcastError, Stale, TooSlow, Unreachable
from shardcast.manifest import KIB, MIB, seal_head, seal_manifest

QUICK = DownloadLimits(race_after_s=0.1, stall_s=1.0)


async def status_of(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(url + "/v1/status") as response:
        described: dict[str, Any] = await response.json()
        return described


async def test_a_version_reaches_a_worker_through_two_relays(swarm: Any) -> None:
    url, server = swarm.origin()
    root, _ = await swarm.relay(url, name="root")
    leaf, _ = await swarm.relay(root, name="leaf")
    client = swarm.client(leaf)
    for before, version in ((-1, 1), (1, 2), (2, 5)):
        weights = swarm.weights(50_000, seed=version)
        digest = await asyncio.to_thread(server.publish, weights, version=version)
        head = await client.wait_head(after=before, timeout_s=60)
        assert (head.version, head.manifest_digest) == (version, digest)
        path = await client.fetch(head)
        assert path.read_bytes() == weights.read_bytes()
        assert path.name == f"{version}-{digest[:16]}.bin"
    assert await client.fetch(5) == path, "what is here is not fetched again"


async def test_a_worker_that_waits_hears_of_a_version_at_once(swarm: Any) -> None:
    """Two hops of long-polling, not two polling intervals."""
    url, server = swarm.origin()
    root, _ = await swarm.relay(url, name="root", poll_s=60)
    leaf, _ = await swarm.relay(root, name="leaf", poll_s=60)
    client = swarm.client(leaf)
    waiting = asyncio.create_task(client.wait_head(after=0, timeout_s=60))
    await asyncio.sleep(0.3)
    weights = swarm.weights(5_000)
    await asyncio.to_thread(server.publish, weights, version=1)
    started = time.monotonic()
    assert (await waiting).version == 1
    assert time.monotonic() - started < 25


async def test_a_relay_serves_a_chunk_while_the_next_is_arriving(
    swarm: Any, publisher: Any, http: aiohttp.ClientSession
) -> None:
    """Store-and-forward of whole versions would add one full transfer time per hop."""
    payload = swarm.weights(16_384).read_bytes()
    signed = seal_manifest(publisher.manifest(payload, issued_at=int(time.time()), expires_at=2**40), publisher.key)
    now = int(time.time())
    head = publisher.head(manifest_digest=signed.digest, issued_at=now, expires_at=now + 60)
    gates = [asyncio.Event() for _ in range(4)]

    async def gated(request: web.Request) -> web.Response:
        index = int(request.match_info["index"])
        await gates[index].wait()
        return web.Response(body=payload[index * 4096 : (index + 1) * 4096])

    async def fixed(request: web.Request) -> web.Response:
        return web.Response(body=seal_head(head, publisher.key) if "head" in request.path else signed.envelope)

    app = web.Application()
    app.add_routes([web.get("/v1/head", fixed), web.get("/v1/manifests/{digest}", fixed)])
    app.add_routes([web.get("/v1/payloads/{digest}/{index}", gated)])
    upstream = await listen(app)
    url, _ = await swarm.relay(f"http://127.0.0.1:{upstream.port}")
    client = swarm.client(url)
    seen = asyncio.Queue[VersionProgress]()
    found = await client.wait_head(after=0, timeout_s=60)
    fetching = asyncio.create_task(client.fetch(found, progress=seen.put_nowait))
    for index in (0, 2, 1, 3):
        assert not fetching.done()
        gates[index].set()
        step = await asyncio.wait_for(seen.get(), 60)
        assert step.total_bytes == 16_384
    assert step.done_bytes == 16_384
    assert (await fetching).read_bytes() == payload
    await upstream.stop()


async def test_a_relay_fetches_each_byte_from_upstream_once(swarm: Any, http: aiohttp.ClientSession) -> None:
    """The origin's uplink must not pay for every worker."""
    url, server = swarm.origin()
    weights = swarm.weights(200_000)
    await asyncio.to_thread(server.publish, weights, version=1)
    relay, _ = await swarm.relay(url)
    clients = [swarm.client(relay, name=f"client{n}") for n in range(4)]

    async def get(client: Any) -> bytes:
        path = await client.fetch(await client.wait_head(after=0, timeout_s=60))
        return bytes(path.read_bytes())

    assert set(await asyncio.gather(*map(get, clients))) == {weights.read_bytes()}
    sent = (await status_of(http, url))["bytes_out"]
    assert 200_000 <= sent < 210_000


async def test_several_sources_share_the_work(swarm: Any) -> None:
    url, server = swarm.origin()
    await asyncio.to_thread(server.publish, swarm.weights(400_000), version=1)
    relays = [await swarm.relay(url, name=f"relay{n}") for n in range(3)]
    await eventually(lambda: all(relay._store.is_whole(1) for _, relay in relays))
    client = swarm.client(*(url for url, _ in relays))
    await client.fetch(await client.wait_head(after=0, timeout_s=60))
    assert all(row["bytes_received"] > 0 for row in client.sources_status())


async def test_relays_keep_serving_while_the_origin_is_away_and_catch_up(swarm: Any) -> None:
    _, server = swarm.origin()
    await asyncio.to_thread(server.stop)
    server._port = free_port()  # to which it can come back
    url = f"http://127.0.0.1:{await asyncio.to_thread(server.start)}"
    weights = swarm.weights(30_000)
    await asyncio.to_thread(server.publish, weights, version=1)
    relay, _ = await swarm.relay(url, poll_s=0.3)
    client = swarm.client(relay)
    head = await client.wait_head(after=0, timeout_s=60)
    await client.fetch(head)
    await asyncio.to_thread(server.stop)
    other = swarm.client(relay, name="other")
    assert (await other.fetch(await other.wait_head(timeout_s=60))).read_bytes() == weights.read_bytes()

    await asyncio.to_thread(server.start)
    await asyncio.to_thread(server.publish, swarm.weights(30_000, seed=2), version=2)
    assert (await client.wait_head(after=1, timeout_s=60)).version == 2


async def test_a_head_stays_fresh_through_relays(swarm: Any) -> None:
    """Otherwise a long training step would look like a freeze."""
    clock = time.time()
    url, server = swarm.origin(head_lifetime_s=1, head_refresh_s=0.1, clock=lambda: clock)
    await asyncio.to_thread(server.publish, swarm.weights(5_000), version=1)
    relay, _ = await swarm.relay(url, poll_s=0.2, clock=lambda: clock)
    client = swarm.client(relay, clock=lambda: clock, limits=Limits(clock_skew_s=0), poll_s=0.2)
    assert await client.wait_head(after=0, timeout_s=60)
    clock += 100
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            assert await client.wait_head(after=1, timeout_s=0.2) is None
            return
        except Stale:
            continue
    pytest.fail("the relay never passed on the head that was signed again")


async def test_no_new_version_is_not_an_error(swarm: Any) -> None:
    url, server = swarm.origin()
    client = swarm.client(url)
    with pytest.raises(NotServed) as caught:
        await client.wait_head(timeout_s=1.0)
    assert caught.value.code == "no_head"
    await asyncio.to_thread(server.publish, swarm.weights(5_000), version=1)
    assert await client.wait_head(after=1, timeout_s=1.0) is None


async def test_fetching_backwards_is_refused_and_the_archive_is_open(swarm: Any) -> None:
    """A worker must not be led back to old weights, and an auditor must be able to get them."""
    url, server = swarm.origin()
    digests = {}
    for version in (1, 2, 3):
        weights = swarm.weights(9_000, seed=version)
        digests[version] = await asyncio.to_thread(server.publish, weights, version=version)
    client = swarm.client(url)
    head = await client.wait_head(timeout_s=60)
    with pytest.raises(Stale) as caught:
        await client.fetch(1)
    assert caught.value.code == "rollback"
    old = await client.fetch_archived(1, manifest_digest=digests[1])
    assert old.read_bytes() == swarm.weights(9_000, seed=1).read_bytes()
    assert (await client.fetch_archived(2)).name.startswith("2-")
    assert (await client.fetch(head)).name.startswith("3-")
    with pytest.raises(NotServed):
        await client.fetch_archived(9)
    with pytest.raises(ShardcastError):
        await client.fetch_archived(2, manifest_digest=digests[3])


async def test_a_client_keeps_the_last_versions_and_no_leftovers(swarm: Any) -> None:
    url, server = swarm.origin()
    client = swarm.client(url, keep=2)
    for version in range(1, 5):
        await asyncio.to_thread(server.publish, swarm.weights(9_000, seed=version), version=version)
        await client.fetch(await client.wait_head(after=version - 1, timeout_s=60))
    names = sorted(path.name.split("-")[0] for path in (swarm.folder / "client" / "versions").glob("*.bin"))
    assert names == ["3", "4"]
    assert len(list((swarm.folder / "client" / "manifests").iterdir())) == 2
    assert list((swarm.folder / "client" / "deltas").iterdir()) == []
    assert list((swarm.folder / "client" / "downloads").iterdir()) == []


async def test_a_restart_needs_no_network_for_what_is_here_and_checks_it_again(swarm: Any) -> None:
    url, server = swarm.origin()
    weights = swarm.weights(9_000)
    await asyncio.to_thread(server.publish, weights, version=1)
    client = swarm.client(url)
    head = await client.wait_head(timeout_s=60)
    path = await client.fetch(head)
    await client.close()

    again = swarm.client("http://127.0.0.1:9")
    assert await again.fetch(1) == path
    await again.close()

    path.write_bytes(b"tampered" + weights.read_bytes()[8:])
    third = swarm.client(url)
    assert (await third.fetch(1)).read_bytes() == weights.read_bytes()


async def test_no_source_at_all_ends_in_time_with_the_reason(swarm: Any) -> None:
    client = swarm.client("http://127.0.0.1:9", download_limits=QUICK)
    with pytest.raises(Unreachable):
        await client.wait_head(timeout_s=0.5)
    client.set_sources([])
    with pytest.raises(Unreachable) as caught:
        await client.wait_head(timeout_s=0.5)
    assert caught.value.code == "no_sources"


async def test_sources_can_be_replaced_while_running(swarm: Any) -> None:
    url, server = swarm.origin()
    await asyncio.to_thread(server.publish, swarm.weights(9_000), version=1)
    client = swarm.client("http://127.0.0.1:9")
    client.set_sources([url])
    assert await client.fetch(await client.wait_head(timeout_s=60))
    relay, node = await swarm.relay("http://127.0.0.1:9")
    node.set_upstreams([url])
    client.set_sources([relay])
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            assert (await client.wait_head(timeout_s=0.5)) is not None
            return
        except ShardcastError:
            continue
    pytest.fail("the relay never followed its new upstream")


async def test_a_deadline_is_kept_and_the_next_fetch_goes_on(
    swarm: Any, publisher: Any, http: aiohttp.ClientSession
) -> None:
    url, server = swarm.origin()
    weights = swarm.weights(200_000)
    await asyncio.to_thread(server.publish, weights, version=1)
    proxy = await ThrottledProxy(url, bytes_per_s=60_000).start()
    client = swarm.client(
        proxy.url, transport_limits=TransportLimits(min_bytes_per_s=1), download_limits=DownloadLimits(max_in_flight=2)
    )
    head = await client.wait_head(timeout_s=60)
    started = time.monotonic()
    while not client.fetched.bytes_in:  # a pause may last for all of the second
        with pytest.raises(TooSlow):
            await client.fetch(head, timeout_s=1)
    assert time.monotonic() - started < 30
    already = client.fetched.bytes_in
    client.set_sources([url])
    assert (await client.fetch(head)).read_bytes() == weights.read_bytes()
    from_origin = next(row for row in client.sources_status() if row["url"] == url)["bytes_received"]
    assert from_origin <= 200_000 - already
    await proxy.stop()


class ThrottledProxy:
    """Forwards TCP to one URL, downstream at no more than `bytes_per_s` per connection."""

    def __init__(self, url: str, *, bytes_per_s: int) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port, self._rate = int(port), bytes_per_s

    async def start(self) -> ThrottledProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, rate: float) -> None:
            try:
                while data := await source.read(2048):
                    sink.write(data)
                    await sink.drain()
                    if rate:
                        await asyncio.sleep(len(data) / rate)
            except ConnectionError:
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, up_writer, 0), pump(up_reader, writer, self._rate))


async def test_memory_does_not_grow_with_the_version(swarm: Any) -> None:
    """62 GB of weights must go through a machine with far less memory."""
    url, server = swarm.origin(chunk_bytes=256 * KIB)
    weights = swarm.folder / "large.bin"
    weights.write_bytes(b"".join(wire.derive("test", bytes([n])) * 8192 for n in range(128)))
    client = swarm.client(url, download_limits=DownloadLimits(window_bytes=MIB))
    tracemalloc.start()
    try:
        await asyncio.to_thread(server.publish, weights, version=1)
        await client.fetch(await client.wait_head(timeout_s=60))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert weights.stat().st_size == 32 * MIB
    assert peak < 8 * MIB


# -- the origin


async def test_publishing_again_is_idempotent_and_other_bytes_are_refused(swarm: Any) -> None:
    """A trainer restarted after a crash publishes its newest version again: nobody may see two of them."""
    _, server = swarm.origin()
    first = server.publish(swarm.weights(9_000, seed=1), version=1)
    second = server.publish(swarm.weights(9_000, seed=2), version=2)
    assert server.publish(swarm.weights(9_000, seed=2), version=2) == second
    assert server.publish(swarm.weights(9_000, seed=1), version=1) == first
    for version, code in ((2, "version_conflict"), (1, "version_conflict")):
        with pytest.raises(LocalFault) as caught:
            server.publish(swarm.weights(9_000, seed=3), version=version)
        assert caught.value.code == code
    with pytest.raises(LocalFault) as caught:
        server.publish(swarm.weights(9_000, seed=3), version=0)
    assert caught.value.code == "version_not_rising"
    store = server._origin.store
    assert store.versions()[1].manifest.previous == first
    assert store.planned_bytes == 18_000, "the refused bytes were not kept"
    assert list((swarm.folder / "origin" / "incoming").iterdir()) == []


async def test_publishing_again_repairs_lost_chunks(swarm: Any) -> None:
    url, server = swarm.origin()
    weights = swarm.weights(9_000)
    await asyncio.to_thread(server.publish, weights, version=1)
    await asyncio.to_thread(server.stop)
    server._origin.close()
    (whole,) = (swarm.folder / "origin" / "versions").iterdir()
    with whole.open("r+b") as file:
        file.seek(5_000)
        file.write(b"rot")
    url, server = swarm.origin()
    await asyncio.to_thread(server.publish, weights, version=1)
    client = swarm.client(url)
    assert (await client.fetch(await client.wait_head(timeout_s=60))).read_bytes() == weights.read_bytes()


@pytest.mark.parametrize(
    ("size", "options", "code"),
    [
        (0, {}, "empty"),
        (9_000, {"quota_bytes": 8_000}, "quota"),
        (9_000, {"limits": Limits(max_chunks=2)}, "too_large"),
        (9_000, {"limits": Limits(max_payload_bytes=8_999)}, "too_large"),
    ],
)
async def test_what_cannot_be_published_leaves_nothing_behind(
    swarm: Any, size: int, options: dict[str, Any], code: str
) -> None:
    _, server = swarm.origin(**options)
    with pytest.raises(LocalFault) as caught:
        server.publish(swarm.weights(size), version=1)
    assert caught.value.code == code
    assert server._origin.head() is None
    assert server._origin.store.planned_bytes == 0


async def test_a_missing_file_is_a_local_fault(swarm: Any) -> None:
    _, server = swarm.origin()
    with pytest.raises(LocalFault):
        server.publish(swarm.folder / "nothing", version=1)


async def test_an_origin_that_keeps_few_versions_still_counts_on(swarm: Any) -> None:
    _, server = swarm.origin(keep=2)
    for version in range(1, 5):
        server.publish(swarm.weights(5_000, seed=version), version=version)
    assert [signed.manifest.version for signed, _ in server._origin.store.whole_results()] == [4, 3]
    with pytest.raises(LocalFault) as caught:
        server.publish(swarm.weights(5_000, seed=9), version=1)
    assert caught.value.code == "version_conflict", "what it signed stays signed, though the bytes are gone"
    with pytest.raises(LocalFault) as caught:
        server.publish(swarm.weights(5_000, seed=1), version=0)
    assert caught.value.code == "version_not_rising"


async def test_the_head_is_signed_again_before_it_expires(tmp_path: Path, publisher: Any, swarm: Any) -> None:
    now = 1_000_000.0
    origin = Origin(
        tmp_path / "o", publisher.key, publisher.run_id, chunk_bytes=4096, head_refresh_s=5, clock=lambda: now
    )
    origin.publish(swarm.weights(5_000), version=1)
    first = origin.head()
    now += 4
    assert origin.head() == first
    now += 2
    second = origin.head()
    assert second is not None
    assert second != first
    now -= 10
    assert origin.head() != second, "a clock that was set back must not leave a head from the future"
    origin.close()


async def test_a_relay_with_too_little_room_keeps_serving_what_it_has(
    swarm: Any, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    url, server = swarm.origin()
    await asyncio.to_thread(server.publish, swarm.weights(9_000), version=1)
    relay, _ = await swarm.relay(url, quota_bytes=20_000, poll_s=0.2)
    client = swarm.client(relay)
    await client.fetch(await client.wait_head(timeout_s=60))
    await asyncio.to_thread(server.publish, swarm.weights(50_000), version=2)
    await eventually(lambda: "(quota)" in caplog.text, what=lambda: "the relay never said that it has no room")
    status = await status_of(http, relay)
    assert status["version"] == 1
    assert status["versions"][0]["chunks_held"] == 3
    assert status["upstreams"][0]["state"] == "ok", "a small disk here is not the upstream's fault"


async def test_a_head_from_wait_head_is_what_fetch_takes(swarm: Any) -> None:
    url, server = swarm.origin()
    await asyncio.to_thread(server.publish, swarm.weights(5_000), version=1)
    client = swarm.client(url)
    head = await client.wait_head(timeout_s=60)
    assert isinstance(head, Head)
    first, second = await asyncio.gather(client.fetch(head), client.fetch(1))
    assert first == second
    received = client.sources_status()[0]["bytes_received"]
    assert received == 5_000, "two callers share one download"
