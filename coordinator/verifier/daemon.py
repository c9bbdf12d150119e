"""The verifier process: claims submissions from the queue, judges them, and records verdicts.

It holds no key, and fetches policies by SHARDCAST, so that it can run on another machine than the trainer. Any number
of verifiers share one queue; the claims of one that dies expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coordinator.errors import StoreAway
from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.heartbeat import Condition
from coordinator.run.history import KeptHistory
from coordinator.run.home import Home
from coordinator.storage import training, verdicts
from coordinator.storage.faults import DatabaseAway, advice, is_away, trouble_of
from coordinator.storage.verdicts import QueueItem
from coordinator.verifier import deferrals
from coordinator.verifier.bodies import BodyUnavailable, body_reader
from coordinator.verifier.claimed import claim_of, given_up, submissions_at_once
from coordinator.verifier.deferrals import STORE, Deferrals
from coordinator.verifier.evidence import DEFAULT_EVIDENCE_LIMITS, EvidenceLimits
from coordinator.verifier.policy_cache import PolicyCache
from coordinator.verifier.rebuilding import GroupRebuilder
from coordinator.verifier.recording import VerdictRecorder, has_evidence, warn_without_evidence
from node.datasets.fetching import dataset_feed
from node.datasets.folder import DATASETS
from node.environments import load_environments
from node.errors import EngineFailed
from node.policy.arrival import ArrivingPolicies
from node.policy.file import Blueprint
from node.policy.memory import share_heaps
from node.protocol.admission import Verdict
from node.runtime.service_manager import report_serving
from node.runtime.signals import Stopped, race
from node.verification.judge import JudgedClaim
from node.verification.measure import DatasetAway, EngineAway, PolicyUnavailable
from node.verification.plan import Claim, Rules
from node.verification.readings import MakePrefills, make_prefills, transformers_prefills
from node.verification.shelf import GIB
from node.verification.verify import decide_many, read, undecided
from shardcast import Client

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
CLAIM_SECONDS = 60.0
"""Validity of a claim; a verifier that is at work renews it long before its end."""

MAX_CLAIM_SECONDS = 6 * 3600.0
"""How long claims are renewed: the longest that judging what was claimed together may take."""

MAX_ENGINE_FAILURES = 5
"""Consecutive failures of the engine that end a verifier; the pauses between them double each time."""


@dataclass(frozen=True)
class VerifierSettings:
    """Settings of one verifier process; the checks are the run's.

    Policies take at most `policy_memory` bytes.
    """

    name: str
    state: Path
    sources: tuple[str, ...]
    threads: int = 1
    policy_memory: int = 4 * GIB
    make_prefills: MakePrefills = transformers_prefills
    evidence: EvidenceLimits = DEFAULT_EVIDENCE_LIMITS


class Verifier:
    """Judges submissions in batches until it is stopped."""

    def __init__(
        self,
        home: Home,
        settings: VerifierSettings,
        metrics: VerifierMetrics | None = None,
        condition: Condition | None = None,
    ) -> None:
        self._home = home
        self._settings = settings
        self._metrics = metrics or VerifierMetrics()
        self._condition = condition or Condition()
        self._rules = Rules(home.run_id, home.spec, [])
        self._bodies = body_reader(home)
        self._recorder = VerdictRecorder(home, self._bodies, self._metrics, limits=settings.evidence)
        self._deferrals = Deferrals(home, self._metrics)
        self._rebuilder = GroupRebuilder(home, self._bodies, self._deferrals)
        self._history = KeptHistory(settings.state, run_id=home.run_id)
        self._engine_failures = 0
        self._has_fetched_again = False

    async def run(self, stop: asyncio.Event) -> None:
        """Verify until `stop` is set, retrying while the database, the store or a policy is unavailable."""
        share_heaps()
        # What modules define stays: each search of it for garbage takes as long as a hundred verdicts.
        gc.freeze()
        torch.set_num_threads(self._settings.threads)
        try:
            with contextlib.suppress(Stopped):
                await self._use_datasets(await race(self._datasets(), stop))
                await self._verify_until(stop)
        finally:
            gc.unfreeze()  # extension modules count at the end what they leaked

    async def _use_datasets(self, datasets: Mapping[str, Path]) -> None:
        environments = await asyncio.to_thread(load_environments, self._home.spec, datasets)
        self._rules = Rules(self._home.run_id, self._home.spec, environments)

    async def _datasets(self) -> Mapping[str, Path]:
        """Return the files of the run's datasets: the data folder's, or fetched where that has not all of them."""
        here = self._home.dataset_files
        has_all = all(dataset.digest in here for dataset in self._home.spec.datasets)
        return here if has_all else await self._fetched_datasets()

    async def _fetched_datasets(self) -> Mapping[str, Path]:
        """Return the run's datasets in this verifier's state, fetched where they are missing or changed.

        Files of answers are the data folder's alone.
        """
        home, here = self._home, self._home.dataset_files
        async with dataset_feed(
            home.spec,
            run_id=home.run_id,
            publisher_key=home.public_key,
            sources=self._settings.sources,
            folder=self._settings.state / DATASETS,
            files=home.spec.datasets,
        ) as feed:
            return {**here, **await feed.fetch()}

    async def _verify_until(self, stop: asyncio.Event) -> None:
        async with Client(
            run_id=self._home.run_id,
            publisher_key=self._home.public_key,
            sources=list(self._settings.sources),
            state_dir=self._settings.state,
            keep=self._home.spec.broadcast.keep_versions,
            rewind=self._home.spec.broadcast.keep_versions,
            spare=2,
            reader=ArrivingPolicies(self._home.spec.model.dtype),
        ) as client:
            prefills = make_prefills(self._home.spec, self._settings.make_prefills)
            cache = PolicyCache(
                self._home,
                client,
                prefills,
                memory=self._settings.policy_memory,
                folder=self._settings.state / "reading",
                metrics=self._metrics,
            )
            log.info(
                "verifying for run %s as %s, with %.1f GiB for policies",
                self._home.run_id[:16],
                self._settings.name,
                self._settings.policy_memory / GIB,
            )
            background = [asyncio.create_task(cache.prefetch())]
            try:
                await self._load_newest(stop, cache)
                background.append(asyncio.create_task(report_serving()))
                await self._work_until(stop, cache)
            finally:
                for task in background:
                    task.cancel()
                await asyncio.gather(*background, return_exceptions=True)
                await cache.close()
                await prefills.close()

    async def _load_newest(self, stop: asyncio.Event, cache: PolicyCache) -> None:
        """Load the newest policy before anything is claimed; raises EngineFailed where this machine cannot hold it.

        Waits for nothing but the engine: what cannot be had now is loaded with the first submission that wants it.
        """
        while not stop.is_set():
            try:
                newest = await asyncio.to_thread(cache.newest)
                if newest is not None:
                    await race(cache.prefill(newest), stop)
                return
            except EngineAway as error:
                await self._wait_for_engine(error, stop)
            except (PolicyUnavailable, DatabaseAway, OSError, Stopped):
                return

    async def _work_until(self, stop: asyncio.Event, cache: PolicyCache) -> None:
        while not stop.is_set():
            try:
                pause = 0.0 if await self._verify_batch(cache) else IDLE_SECONDS
                self._condition.trouble = cache.trouble
            except EngineAway as error:
                await self._wait_for_engine(error, stop)
                continue
            except DatasetAway as error:
                await self._fetch_again(error, stop)
                continue
            except (DatabaseAway, OSError) as error:
                self._metrics.outages.inc()
                self._condition.trouble = trouble_of(error)
                log.warning(
                    "database or disk unavailable, retrying every %.0f s: %s", deferrals.RETRY_SECONDS, advice(error)
                )
                pause = deferrals.RETRY_SECONDS
            if pause:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)

    async def _wait_for_engine(self, error: EngineAway, stop: asyncio.Event) -> None:
        """Pause before the engine is tried again; raises EngineFailed after MAX_ENGINE_FAILURES in a row."""
        self._engine_failures += 1
        if self._engine_failures >= MAX_ENGINE_FAILURES:
            code = error.__cause__.code if isinstance(error.__cause__, EngineFailed) else None
            raise EngineFailed(f"The engine failed {self._engine_failures} times in a row: {error}", code=code)
        pause = deferrals.RETRY_SECONDS * 2 ** (self._engine_failures - 1)
        log.error("%s Trying again in %.0f s", error, pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)

    async def _fetch_again(self, error: DatasetAway, stop: asyncio.Event) -> None:
        """Fetch the datasets that were changed, the first time; raises `error` the second time."""
        if self._has_fetched_again:
            raise error
        self._has_fetched_again = True
        log.error("%s. Nothing is judged until it was fetched again", error)
        await self._use_datasets(await race(self._fetched_datasets(), stop))

    async def _verify_batch(self, cache: PolicyCache) -> bool:
        """Claim a batch, whose forward passes are shared, and judge it; return whether there was any submission.

        Raises EngineAway, DatasetAway, EngineFailed, and DatabaseAway or OSError where the database or the disk is
        away, after what is not judged was put back: here, or before the next claim if that cannot be written now.
        """
        await self._deferrals.release()
        claimed = await asyncio.to_thread(self._claim)
        if claimed:
            self._metrics.claims.inc(len(claimed))
            self._metrics.batch_submissions.observe(len(claimed))
            with self._metrics.batch_seconds.time():
                try:
                    async with self._renewing(claimed):
                        await self._judge(claimed, cache)
                except StoreAway as error:
                    self._deferrals.begin(STORE, error)
                    await self._deferrals.defer_all(claimed)
                except (EngineAway, DatasetAway, EngineFailed):
                    await self._deferrals.defer_all(claimed)
                    raise
                except (DatabaseAway, OSError) as error:
                    # Other errors may be what a submission does to its verifiers, so its claims count.
                    if is_away(error):
                        await self._deferrals.defer_all(claimed)
                    raise
            self._engine_failures = 0
            await asyncio.to_thread(self._history.keep_current, self._home.database)
        return bool(claimed)

    @contextlib.asynccontextmanager
    async def _renewing(self, claimed: Sequence[QueueItem]) -> AsyncIterator[None]:
        """Renew these claims while the block runs, so that no other verifier does the same work."""
        renewing = asyncio.create_task(self._renew(claimed))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _renew(self, claimed: Sequence[QueueItem]) -> None:
        """Renew claims until cancelled, for MAX_CLAIM_SECONDS at most: work that hangs goes to another verifier."""
        until = time.monotonic() + MAX_CLAIM_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(CLAIM_SECONDS / 3)
            try:
                await asyncio.to_thread(self._renew_once, claimed)
            except (DatabaseAway, OSError) as error:
                log.debug("claims not renewed, retrying: %s", error)

    def _renew_once(self, claimed: Sequence[QueueItem]) -> None:
        with self._home.database.write(durable=False) as connection:
            verdicts.renew(connection, claimed, until=verdicts.clock() + CLAIM_SECONDS)

    def _claim(self) -> list[QueueItem]:
        with self._home.database.write() as connection:
            return verdicts.claim(
                connection,
                verifier=self._settings.name,
                spec=self._home.spec,
                now=verdicts.clock(),
                seconds=CLAIM_SECONDS,
                most=submissions_at_once(self._home.spec),
            )

    async def _judge(self, claimed: Sequence[QueueItem], cache: PolicyCache) -> None:
        """Judge a batch; raises the EngineAway or DatasetAway that deferred something, once the others are judged."""
        away: EngineAway | DatasetAway | None = None
        published, decided, claims = await asyncio.to_thread(self._read, claimed)
        for one in claimed:
            if one.rebuild:
                await self._rebuilder.rebuild(one, cache, published, rules=self._rules)
        found_now = await decide_many(list(claims.values()), policies=cache, published=published, rules=self._rules)
        decided |= dict(zip(claims, found_now, strict=True))
        judged: list[tuple[QueueItem, JudgedClaim]] = []
        for one in (one for one in claimed if not one.rebuild):
            found = decided[one.submission]
            if isinstance(found, PolicyUnavailable | BodyUnavailable):
                away = found if isinstance(found, EngineAway | DatasetAway) else away
                if not one.recheck or verdicts.clock() < one.recheck_by:
                    await self._deferrals.defer(one, found)
                    continue
                found = JudgedClaim(verdict=undecided(found))  # training waits for a recheck
            elif found.rows:
                self._deferrals.measured(one, claims[one.submission].rollouts)
            judged.append((one, found))
        if judged:
            blueprints = await self._blueprints(judged, cache)
            await asyncio.to_thread(self._recorder.record, judged, blueprints, published)
        if away is not None:
            raise away

    def _read(
        self, claimed: Sequence[QueueItem]
    ) -> tuple[Mapping[int, str], dict[str, JudgedClaim | PolicyUnavailable | BodyUnavailable], dict[str, Claim]]:
        """Read what a batch is judged by; return the published policies as `_published`, and by submission, without
        those to rebuild, what is decided without a measurement and what the others claim.
        """
        self._bodies.load_uploads(claimed)
        published = self._published(min(one.version for one in claimed))
        found: dict[str, JudgedClaim | PolicyUnavailable | BodyUnavailable] = {}
        claims: dict[str, Claim] = {}
        for one in (one for one in claimed if not one.rebuild):
            if one.is_hopeless:
                found[one.submission] = given_up(one)
                continue
            try:
                body = self._bodies.read(one)
            except BodyUnavailable as error:
                found[one.submission] = error
                continue
            rollouts = body if isinstance(body, Verdict) else read(body, spec=self._home.spec)
            if isinstance(rollouts, Verdict):
                found[one.submission] = JudgedClaim(verdict=rollouts)
            else:
                claims[one.submission] = claim_of(one, rollouts)
        return published, found, claims

    async def _blueprints(
        self, judged: Sequence[tuple[QueueItem, JudgedClaim]], cache: PolicyCache
    ) -> dict[int, Blueprint]:
        """Return the policies whose tokens the evidence of these has as text; those that can be had."""
        found: dict[int, Blueprint] = {}
        for one, judgement in judged:
            if has_evidence(judgement) and one.version not in found:
                try:
                    found[one.version] = await cache.blueprint(one.version)
                except PolicyUnavailable as error:
                    warn_without_evidence(one, error)
        return found

    def _published(self, version: int) -> Mapping[int, str]:
        """Return the manifest digests, by version, of the policies published from about `version` on.

        A policy is logged before any worker can learn of it, and this is read after the submission arrived, so it has
        every policy that an honest worker may name.
        """
        with self._home.database.read() as connection:
            return training.published_since(connection, version)
