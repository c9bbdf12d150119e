"""Probe announced relays before anybody is told of them: does each serve a chunk that it says it holds?

Anybody may announce a relay, under as many keys as they like. One that hangs, lies or is nowhere is found here, by one
process of the run, instead of by every worker. A relay that serves probes and nobody else still passes: nodes measure
their sources themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

from coordinator.run.home import Home
from coordinator.run.relays import RELAY_SECONDS
from coordinator.storage import locks
from coordinator.storage.faults import DatabaseFault
from coordinator.storage.relays import RegisteredRelay, note_probe, relays_seen_since
from coordinator.storage.steps import manifest_of
from coordinator.storage.verdicts import clock
from node.client.ssrf import Reach, not_nearer, reach_of
from shardcast.errors import NotServed, NoVersionYet, ShardcastError
from shardcast.fetch.download import DEFAULT_DOWNLOAD_LIMITS
from shardcast.fetch.transport import Transport, TransportLimits
from shardcast.manifest import Payload, open_manifest
from shardcast.wire import digest

log = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
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
BYTES_PER_S: Final = 2 * 2**20
"""What probes of good relays may read together."""

_PATIENCE: Final = TransportLimits(
    connect_s=PROBE_SECONDS / 2,
    response_s=PROBE_SECONDS / 2,
    idle_s=PROBE_SECONDS / 2,
    rate_grace_s=PROBE_SECONDS / 2,
    min_bytes_per_s=LEAST_BYTES_PER_S,
)


class RelayProbes:
    """Probes the relays of one run, while `leads` says so."""

    def __init__(self, home: Home, *, leads: Callable[[], bool] = lambda: True) -> None:
        self._home, self._leads = home, leads

    def run(self, stop: threading.Event) -> None:
        """Probe what is due, every second, until `stop` is set."""
        while not stop.wait(TICK_SECONDS):
            if not self._leads():
                continue
            try:
                self.probe_due(clock())
            except (DatabaseFault, OSError) as error:
                log.warning("could not probe relays, retrying: %s", error)

    def probe_due(self, now: float) -> int:
        """Probe up to AT_ONCE relays that are due; return how many.

        New ones come first, but leave half of the places to others: strangers may announce any number.
        """
        with self._home.database.read() as connection:
            rows = relays_seen_since(connection, now - RELAY_SECONDS)
        good = sum(row.good_at is not None for row in rows)
        due = [row for row in rows if self._is_due(row, good, now)]
        random.shuffle(due)
        known = sorted((row for row in due if row.probed_at is not None), key=lambda row: row.probed_at or 0.0)
        new = [row for row in due if row.probed_at is None]
        drawn = [*known[: AT_ONCE // 2], *new, *known[AT_ONCE // 2 :]][:AT_ONCE]
        if drawn:
            asyncio.run(self._probe_all(drawn, now))
        return len(drawn)

    def _is_due(self, row: RegisteredRelay, good: int, now: float) -> bool:
        if row.probed_at is None or row.probed_at > now:
            return True
        if row.good_at is None:
            return now - row.probed_at >= min(MAX_AGAIN_SECONDS, AGAIN_SECONDS * 2.0 ** min(row.failed_probes - 1, 16))
        payload = self._payload(None)
        apart_s = 0.0 if payload is None else good * payload.chunk_bytes / BYTES_PER_S
        return now - row.probed_at >= max(AGAIN_SECONDS, apart_s)

    async def _probe_all(self, rows: Sequence[RegisteredRelay], now: float) -> None:
        found = await asyncio.gather(*(self._probe(row, now) for row in rows))
        with self._home.database.write(durable=False) as connection:
            locks.leasing(connection)
            for row, good_at in zip(rows, found, strict=True):
                note_probe(connection, row, good_at=good_at, now=now)

    async def _probe(self, row: RegisteredRelay, now: float) -> float | None:
        """Return when it was last good: now if it serves, as before if it only lags, None if it failed."""
        guard = not_nearer(lambda: reach_of(row.place.partition("/")[0]) or Reach.INTERNET)
        transport = Transport(patience=_PATIENCE, may_connect=guard)
        try:
            async with asyncio.timeout(PROBE_SECONDS + self._largest_chunk() / LEAST_BYTES_PER_S):
                return await self._ask(transport, row, now)
        except (ShardcastError, TimeoutError) as error:
            log.info("relay %s of node %s… fails its probe: %s", row.url, row.node[:16], error)
            return None
        finally:
            await transport.close()

    async def _ask(self, transport: Transport, row: RegisteredRelay, now: float) -> float | None:
        payload = self._payload(row.version)
        if payload is None:  # before the first policy it can only be there
            with contextlib.suppress(NoVersionYet):
                await transport.head(row.url, after=-1, wait_s=0.0)
            return now
        index = random.randrange(payload.chunk_count)
        chunk = memoryview(bytearray(payload.chunk_length(index)))
        try:
            await transport.chunk(row.url, payload.digest, index, into=chunk, wait_s=WAIT_SECONDS)
        except NotServed:
            if row.version is None:  # it is fetching, and was good while there was nothing to fetch
                return row.good_at
            raise
        return now if digest(chunk) == payload.chunk_digest(index) else None

    def _largest_chunk(self) -> int:
        payload = self._payload(None)
        return 0 if payload is None else payload.chunk_bytes

    def _payload(self, version: int | None) -> Payload | None:
        """Return the full payload of a policy, of the newest one for None; None before the first."""
        with self._home.database.read() as connection:
            manifest = manifest_of(connection, version)
        if manifest is None:
            return None
        return open_manifest(manifest, run_id=self._home.run_id, publisher_key=self._home.public_key).manifest.full
