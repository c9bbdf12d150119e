"""What policies take of disks and processors, from publication to the last worker: `docs/broadcast.md`.

`python -m benchmarks.store [--json] [--size-mib 300] [--versions 40] [--chain-mib 8] [--folder /dev/shm]`, a minute
or two of two cores.

Speeds are of one bfloat16 policy of --size-mib of which 1 % of the words change, in 10^9 bytes of it a second, by wall
clock and by the processor seconds of all threads: staging (copy, chunk digests, digest of the whole), making the
delta, applying it with every chunk compared, and checking a stored file. The floors are a plain copy of the file, read
and write, and one BLAKE3 pass over it. Disk is of --versions published one after the other, each fetched by a relay, a
worker and a verifier over HTTP, all with their settings of a run with defaults, once nothing more is to do: bytes of
each folder over those of one policy. An origin that keeps everything is beside it, and every version is fetched from
the one that does not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.report import make_parser, report, say
from node.protocol.run import BatchSpec, BroadcastSpec
from node.relay.daemon import WHOLE_VERSIONS
from shardcast import Client, Origin, OriginServer, Relay, wire
from shardcast.codec.delta import encode
from shardcast.manifest import DEFAULT_LIMITS, MIB, Payload
from shardcast.store.disk import disk_use
from shardcast.store.patching import count_mismatches
from shardcast.store.payload_file import PayloadFile
from shardcast.store.staging import stage

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key().public_bytes_raw()
RUN_ID = wire.digest(PUBLIC)
CHUNK_BYTES = 4 * MIB
CHANGED = 0.01


def policies(size_bytes: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint16]]]:
    """Yield the words of version after version."""
    rng = np.random.default_rng(0)
    words = (rng.standard_normal(size_bytes // 2, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    while True:
        yield words
        at = rng.choice(len(words), int(CHANGED * len(words)), replace=False)
        words[at] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(at))


def speeds(folder: Path, size_bytes: int, threads: int, repeats: int) -> dict[str, Any]:
    """Measure one policy's way through the codec and the store."""
    base, result, delta, copy = (folder / name for name in ("base", "result", "delta", "copy"))
    for path, words in zip((base, result), policies(size_bytes), strict=False):
        words.tofile(path)
    full = stage(base, copy, chunk_bytes=CHUNK_BYTES, limits=DEFAULT_LIMITS).payload
    wanted = stage(result, copy, chunk_bytes=CHUNK_BYTES, limits=DEFAULT_LIMITS).payload

    def stored() -> PayloadFile:
        return PayloadFile(full, final=base, part=folder / "part")

    def apply() -> None:
        if count_mismatches(stored(), [delta], wanted, threads=threads):
            raise AssertionError("the delta does not reproduce its result")

    work: dict[str, Callable[[], object]] = {
        "copy": lambda: _copy(result, copy),
        "hash": lambda: blake3(max_threads=threads).update_mmap(result).digest(),
        "stage": lambda: stage(result, copy, chunk_bytes=CHUNK_BYTES, limits=DEFAULT_LIMITS, threads=threads),
        "encode": lambda: encode(base, result, delta, chunk_bytes=CHUNK_BYTES, max_bytes=2**62, threads=threads),
        "apply": apply,
        "check": lambda: stored().check(threads),
    }
    row: dict[str, Any] = {"threads": threads}
    for name, call in work.items():
        walls, processors = zip(*(_seconds(call) for _ in range(repeats)), strict=True)
        row[f"{name}_gb_per_s"] = round(size_bytes / statistics.median(walls) / 1e9, 3)
        row[f"{name}_gb_per_cpu_s"] = round(size_bytes / statistics.median(processors) / 1e9, 3)
    return row


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def _copy(source: Path, target: Path) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with source.open("rb", buffering=0) as reading, target.open("wb", buffering=0) as writing:
        while count := reading.readinto(buffer):
            writing.write(buffer[:count])


async def disk(folder: Path, size_bytes: int, versions: int) -> dict[str, Any]:
    """Publish and follow `versions`; return each role's bytes over a policy's, and what an auditor had to fetch."""
    verifier_keeps, worker_keeps = BroadcastSpec().keep_versions, BatchSpec().max_async + 1
    everything = Origin(folder / "everything", KEY, RUN_ID)
    origin = Origin(folder / "origin", KEY, RUN_ID, keep_whole=3)
    payloads = list[Payload]()
    async with _relayed(folder, origin) as (server, url, relayed):
        worker = Client(RUN_ID, PUBLIC, [relayed], folder / "worker", keep=worker_keeps, rewind=worker_keeps)
        verifier = Client(
            RUN_ID, PUBLIC, [relayed], folder / "verifier", keep=verifier_keeps, rewind=verifier_keeps, spare=2
        )
        async with worker, verifier:
            for version, words in zip(range(versions), policies(size_bytes), strict=False):
                words.tofile(folder / "policy")
                await asyncio.to_thread(everything.publish, folder / "policy", version=version)
                await asyncio.to_thread(server.publish, folder / "policy", version=version)
                payloads.append(origin.store.versions()[-1].manifest.full)
                for client in (worker, verifier):
                    head = await client.wait_head(after=version - 1, timeout_s=60)
                    assert head is not None
                    await client.fetch(head)
        fetched = [await _audited(folder / f"auditor-{version}", url, version) for version in range(versions)]
    origin.close()
    everything.close()
    found = {f"disk_{role}": _over(folder / role, size_bytes) for role in ("origin", "relay", "worker", "verifier")}
    return found | {
        "disk_origin_that_keeps_everything": _over(folder / "everything", size_bytes),
        "archived_fetch_bytes": round(max(fetched) / size_bytes, 3),
    }


async def _audited(folder: Path, url: str, version: int) -> int:
    async with Client(RUN_ID, PUBLIC, [url], folder, keep=1) as auditor:
        await auditor.fetch_archived(version)
        return auditor.fetched.bytes_in


@asynccontextmanager
async def _relayed(folder: Path, origin: Origin) -> Any:
    server = OriginServer(origin)
    url = f"http://127.0.0.1:{server.start()}"
    relay = Relay([url], store_dir=folder / "relay", run_id=RUN_ID, publisher_key=PUBLIC, keep=WHOLE_VERSIONS)
    try:
        yield server, url, f"http://127.0.0.1:{await relay.start()}"
    finally:
        await relay.stop()
        server.stop()


def _over(root: Path, size_bytes: int) -> float:
    return round(sum(disk_use(root).values()) / size_bytes, 3)


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows = []
    with TemporaryDirectory(dir=options.folder) as folder:
        for threads in options.threads:
            say(f"one policy of {options.size_mib} MiB, {threads} threads")
            rows.append(speeds(Path(folder), options.size_mib * MIB, threads, options.repeats))
    with TemporaryDirectory(dir=options.folder) as folder:
        say(f"{options.versions} policies of {options.chain_mib} MiB")
        return asyncio.run(disk(Path(folder), options.chain_mib * MIB, options.versions)), rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--size-mib", type=int, default=300)
    parser.add_argument("--chain-mib", type=int, default=8)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where to write; memory (/dev/shm) shows the codec, a disk the disk"
    )
    options = parser.parse_args()
    figures, rows = run(options)
    figures |= {key: value for key, value in rows[-1].items() if key != "threads"}
    report("store", options, figures, rows=rows)


if __name__ == "__main__":
    main()
