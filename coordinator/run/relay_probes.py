"""Probe announced relays before anybody is told of them: does each serve a chunk that it says it holds?

Anybody may announce a relay, under as many keys as they like. One that hangs, lies or is nowhere is found here, by one
process of the run, instead of by every worker. A relay that serves probes and nobody else still passes: nodes measure
their sources themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.run.home import Home
from coordinator.run.relays import GOOD_SECONDS, RELAY_SECONDS
from coordinator.storage import locks
from coordinator.storage.faults import advice
from coordinator.storage.relays import ProbedRelay, RegisteredRelay, note_probe, relays_seen_since
from coordinator.storage.steps import manifest_of, newest_head
from coordinator.storage.verdicts import clock
from node.client.ssrf import Reach, not_nearer, reach_of
from shardcast.errors import CorruptChunk, Malformed, NotServed, NoVersionYet, PeerFault, ShardcastError
from shardcast.fetch.download import DEFAULT_DOWNLOAD_LIMITS
from shardcast.fetch.transport import Transport, TransportLimits
from shardcast.manifest import Payload, open_manifest
from shardcast.wire import digest

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
STOP_CHECK_SECONDS: Final = 0.25
AT_ONCE: Final = 16
PROBE_SECONDS: Final = 4.0
"""For a probe, but for the bytes of its chunk."""
LEAST_BYTES_PER_S: Final = 128 * 1024
"""Of an uplink that is of use to anybody."""
WAIT_SECONDS: Final = DEFAULT_DOWNLOAD_LIMITS.chunk_wait_s
"""As every client asks, so that a relay cannot tell a probe by its request."""
AGAIN_SECONDS: Final = 15.0
MAX_AGAIN_SECONDS: Final = 300.0
"""Until a relay that failed several times is probed again."""
DOUBT_SECONDS: Final = 5.0
FORGIVEN: Final = 2
"""Failures in a row, of a good relay that may be busy, for which others are still told of it."""
BYTES_PER_S: Final = 2 * 2**20
"""What probes of good relays may read together."""

_PATIENCE: Final = TransportLimits(
    connect_s=PROBE_SECONDS / 2,
    response_s=PROBE_SECONDS / 2,
    idle_s=PROBE_SECONDS / 2,
    rate_grace_s=PROBE_SECONDS / 2,
    min_bytes_per_s=LEAST_BYTES_PER_S,
)


@dataclass(frozen=True, slots=True)
class _Policies:
    """The newest policy, -1 before the first, and the payloads of those that relays are asked for."""

    newest: int
    payloads: Mapping[int, Payload]

    @property
    def chunk_bytes(self) -> int:
        return max((payload.chunk_bytes for payload in self.payloads.values()), default=0)


class RelayProbes:
    """Probes the relays of one run, while `leads` says so."""

    def __init__(self, home: Home, *, leads: Callable[[], bool] = lambda: True) -> None:
        self._home, self._leads = home, leads
        self._chunk_bytes = 0

    def run(self, stop: threading.Event) -> None:
        """Probe what is due until `stop` is set, and then leave the probes under way."""
        while not stop.is_set():
            try:
                asyncio.run(self._run(stop))
            except Exception as error:  # noqa: BLE001  (nobody would notice that a thread has ended)
                log.warning("could not probe relays, retrying: %s", advice(error))
                stop.wait(TICK_SECONDS)

    async def _run(self, stop: threading.Event) -> None:
        running: dict[asyncio.Task[ProbedRelay], RegisteredRelay] = {}
        looked_at = -TICK_SECONDS
        due: list[RegisteredRelay] = []
        try:
            while not stop.is_set():
                if not self._leads():
                    due.clear()
                elif time.monotonic() - looked_at >= TICK_SECONDS:
                    looked_at, nodes = time.monotonic(), {row.node for row in running.values()}
                    due = [row for row in await asyncio.to_thread(self._due, clock()) if row.node not in nodes]
                if drawn := _draw(due, list(running.values())):
                    held = await asyncio.to_thread(self._policies, drawn)
                    self._chunk_bytes = held.chunk_bytes
                    running |= {asyncio.create_task(self._probe(row, held)): row for row in drawn}
                if not running:
                    await asyncio.sleep(STOP_CHECK_SECONDS)
                    continue
                done, _ = await asyncio.wait(running, timeout=STOP_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                found = [_outcome(task, running.pop(task)) for task in done]
                if found and self._leads():
                    await asyncio.to_thread(self._note, found)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _due(self, now: float) -> list[RegisteredRelay]:
        """Read the relays whose probe is due: those known for the longest time first, then new ones in any order."""
        with self._home.database.read() as connection:
            rows = relays_seen_since(connection, now - RELAY_SECONDS)
        good = sum(row.good_at is not None for row in rows)
        apart_s = min(GOOD_SECONDS / 3, good * self._chunk_bytes / BYTES_PER_S)
        due = [row for row in rows if _is_due(row, apart_s, now)]
        random.shuffle(due)
        return sorted(due, key=lambda row: math.inf if row.probed_at is None else row.probed_at)

    def _note(self, found: Sequence[ProbedRelay]) -> None:
        with self._home.database.write(durable=False) as connection:
            locks.leasing(connection)
            for one in found:
                note_probe(connection, one, now=clock())

    async def _probe(self, row: RegisteredRelay, held: _Policies) -> ProbedRelay:
        """Ask a relay for a chunk. One that only lags stays as it was, and a good one may fail twice in a row."""
        announcer = reach_of(row.place.partition("/")[0])
        guard = not_nearer(lambda: Reach.INTERNET if announcer is None else announcer)
        transport = Transport(patience=_PATIENCE, may_connect=guard)
        try:
            async with asyncio.timeout(PROBE_SECONDS + held.chunk_bytes / LEAST_BYTES_PER_S):
                if await self._serves(transport, row, held):
                    return ProbedRelay(row, good_at=clock(), failed_probes=0)
                return ProbedRelay(row, good_at=row.good_at, failed_probes=row.failed_probes)
        except (ShardcastError, TimeoutError) as error:
            log.info("relay %s of node %s… fails its probe: %s", row.url, row.node[:16], error)
            failed = row.failed_probes + 1
            is_forgiven = failed <= FORGIVEN and not isinstance(error, PeerFault)
            return ProbedRelay(row, good_at=row.good_at if is_forgiven else None, failed_probes=failed)
        finally:
            await transport.close()

    async def _serves(self, transport: Transport, row: RegisteredRelay, held: _Policies) -> bool:
        """Return whether it serves; False if it only lags. Raises ShardcastError."""
        if held.newest < 0:  # before the first policy it can only be there
            with contextlib.suppress(NoVersionYet):
                await transport.head(row.url, after=-1, wait_s=0.0)
            return True
        if row.version is not None and row.version > held.newest:
            raise Malformed(f"it says that it holds policy {row.version} of {held.newest}")
        # What it announced may be dropped since for a newer one.
        for version in dict.fromkeys((held.newest if row.version is None else row.version, held.newest)):
            if (payload := held.payloads.get(version)) is None:
                continue
            index = random.randrange(payload.chunk_count)
            chunk = memoryview(bytearray(payload.chunk_length(index)))
            try:
                await transport.chunk(row.url, payload.digest, index, into=chunk, wait_s=WAIT_SECONDS)
            except NotServed as error:
                if error.code == "not_yet" or version < held.newest:
                    continue
                raise
            if digest(chunk) != payload.chunk_digest(index):
                raise CorruptChunk(f"chunk {index} of policy {version} is wrong")
            return True
        return False

    def _policies(self, rows: Sequence[RegisteredRelay]) -> _Policies:
        """Read the manifests that probes of `rows` need, each once."""
        with self._home.database.read() as connection:
            head = newest_head(connection)
            newest = -1 if head is None else head[0]
            wanted = {row.version for row in rows if row.version is not None and row.version < newest} | {newest}
            found = {version: manifest_of(connection, version) for version in wanted if version >= 0}
        run_id, key = self._home.run_id, self._home.public_key
        return _Policies(
            newest,
            {
                version: open_manifest(manifest, run_id=run_id, publisher_key=key).manifest.full
                for version, manifest in found.items()
                if manifest is not None
            },
        )


def _draw(due: list[RegisteredRelay], running: Sequence[RegisteredRelay]) -> list[RegisteredRelay]:
    """Take from `due` what may be probed beside `running`.

    Strangers may announce any number: new relays take half of the places at most, and those of one network no more than
    they leave free, so that n networks whose relays hang leave one place in n + 1 for others.
    """
    places = Counter(row.place for row in running)
    new = sum(row.probed_at is None for row in running)
    free = AT_ONCE - len(running)
    drawn = list[RegisteredRelay]()
    for row in due:
        is_new = row.probed_at is None
        room = min(free, AT_ONCE // 2 - new) if is_new else free
        if places[row.place] < room:
            places[row.place] += 1
            new += is_new
            free -= 1
            drawn.append(row)
    for row in drawn:
        due.remove(row)
    return drawn


def _outcome(task: asyncio.Task[ProbedRelay], row: RegisteredRelay) -> ProbedRelay:
    if (error := task.exception()) is None:
        return task.result()
    # A defect of ours must cost neither the other probes nor a probe each second.
    log.error("the probe of relay %s ended unforeseen", row.url, exc_info=error)
    return ProbedRelay(row, good_at=None, failed_probes=row.failed_probes + 1)


def _is_due(row: RegisteredRelay, apart_s: float, now: float) -> bool:
    if row.probed_at is None or row.probed_at > now:
        return True
    if row.good_at is None:
        wait_s = min(MAX_AGAIN_SECONDS, AGAIN_SECONDS * 2.0 ** min(max(0, row.failed_probes - 1), 16))
    else:
        wait_s = DOUBT_SECONDS if row.failed_probes else max(AGAIN_SECONDS, apart_s)
    return now - row.probed_at >= wait_s
