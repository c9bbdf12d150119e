"""Versions that differ little travel as deltas: bit for bit, from whatever is held, and checked like the rest."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from shardcast import Client, DeltaSettings, DownloadLimits, Manifest, Origin, SignedManifest, VersionProgress
from shardcast.codec.delta_routes import cheapest
from shardcast.manifest import seal_manifest

SIZE = 400_000
QUICK = DownloadLimits(race_after_s=0.1)


class Training:
    """Weights whose words change a little with every version."""

    def __init__(self, folder: Path, *, size: int = SIZE) -> None:
        self._folder, self._rng = folder, np.random.default_rng(0)
        self._weights = self._rng.integers(0, 2**16, size // 2, dtype=np.uint16)

    def step(self) -> Path:
        at = self._rng.choice(len(self._weights), len(self._weights) // 150, replace=False)
        self._weights[at] += self._rng.choice(np.array([1, -1]), len(at)).astype(np.uint16)
        path = self._folder / "weights.bin"
        self._weights.tofile(path)
        return path


async def publish(server: Any, training: Training, version: int) -> bytes:
    path = training.step()
    await asyncio.to_thread(server.publish, path, version=version)
    return path.read_bytes()


async def fetched(client: Client, version: int, **options: Any) -> bytes:
    head = await client.wait_head(after=version - 1, timeout_s=60)
    assert head is not None
    return (await client.fetch(head, timeout_s=60, **options)).read_bytes()


async def sent(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url + "/v1/status") as response:
        return int((await response.json())["bytes_out"])


async def test_a_worker_that_has_the_last_version_fetches_the_delta(swarm: Any) -> None:
    url, server = swarm.origin()
    training = Training(swarm.folder)
    relay, _ = await swarm.relay(url)
    client = swarm.client(relay)
    seen = list[VersionProgress]()
    for version in range(1, 4):
        weights = await publish(server, training, version)
        assert await fetched(client, version, progress=seen.append) == weights
    assert (client.fetched.in_full, client.fetched.by_delta) == (1, 2)
    assert client.fetched.result_bytes == 3 * SIZE
    assert client.fetched.bytes_in < SIZE + 2 * SIZE / 40
    assert (seen[-1].full_bytes, seen[-1].done_bytes) == (SIZE, seen[-1].total_bytes)
    assert seen[-1].total_bytes < SIZE / 40, "progress is measured in what travels"
    assert list((swarm.folder / "client" / "deltas").iterdir()) == [], "a delta that was applied is of no more use"


async def test_a_newcomer_gets_all_of_it_from_a_relay_that_got_a_delta(swarm: Any, http: aiohttp.ClientSession) -> None:
    """The origin sends a version once, as a delta; whoever joins later costs its uplink nothing."""
    url, server = swarm.origin()
    training = Training(swarm.folder)
    relay, _ = await swarm.relay(url)
    early = swarm.client(relay, name="early")
    for version in (1, 2):
        weights = await publish(server, training, version)
        assert await fetched(early, version) == weights
    before = await sent(http, url)
    assert await fetched(swarm.client(relay, name="late"), 2) == weights
    assert before < SIZE + SIZE / 20
    assert await sent(http, url) - before < 5_000, "heads and manifests"


async def test_who_is_some_versions_behind_follows_the_chain(swarm: Any) -> None:
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=1000))
    training = Training(swarm.folder)
    client = swarm.client(url)
    await publish(server, training, 1)
    await fetched(client, 1)
    for version in range(2, 8):
        weights = await publish(server, training, version)
    assert await fetched(client, 7) == weights
    assert (client.fetched.in_full, client.fetched.by_delta) == (1, 1)
    assert client.fetched.bytes_in < SIZE + SIZE / 5
    results = sorted(path.name.split("-")[0] for path in (swarm.folder / "client" / "versions").iterdir())
    assert results == ["1", "7"], "nothing in between was written"


async def test_who_holds_an_anchor_takes_the_folded_delta(swarm: Any) -> None:
    """Twice changed is sent once: from the last multiple of `fold_every` there is one delta for all steps since."""
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=4))
    training = Training(swarm.folder)
    client = swarm.client(url)
    for version in range(4, 8):
        weights = await publish(server, training, version)
        if version == 4:
            await fetched(client, 4)
    signed = server._origin.store.get(7)
    assert [delta.base_version for delta in signed.manifest.deltas] == [6, 4]
    before = client.fetched.bytes_in
    assert await fetched(client, 7) == weights
    assert client.fetched.bytes_in - before == signed.manifest.deltas[1].payload.payload_bytes


async def test_a_delta_that_would_not_be_smaller_is_not_made(swarm: Any) -> None:
    url, server = swarm.origin()
    client = swarm.client(url)
    for version in (1, 2):
        weights = swarm.weights(SIZE, seed=version)
        await asyncio.to_thread(server.publish, weights, version=version)
        assert await fetched(client, version) == weights.read_bytes()
    assert server._origin.store.get(2).manifest.deltas == ()
    larger = swarm.weights(SIZE + 2, seed=2)
    await asyncio.to_thread(server.publish, larger, version=3)
    assert server._origin.store.get(3).manifest.deltas == (), "nor one between different sizes"
    assert await fetched(client, 3) == larger.read_bytes()


async def test_deltas_that_are_more_than_the_result_together_are_not_all_made(swarm: Any) -> None:
    """A relay fetches every delta, for others: where every word changes, a second one would cost more than it saves."""
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=3))
    rng = np.random.default_rng(0)
    relay, node = await swarm.relay(url)
    client = swarm.client(relay)
    weights = rng.integers(0, 2**32, SIZE // 4, dtype=np.uint32)
    for version in range(3, 6):
        weights += rng.integers(0, 2**16, len(weights), dtype=np.uint32)
        path = swarm.folder / "weights.bin"
        path.write_bytes(bytes_of_float32(weights))
        await asyncio.to_thread(server.publish, path, version=version)
        assert await fetched(client, version) == path.read_bytes()
    assert [delta.base_version for delta in server._origin.store.get(5).manifest.deltas] == [4]
    fetched_bytes = node._fetcher.fetched
    assert fetched_bytes.bytes_in < 0.8 * fetched_bytes.result_bytes


def bytes_of_float32(words: Any) -> bytes:
    """A safetensors file of one tensor, as which the words are known to be four bytes wide."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(words)], "data_offsets": [0, 4 * len(words)]}}).encode()
    return len(header).to_bytes(8, "little") + header + words.tobytes()


async def test_layers_that_did_not_change_are_not_fetched(swarm: Any) -> None:
    """Frozen layers cost nothing even where no delta is worth making."""
    url, server = swarm.origin()
    client = swarm.client(url)
    frozen = random.Random(1).randbytes(50 * 4096)
    for version in (1, 2):
        path = swarm.folder / "weights.bin"
        path.write_bytes(frozen + random.Random(version + 1).randbytes(60 * 4096 + 5))
        await asyncio.to_thread(server.publish, path, version=version)
        assert await fetched(client, version) == path.read_bytes()
    assert client.fetched.bytes_in == path.stat().st_size + 60 * 4096 + 5


async def test_a_base_that_rotted_costs_the_chunks_that_came_out_wrong(swarm: Any) -> None:
    """The result is checked, not the base: one bad sector must neither spread nor cost a whole version."""
    url, server = swarm.origin()
    training = Training(swarm.folder)
    client = swarm.client(url)
    await publish(server, training, 1)
    await fetched(client, 1)
    (base,) = (swarm.folder / "client" / "versions").iterdir()
    with base.open("r+b") as file:
        file.seek(100_000)
        file.write(b"rotten")
    weights = await publish(server, training, 2)
    before = client.fetched.bytes_in
    assert await fetched(client, 2) == weights
    delta = server._origin.store.get(2).manifest.deltas[0].payload.payload_bytes
    assert client.fetched.bytes_in - before == delta + 4096
    assert client.fetched.wrong_chunks == 1


def resigned(publisher: Any, signed: SignedManifest, **changes: Any) -> SignedManifest:
    """A manifest that the publisher signs, though it made it otherwise."""
    fields = {name: getattr(signed.manifest, name) for name in Manifest.__struct_fields__}
    return seal_manifest(Manifest(**{**fields, **changes}), publisher.key)


async def test_a_base_that_rotted_at_the_origin_makes_no_delta(swarm: Any, publisher: Any) -> None:
    """From the damaged bytes nobody else has it would lead nowhere, and cost each reader a transfer in vain."""
    training = Training(swarm.folder)
    for rotten in (False, True):
        folder = swarm.folder / f"origin-{rotten}"
        with closing(Origin(folder, publisher.key, publisher.run_id)) as origin:
            origin.publish(training.step(), version=1)
        (base,) = (folder / "versions").iterdir()
        if rotten:
            data = bytearray(base.read_bytes())
            data[5] ^= 1
            base.write_bytes(data)
        with closing(Origin(folder, publisher.key, publisher.run_id)) as origin:
            origin.publish(training.step(), version=2)
            signed = origin.store.get(2)
        assert signed is not None
        assert len(signed.manifest.deltas) == (0 if rotten else 1)


async def test_a_delta_that_does_not_lead_to_the_result_falls_back_to_full(swarm: Any, publisher: Any) -> None:
    """A publisher's bug, or a base of another history: what comes out is compared, and the rest is fetched."""
    url, server = swarm.origin()
    training = Training(swarm.folder)
    store = server._origin.store
    client = swarm.client(url)
    await publish(server, training, 1)
    await fetched(client, 1)
    await publish(server, training, 2)
    weights = await publish(server, training, 3)
    misleading = resigned(
        publisher,
        store.get(3),
        version=4,
        previous=store.get(3).digest,
        deltas=tuple(
            type(delta)(base=store.get(1).manifest.result_digest, base_version=1, payload=delta.payload)
            for delta in store.get(3).manifest.deltas[:1]
        ),
    )
    store.add_manifest(misleading)
    path = await client.fetch_archived(4, timeout_s=60)
    assert path.read_bytes() == weights
    assert client.fetched.wrong_chunks > 0


async def test_a_delta_that_is_no_delta_falls_back_to_full(swarm: Any, publisher: Any) -> None:
    url, server = swarm.origin()
    training = Training(swarm.folder)
    store = server._origin.store
    client = swarm.client(url)
    await publish(server, training, 1)
    await fetched(client, 1)
    weights = await publish(server, training, 2)
    nonsense = random.Random(0).randbytes(3_000)
    delta = publisher.delta(nonsense, base_version=1)
    signed = resigned(
        publisher,
        store.get(2),
        version=3,
        previous=store.get(2).digest,
        deltas=(type(delta)(base=store.get(1).manifest.result_digest, base_version=1, payload=delta.payload),),
    )
    store.add_manifest(signed)
    store.delta(signed, 0).write(0, nonsense)
    assert (await client.fetch_archived(3, timeout_s=60)).read_bytes() == weights


async def test_deltas_that_nobody_has_any_more_cost_little_time(swarm: Any) -> None:
    """A relay that came later has no old deltas: who needs them takes the whole version from it."""
    url, server = swarm.origin(deltas=DeltaSettings(fold_every=1000))
    training = Training(swarm.folder)
    behind = swarm.client(url, name="behind", download_limits=QUICK)
    await publish(server, training, 1)
    await fetched(behind, 1)
    for version in (2, 3):
        weights = await publish(server, training, version)
    relay, _ = await swarm.relay(url)
    newcomer = swarm.client(relay, name="newcomer")
    assert await fetched(newcomer, 3) == weights
    behind.set_sources([relay])
    assert await asyncio.wait_for(fetched(behind, 3), 60) == weights
    assert behind.fetched.in_full == 2


# -- the choice


def version_of(publisher: Any, number: int, *deltas: tuple[int, int]) -> SignedManifest:
    """A version with deltas of (base version, bytes)."""
    ways = tuple(
        publisher.delta(b"d" * size, base_version=base).__class__(
            base=f"{base:064x}", base_version=base, payload=publisher.payload(b"d" * size)
        )
        for base, size in deltas
    )
    manifest = publisher.manifest(b"w" * 100_000, version=number, deltas=ways, result_digest=f"{number:064x}")
    return seal_manifest(manifest, publisher.key)


async def chosen(history: dict[int, SignedManifest], target: int, held: list[int], less_than: float) -> list[int]:
    async def manifest_of(version: int) -> SignedManifest | None:
        return history.get(version)

    chain = await cheapest(
        history[target],
        {f"{version:064x}": version for version in held},
        less_than=less_than,
        manifest_of=manifest_of,
    )
    return [hop.delta.base_version for hop in chain]


async def test_the_chain_with_the_fewest_bytes_is_taken(publisher: Any) -> None:
    history = {
        number: version_of(publisher, number, (number - 1, 3_000), (4, 7_000)) if number > 5 else
        version_of(publisher, number, (number - 1, 3_000))
        for number in range(1, 9)
    }  # fmt: skip
    assert await chosen(history, 8, [7], 1e9) == [7]
    assert await chosen(history, 8, [4], 1e9) == [4], "one folded delta is less than four"
    assert await chosen(history, 8, [4, 7], 1e9) == [7]
    assert await chosen(history, 8, [3], 1e9) == [3, 4], "up to the anchor, then the fold"
    assert await chosen(history, 8, [4], 7_000) == [], "as many bytes as the result itself"
    assert await chosen(history, 8, [], 1e9) == []
    assert await chosen({8: history[8]}, 8, [3], 1e9) == [], "manifests in between that nobody has"
