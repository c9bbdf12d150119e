"""The verifier's policies: named by the run's own records, brought by SHARDCAST, the recent ones kept in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.home import Home
from coordinator.storage import training
from coordinator.storage.faults import DatabaseAway
from node.policy.errors import PolicyError
from node.policy.file import Blueprint, inspect_policy
from node.verification.measure import PolicyAway
from node.verification.prefill import Prefill, Prefills
from node.verification.readings import reads_twice
from shardcast import Client
from shardcast.errors import ShardcastError

log = logging.getLogger(__name__)

FETCH_SECONDS = 600.0
PATIENCE_SECONDS = 5.0
"""How long a submission waits for its policy's file before others are judged; it is fetched on meanwhile."""

PREFETCH_SECONDS = 1.0
POLICIES_IN_MEMORY = 4
BLUEPRINTS_IN_MEMORY = 16

T = TypeVar("T")


@dataclass(frozen=True)
class _Fetching:
    """A file on its way."""

    task: asyncio.Task[Path]
    waited_for_until: float


class PolicyShelf:
    """The `Policies` of one run: a version is what its database, and so its log, says that it is."""

    def __init__(self, home: Home, client: Client, prefills: Prefills, metrics: VerifierMetrics | None = None) -> None:
        self._home = home
        self._client = client
        self._making = prefills
        self._metrics = metrics or VerifierMetrics()
        self._manifests: dict[int, str] = {}
        self._blueprints: OrderedDict[int, Blueprint] = OrderedDict()
        self._prefills: OrderedDict[int, Prefill] = OrderedDict()
        # Read twice, each is held in two dtypes.
        self._most = POLICIES_IN_MEMORY // 2 if reads_twice(home.spec) else POLICIES_IN_MEMORY
        self._fetching: dict[int, _Fetching] = {}

    async def blueprint(self, version: int) -> Blueprint:
        """Policy `version` without its weights, which are looked at but not kept; raises PolicyAway."""
        if version in self._prefills:
            return self._prefills[version].blueprint
        if version not in self._blueprints:
            self._blueprints[version] = await self._read(version, _inspect)
        return _used(self._blueprints, version, most=BLUEPRINTS_IN_MEMORY)

    async def prefill(self, version: int) -> Prefill:
        """Policy `version`, ready to measure; raises PolicyAway."""
        if version not in self._prefills:
            self._prefills[version] = await self._read(version, partial(self._making.prefill, version=version))
        return _used(self._prefills, version, most=self._most)

    async def prefetch(self) -> None:
        """Have each new policy's file on disk before the first submission needs it; never ends."""
        held: int | None = None
        while True:
            try:
                newest = await asyncio.to_thread(self._newest)
                if newest is not None and newest != held:
                    await self._fetch(newest)
                    held = newest
            except (PolicyAway, DatabaseAway, OSError) as error:
                log.debug("not fetched ahead of its use: %s", error)
            await asyncio.sleep(PREFETCH_SECONDS)

    async def close(self) -> None:
        """Fetch nothing any more."""
        tasks = [fetching.task for fetching in self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fetching.clear()

    def _newest(self) -> int | None:
        with self._home.database.read() as connection:
            return training.newest(connection)

    async def _read(self, version: int, read: Callable[[Path], Awaitable[T]]) -> T:
        path = await self._fetch(version)
        try:
            return await read(path)
        except (PolicyError, MemoryError) as error:
            raise PolicyAway(f"policy {version}: {error}") from error

    async def _fetch(self, version: int) -> Path:
        manifest_digest = await self._manifest(version)
        if version not in self._fetching:
            fetch = asyncio.create_task(self._fetch_timed(version, manifest_digest))
            self._fetching[version] = _Fetching(fetch, time.monotonic() + PATIENCE_SECONDS)
        fetching = self._fetching[version]
        await asyncio.wait({fetching.task}, timeout=max(0.0, fetching.waited_for_until - time.monotonic()))
        if not fetching.task.done():
            raise PolicyAway(f"policy {version} is on its way")
        self._fetching.pop(version, None)
        try:
            return fetching.task.result()
        except ShardcastError as error:
            self._metrics.policy_failures.inc()
            raise PolicyAway(f"policy {version}: {error}") from error

    async def _fetch_timed(self, version: int, manifest_digest: str) -> Path:
        started = time.monotonic()
        path = await self._client.fetch_archived(version, manifest_digest=manifest_digest, timeout_s=FETCH_SECONDS)
        self._metrics.policy_fetch_seconds.observe(time.monotonic() - started)
        return path

    async def _manifest(self, version: int) -> str:
        if version not in self._manifests:
            self._manifests |= await asyncio.to_thread(self._published_since, version)
        if version not in self._manifests:
            raise PolicyAway(f"policy {version} is not published")
        return self._manifests[version]

    def _published_since(self, version: int) -> dict[int, str]:
        with self._home.database.read() as connection:
            return training.published_since(connection, version)


async def _inspect(path: Path) -> Blueprint:
    return await asyncio.to_thread(inspect_policy, path)


def _used(shelf: OrderedDict[int, T], version: int, *, most: int) -> T:
    """`version`, as the most recently used of at most `most`."""
    shelf.move_to_end(version)
    while len(shelf) > most:
        shelf.popitem(last=False)
    return shelf[version]
