"""The verifier's policies: resolved by the database, fetched by SHARDCAST, held in memory within a limit."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.home import Home
from coordinator.storage import training
from coordinator.storage.faults import DatabaseAway, trouble_of
from node.engines.base import DoesNotFit, WrongEngine
from node.errors import EngineFailed
from node.policy.errors import PolicyError
from node.policy.file import Blueprint
from node.policy.memory import is_out_of_memory
from node.policy.reading import OpenPolicy, blueprint_of, held_file
from node.verification.measure import EngineAway, PolicyUnavailable
from node.verification.prefill import Prefill, Prefills
from node.verification.shelf import PolicyShelf
from shardcast import Client
from shardcast.errors import LocalFault, ShardcastError

log = logging.getLogger(__name__)

FETCH_SECONDS = 600.0
PATIENCE_SECONDS = 5.0
"""How long a submission waits for its policy before it is deferred; the fetch continues."""

PREFETCH_SECONDS = 1.0
NO_SOURCE_SECONDS = 30.0
"""How long all fetches have failed before it is said what to do: sources restart, and a new version comes late."""

NO_SOURCE = "no_source"
BLUEPRINTS_IN_MEMORY = 16
PERMANENT = frozenset({DoesNotFit.code, WrongEngine.code})
"""Codes of an EngineFailed that no other try mends."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Fetching:
    """A running fetch, and until when (monotonic) submissions wait for it."""

    task: asyncio.Task[Path]
    wait_until: float


class PolicyCache:
    """The `Policies` of one run; a version's manifest digest is the one in the database, as in the log.

    Files that are read are linked into `folder`, on the client's disk, which is this cache's alone.
    """

    def __init__(
        self,
        home: Home,
        client: Client,
        prefills: Prefills,
        *,
        memory: int,
        folder: Path,
        metrics: VerifierMetrics | None = None,
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        self._home = home
        self._client = client
        self._folder = folder
        self._device = prefills.device
        self._shelf = PolicyShelf(prefills, spec=home.spec, memory=memory)
        self._metrics = metrics or VerifierMetrics()
        self._manifests: dict[int, str] = {}
        self._blueprints: OrderedDict[int, Blueprint] = OrderedDict()
        self._fetching: dict[int, _Fetching] = {}
        self.trouble = ""
        """Why the newest policy cannot be had: a code of `trouble_of`, or NO_SOURCE after a while without a source."""
        self._failing_since: float | None = None

    async def blueprint(self, version: int) -> Blueprint:
        """Return policy `version` without its weights; raises PolicyUnavailable."""
        if (held := self._shelf.get(version)) is not None:
            return held.blueprint
        if version not in self._blueprints:
            self._blueprints[version] = await self._read(version, lambda path: asyncio.to_thread(blueprint_of, path))
        self._blueprints.move_to_end(version)
        while len(self._blueprints) > BLUEPRINTS_IN_MEMORY:
            self._blueprints.popitem(last=False)
        return self._blueprints[version]

    async def prefill(self, version: int) -> Prefill:
        """Return policy `version`, loaded for prefills.

        Raises PolicyUnavailable, EngineAway where the engine cannot hold it now, and EngineFailed where it never can:
        no submission can be judged then.
        """
        if (held := self._shelf.get(version)) is not None:
            return held
        self._metrics.policy_loads.inc()
        try:
            return await self._read(version, lambda path: self._shelf.load(version, path, version=version))
        except EngineFailed as error:
            if error.code in PERMANENT:
                raise
            raise EngineAway(str(error)) from error

    async def file(self, version: int) -> OpenPolicy:
        """Return the file of policy `version`, for a second look; raises PolicyUnavailable."""
        return await self._read(version, lambda path: asyncio.to_thread(OpenPolicy, path, device=self._device))

    async def prefetch(self) -> None:
        """Fetch each new policy before a submission needs it, until cancelled."""
        held: int | None = None
        while True:
            try:
                newest = await asyncio.to_thread(self.newest)
                if newest is not None and newest != held:
                    await self._fetch(newest)
                    held = newest
            except (PolicyUnavailable, DatabaseAway, OSError, MemoryError) as error:
                log.debug("policy not prefetched, retrying: %r", error)
            await asyncio.sleep(PREFETCH_SECONDS)

    async def close(self) -> None:
        """Cancel all fetches."""
        tasks = [fetching.task for fetching in self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fetching.clear()

    def newest(self) -> int | None:
        """Return the newest published version; None before the first. Blocks."""
        with self._home.database.read() as connection:
            return training.newest_version(connection)

    async def _read(self, version: int, read: Callable[[Path], Awaitable[T]]) -> T:
        try:
            path = await self._fetch(version)
            # The client deletes old versions, and reading one may take minutes.
            with held_file(path, self._folder) as held:
                return await read(held)
        except PolicyError as error:
            raise PolicyUnavailable(f"policy {version}: {error}", version=version) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise EngineAway(f"There is no memory to read policy {version}.") from error

    async def _fetch(self, version: int) -> Path:
        manifest_digest = await self._manifest(version)
        if version not in self._fetching:
            fetch = asyncio.create_task(self._fetch_timed(version, manifest_digest))
            self._fetching[version] = _Fetching(fetch, time.monotonic() + PATIENCE_SECONDS)
        fetching = self._fetching[version]
        await asyncio.wait({fetching.task}, timeout=max(0.0, fetching.wait_until - time.monotonic()))
        if not fetching.task.done():
            raise PolicyUnavailable(f"policy {version} is being fetched", version=version)
        self._fetching.pop(version, None)
        try:
            path = fetching.task.result()
        except ShardcastError as error:
            self._metrics.policy_failures.inc()
            self.trouble = trouble_of(error) if isinstance(error, LocalFault) else self._source_trouble(version, error)
            if error.code == "disk_full":
                self._shelf.close_files()
            raise PolicyUnavailable(f"policy {version}: {error}", version=version) from error
        self.trouble, self._failing_since = "", None
        return path

    def _source_trouble(self, version: int, error: ShardcastError) -> str:
        if version < max(self._manifests):  # sources keep a few versions: an older one is no sign that they are away
            return self.trouble if self.trouble == NO_SOURCE else ""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since < NO_SOURCE_SECONDS:
            return ""
        if self.trouble != NO_SOURCE:
            log.error(
                "no source has served a policy for %.0f s (policy %d: %s), and nothing is judged without. See that the "
                "trainer runs, and start this verifier with --source and the origin that the trainer prints; retrying",
                now - self._failing_since,
                version,
                error,
            )
        return NO_SOURCE

    async def _fetch_timed(self, version: int, manifest_digest: str) -> Path:
        started = time.monotonic()
        path = await self._client.fetch_archived(version, manifest_digest=manifest_digest, timeout_s=FETCH_SECONDS)
        self._metrics.policy_fetch_seconds.observe(time.monotonic() - started)
        return path

    async def _manifest(self, version: int) -> str:
        if version not in self._manifests:
            self._manifests |= await asyncio.to_thread(self._published_since, version)
        if version not in self._manifests:
            raise PolicyUnavailable(f"policy {version} is not published", version=version)
        return self._manifests[version]

    def _published_since(self, version: int) -> dict[int, str]:
        with self._home.database.read() as connection:
            return training.published_since(connection, version)
