"""kill -9 at awkward moments, with real processes: no verified byte is fetched twice, no version is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from waiting import eventually

import shardcast
from shardcast import Origin, listen
from shardcast.errors import LocalFault
from shardcast.store.reading import StoredVersions
from shardcast.trust import load_seen

pytestmark = pytest.mark.system

CHUNK = 4096
PROLOGUE = """
import asyncio, os, signal, sys
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from shardcast import Client, DownloadLimits, Origin, Relay, wire
key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
public = key.public_key().public_bytes_raw()
run_id = wire.digest(public)
folder = Path(sys.argv[1])
"""


def spawn(body: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(shardcast.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + body, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(5)
    if process.stdout is not None:
        process.stdout.close()


class CountingUpstream:
    """Passes on an origin's store, but not more than `allowance` chunks; counts every chunk it sent."""

    def __init__(self, origin: Origin, *, allowance: int) -> None:
        self._origin, self.allowance = origin, allowance
        self.sent: Counter[str] = Counter()

    async def start(self) -> str:
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/head", self._head),
                web.get("/v1/manifests/{digest}", self._manifest),
                web.get("/v1/payloads/{name}/{index}", self._chunk),
            ]
        )
        self.listener = await listen(app)
        return f"http://127.0.0.1:{self.listener.port}"

    async def _head(self, request: web.Request) -> web.Response:
        shown = self._origin.head()
        assert shown is not None
        if int(request.query.get("after", -1)) >= shown.version:
            await asyncio.sleep(min(1.0, float(request.query.get("wait", 0))))
            return web.Response(status=204)
        return web.Response(body=shown.envelope)

    async def _manifest(self, request: web.Request) -> web.Response:
        signed = self._origin.store.by_digest(request.match_info["digest"])
        assert signed is not None
        return web.Response(body=signed.envelope)

    async def _chunk(self, request: web.Request) -> web.Response:
        name, index = request.match_info["name"], int(request.match_info["index"])
        if self.allowance <= 0:
            await asyncio.sleep(3600)
        self.allowance -= 1
        self.sent[f"{name}/{index}"] += 1
        file = self._origin.store.payload(name)
        assert file is not None
        return web.Response(body=file.read(index))


def journalled(folder: Path, chunks: int) -> bool:
    return [journal.stat().st_size for journal in folder.glob("downloads/*.journal")] == [chunks * 4]


def published(swarm: Any, *, chunks: int) -> tuple[Origin, Path]:
    weights = swarm.weights(chunks * CHUNK)
    _, server = swarm.origin()
    server.publish(weights, version=1)
    return server._origin, weights


async def test_a_client_killed_mid_download_resumes_at_the_chunk(swarm: Any, tmp_path: Path) -> None:
    origin, weights = published(swarm, chunks=40)
    upstream = CountingUpstream(origin, allowance=25)
    url = await upstream.start()
    process = spawn(
        """
async def main():
    async with Client(run_id, public, [sys.argv[2]], folder) as client:
        await client.fetch(await client.wait_head())
asyncio.run(main())
""",
        tmp_path / "worker",
        url,
    )
    await eventually(lambda: journalled(tmp_path / "worker", 25))
    kill(process)
    assert not list((tmp_path / "worker" / "versions").glob("*.bin")), "no half file under a final name"

    await upstream.listener.stop()
    upstream = CountingUpstream(origin, allowance=1000)
    client = swarm.client(await upstream.start(), name="worker")
    seen = load_seen(tmp_path / "worker" / "state.json")
    assert seen is not None
    assert seen.version == 1, "the highest version seen survives, so a restart is no rollback"
    assert (await client.fetch(1)).read_bytes() == weights.read_bytes()
    assert sum(upstream.sent.values()) == 15
    await upstream.listener.stop()


async def test_a_relay_killed_mid_download_keeps_what_it_verified(swarm: Any, tmp_path: Path) -> None:
    origin, weights = published(swarm, chunks=30)
    upstream = CountingUpstream(origin, allowance=12)
    url = await upstream.start()
    process = spawn(
        """
async def main():
    relay = Relay([sys.argv[2]], store_dir=folder, run_id=run_id, publisher_key=public)
    print(await relay.start(), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
""",
        tmp_path / "relay",
        url,
    )
    await eventually(lambda: journalled(tmp_path / "relay", 12))
    kill(process)

    await upstream.listener.stop()
    upstream = CountingUpstream(origin, allowance=1000)
    again, _ = await swarm.relay(await upstream.start(), name="relay")
    client = swarm.client(again)
    head = await client.wait_head(timeout_s=60)
    assert (await client.fetch(head)).read_bytes() == weights.read_bytes()
    assert sum(upstream.sent.values()) == 18
    await eventually(lambda: not list((tmp_path / "relay" / "downloads").iterdir()))
    await upstream.listener.stop()


async def test_an_origin_killed_between_persisting_and_announcing(swarm: Any, tmp_path: Path) -> None:
    """The restarted trainer publishes the same step again: one version, one manifest."""
    weights = swarm.weights(5 * CHUNK)
    process = spawn(
        """
origin = Origin(folder, key, run_id, chunk_bytes=4096)
print(origin.publish(sys.argv[2], version=1), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        tmp_path / "origin",
        weights,
    )
    digest = await asyncio.to_thread(process.communicate, timeout=120)
    url, server = swarm.origin()
    client = swarm.client(url)
    head = await client.wait_head(timeout_s=60)
    assert head.manifest_digest == digest[0].strip()
    assert await asyncio.to_thread(server.publish, weights, version=1) == head.manifest_digest
    assert (await client.fetch(head)).read_bytes() == weights.read_bytes()


async def test_an_origin_killed_while_cutting_chunks(swarm: Any, publisher: Any, tmp_path: Path) -> None:
    """A version whose manifest was never signed does not exist, and its chunks take no room."""
    pipe = tmp_path / "weights.pipe"
    os.mkfifo(pipe)
    process = spawn(
        "Origin(folder, key, run_id, chunk_bytes=4096).publish(sys.argv[2], version=1)",
        tmp_path / "origin",
        pipe,
    )
    writer = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
    os.write(writer, bytes(range(256)) * 64)
    await eventually(lambda: any(path.stat().st_size for path in (tmp_path / "origin").glob("incoming/*")))
    kill(process)
    os.close(writer)

    origin = Origin(tmp_path / "origin", publisher.key, publisher.run_id, chunk_bytes=4096)
    assert origin.head() is None
    assert not list((tmp_path / "origin").glob("incoming/*"))
    origin.publish(swarm.weights(9_000), version=1)
    origin.close()


async def test_a_second_process_cannot_use_the_same_folder(swarm: Any, tmp_path: Path) -> None:
    process = spawn(
        """
client = Client(run_id, public, [], folder)
print("ready", flush=True)
sys.stdin.read() if not sys.stdin.closed else None
import time; time.sleep(3600)
""",
        tmp_path / "client",
    )
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
    try:
        swarm.client("http://127.0.0.1:9")
    except LocalFault as error:
        assert error.code == "in_use"
    else:
        raise AssertionError("two processes would write the same files")
    finally:
        kill(process)
    swarm.client("http://127.0.0.1:9")


ARCHIVING = """
from shardcast import DeltaSettings
from shardcast.store.versions import Store

discard = Store.discard_result
def dying(self, signed):
    if sys.argv[2] == "after":
        discard(self, signed)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] != "never":
    Store.discard_result = dying
origin = Origin(folder / "origin", key, run_id, chunk_bytes=4096, deltas=DeltaSettings(fold_every=2), keep_whole=1)
for version in range(int(sys.argv[3]), 6):
    data = bytearray(300_000)
    data[: 100 * version] = bytes([7]) * 100 * version
    (folder / "file").write_bytes(data)
    origin.publish(folder / "file", version=version)
import time
while len(list((folder / "origin" / "versions").iterdir())) > 3:
    time.sleep(0.02)
"""


def test_an_origin_killed_as_it_deletes_a_whole_version_loses_none(tmp_path: Path) -> None:
    """An audit may ask for any version of a run whose trainer was killed for memory."""
    for killed in ("before", "after", "never"):
        published = StoredVersions(tmp_path / "origin").versions() if killed != "before" else [0]
        assert published == list(range(published[-1] + 1))
        with spawn(ARCHIVING, tmp_path, killed, published[-1]) as process:
            assert process.wait(120) == (0 if killed == "never" else -signal.SIGKILL)
    held = StoredVersions(tmp_path / "origin")
    assert held.versions() == list(range(6))
    for version in range(6):
        held.write(version, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == bytes([7]) * 100 * version + bytes(300_000 - 100 * version)
        (tmp_path / "out").unlink()
    assert files(tmp_path / "origin" / "versions") == [0, 4, 5]


def files(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[0]) for path in folder.iterdir())
