"""`swarmproof fetch` of a file, a whole process each time, from one good source and hostile ones beside it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.attacking.loop import Loop
from benchmarks.broadcasting.delivery import BroadcastFile
from benchmarks.report import say
from coordinator.lab.redteam.relay_behaviours import BEHAVIOURS, Behaviour, HostileExchange, HostileRelay
from node.protocol.run import run_id_of
from shardcast import Origin, OriginServer
from shardcast.content import file_digest

KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC: Final = KEY.public_key().public_bytes_raw()
RUN_ID: Final = run_id_of(PUBLIC)
TIMES_ALL_GOOD, MORE_SECONDS, MORE_CPU_SECONDS = 3.0, 2.0, 2.0
PATIENCE_S: Final = 180.0
MIB: Final = 2**20


async def _serve_honestly(exchange: HostileExchange) -> None:
    await exchange.honest()


GOOD: Final = Behaviour("everything", _serve_honestly)


@dataclass(frozen=True, slots=True)
class Fetch:
    """One `swarmproof fetch`; a wrong or missing file is not `right`."""

    seconds: float
    cpu_seconds: float
    right: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """An origin that serves `payload`, and the loop of the relays beside it."""

    payload: BroadcastFile
    origin_url: str
    loop: Loop
    folder: Path

    def fetch(self, behaviours: Sequence[Behaviour], *, name: str) -> Fetch:
        """Fetch from relays of these behaviours, in this order."""
        relays = [HostileRelay(self.origin_url, behaviour) for behaviour in behaviours]
        urls = [self.loop.run(relay.start()) for relay in relays]
        output = self.folder / f"{name}.bin"
        state = self.folder / f"{name}-state"
        try:
            return self._fetch(urls, output, state)
        finally:
            for relay in relays:
                self.loop.run(relay.stop())
            output.unlink(missing_ok=True)

    def _fetch(self, urls: Sequence[str], output: Path, state: Path) -> Fetch:
        join = ["--run-id", RUN_ID, "--key", PUBLIC.hex(), "-o", str(output), "--state", str(state)]
        started = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "node.cli", "fetch", *urls, *join],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            timer = threading.Timer(PATIENCE_S, process.kill)
            timer.start()
            _, _, usage = os.wait4(process.pid, 0)
            timer.cancel()
            process.returncode = 0  # reaped above
        seconds = time.monotonic() - started
        right = output.exists() and file_digest(output) == self.payload.digest
        return Fetch(seconds, usage.ru_utime + usage.ru_stime, right)


def measure_fetch(size_mib: int, repeats: int, behaviours: Sequence[str], hanging: Sequence[int]) -> dict[str, Any]:
    """Return the figures and the rows of the part `fetch`."""
    with tempfile.TemporaryDirectory(prefix="liveness-") as name:
        folder = Path(name)
        payload = BroadcastFile.made(folder / "payload", size_mib * MIB)
        origin = Origin(folder / "origin", KEY, RUN_ID)
        server, loop = OriginServer(origin), Loop()
        scene = Scene(payload, f"http://127.0.0.1:{server.start()}", loop, folder)
        server.publish(payload.path, version=1)
        try:
            return _fetch_rows(scene, repeats, behaviours, hanging)
        finally:
            loop.close()
            server.stop()
            origin.close()


def _fetch_rows(scene: Scene, repeats: int, behaviours: Sequence[str], hanging: Sequence[int]) -> dict[str, Any]:
    good = [scene.fetch([GOOD] * 3, name=f"good-{number}") for number in range(max(2, repeats))]
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(behaviours):
        say(f"two of three sources: {name}")
        hostile = BEHAVIOURS[name]
        found = [scene.fetch([hostile, hostile, GOOD], name=f"{number}-{again}") for again in range(repeats)]
        rows.append(_row(name, found))
    crowds: dict[str, float | None] = {}
    for count in hanging:
        say(f"{count} sources that hang, and one good one")
        one = scene.fetch([BEHAVIOURS["hangs on everything"]] * count + [GOOD], name=f"crowd-{count}")
        crowds[f"fetch_{count}_hanging_s"] = one.seconds if one.right else None
        one = scene.fetch([BEHAVIOURS["hangs on chunks"]] * count + [GOOD], name=f"chunks-{count}")
        crowds[f"fetch_{count}_hanging_on_chunks_s"] = one.seconds if one.right else None
    good += [scene.fetch([GOOD] * 3, name=f"good-after-{number}") for number in range(repeats)]
    if not all(fetch.right for fetch in good):
        raise SystemExit("a fetch from good sources alone failed: there is nothing to compare with")
    all_good_s = statistics.median(fetch.seconds for fetch in good)
    all_good_cpu_s = statistics.median(fetch.cpu_seconds for fetch in good)
    for row in rows:
        too_late = row["seconds"] > TIMES_ALL_GOOD * all_good_s + MORE_SECONDS
        row["over"] = bool(too_late or row["cpu_seconds"] > all_good_cpu_s + MORE_CPU_SECONDS or not row["right"])
    figures = {
        "behaviours": len(rows),
        "fetch_all_good_s": all_good_s,
        "fetch_all_good_cpu_s": all_good_cpu_s,
        "fetch_worst_s": max((row["seconds"] for row in rows), default=None),
        "fetch_worst_cpu_s": max((row["cpu_seconds"] for row in rows), default=None),
        "fetch_over_bound": sum(row["over"] for row in rows),
        "fetch_not_right": sum(not row["right"] for row in rows),
        **crowds,
    }
    return {"figures": figures, "rows": rows}


def _row(name: str, found: Sequence[Fetch]) -> dict[str, Any]:
    """Describe the worst of some fetches."""
    return {
        "behaviour": name,
        "seconds": round(max(fetch.seconds for fetch in found), 2),
        "cpu_seconds": round(max(fetch.cpu_seconds for fetch in found), 2),
        "right": all(fetch.right for fetch in found),
    }
