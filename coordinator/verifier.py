"""The verifier process: takes submissions from the queue, judges them, and writes verdicts.

It holds no key. Policies come through SHARDCAST like everybody's, so that it can run on another machine than
the trainer. Any number of verifiers share one queue; one that dies loses nothing but its claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from sqlalchemy.exc import OperationalError

from coordinator.errors import VerifierUnavailable
from coordinator.home import Home
from coordinator.storage import verdicts
from coordinator.storage.verdicts import Claimed, Decision
from coordinator.training.groups import encode_group
from coordinator.training.grpo import Group, Sample
from node.environments import Environment, load_environment
from node.parquet_reader import ParquetReader
from node.policy import Policy, load_policy
from node.protocol.admission import Outcome
from node.verification import Verdict, verify
from shardcast import Client
from shardcast.errors import ShardcastError

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
CLAIM_SECONDS = 60.0
RETRY_SECONDS = 1.0
FETCH_SECONDS = 600.0
POLICIES_IN_MEMORY = 4


@dataclass(frozen=True)
class VerifierSettings:
    """How this process works; what it checks is the run's."""

    name: str
    state: Path
    sources: tuple[str, ...]
    threads: int = 1


class PolicyShelf:
    """Verified policies by version, the most recently used in memory."""

    def __init__(self, client: Client, *, spec_dtype: str) -> None:
        self._client = client
        self._dtype: torch.dtype = getattr(torch, spec_dtype)
        self._loaded: OrderedDict[str, Policy] = OrderedDict()

    async def get(self, version: int, manifest_digest: str) -> Policy:
        """The policy whose manifest has this digest; raises VerifierUnavailable."""
        if manifest_digest not in self._loaded:
            try:
                path = await self._client.fetch_archived(
                    version, manifest_digest=manifest_digest, timeout_s=FETCH_SECONDS
                )
            except ShardcastError as error:
                raise VerifierUnavailable(f"policy {version}: {error}") from error
            self._loaded[manifest_digest] = await asyncio.to_thread(load_policy, path, dtype=self._dtype)
            while len(self._loaded) > POLICIES_IN_MEMORY:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(manifest_digest)
        return self._loaded[manifest_digest]


class Verifier:
    """Judges one submission after another until it is stopped."""

    def __init__(self, home: Home, settings: VerifierSettings) -> None:
        self._home = home
        self._settings = settings
        self._environments: list[Environment] = [load_environment(e) for e in home.spec.environments]
        self._reader = ParquetReader()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; a database or a policy that is away is waited for."""
        torch.set_num_threads(self._settings.threads)
        async with Client(
            run_id=self._home.run_id,
            publisher_key=self._home.public_key,
            sources=list(self._settings.sources),
            state_dir=self._settings.state,
            keep=self._home.spec.broadcast.keep_versions,
        ) as client:
            shelf = PolicyShelf(client, spec_dtype=self._home.spec.model.dtype)
            log.info("verifying for run %s as %s", self._home.run_id[:16], self._settings.name)
            while not stop.is_set():
                try:
                    pause = 0.0 if await self._work(shelf) else IDLE_SECONDS
                except (OperationalError, OSError) as error:
                    log.warning("the database or the disk is away, trying again: %s", error)
                    pause = RETRY_SECONDS
                if pause:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), pause)
        self._reader.close()

    async def _work(self, shelf: PolicyShelf) -> bool:
        """Judge one submission, if one waits."""
        claimed = await asyncio.to_thread(self._claim)
        if claimed is not None:
            await self._handle(claimed, shelf)
        return claimed is not None

    def _claim(self) -> Claimed | None:
        with self._home.database.write() as connection:
            return verdicts.claim(connection, verifier=self._settings.name, now=verdicts.clock(), seconds=CLAIM_SECONDS)

    async def _handle(self, claimed: Claimed, shelf: PolicyShelf) -> None:
        try:
            policy = await shelf.get(claimed.version, claimed.manifest_digest)
            decision = await asyncio.to_thread(self._decide, claimed, policy)
        except VerifierUnavailable as error:
            log.warning("cannot verify %s now: %s", claimed.submission[:16], error)
            await asyncio.sleep(RETRY_SECONDS)
            return
        await asyncio.to_thread(self._record, claimed, decision)

    def _decide(self, claimed: Claimed, policy: Policy) -> Decision:
        home = self._home
        verdict = verify(
            home.blobs.path(claimed.body),
            reader=self._reader,
            run_id=home.run_id,
            manifest_digest=claimed.manifest_digest,
            slot=claimed.slot,
            policy=policy,
            environments=self._environments,
            spec=home.spec,
        )
        return self._stored(claimed, verdict)

    def _stored(self, claimed: Claimed, verdict: Verdict) -> Decision:
        group = None
        if verdict.outcome is Outcome.ADMITTED:
            group = self._home.blobs.put(encode_group(_group(claimed, verdict)))
        return Decision(
            outcome=verdict.outcome,
            reason=verdict.reason,
            detail=verdict.detail,
            tokens=verdict.tokens,
            finding=verdict.finding,
            figures=verdict.figures,
            rewards=verdict.rewards,
            group=group,
        )

    def _record(self, claimed: Claimed, decision: Decision) -> None:
        now = verdicts.clock()
        with self._home.database.write() as connection:
            stored = verdicts.record(connection, claimed, decision, spec=self._home.spec, now=now)
        if stored:
            why = f" ({decision.reason}: {decision.detail})" if decision.reason else ""
            log.info("slot %d/%d of %s… %s%s", claimed.version, claimed.slot, claimed.node[:8], decision.outcome, why)


def _group(claimed: Claimed, verdict: Verdict) -> Group:
    samples = tuple(
        Sample(
            prompt_ids=tuple(rollout.prompt_ids),
            completion_ids=tuple(rollout.completion_ids),
            logprobs=tuple(logprobs),
        )
        for rollout, logprobs in zip(verdict.rollouts or (), verdict.logprobs or (), strict=True)
    )
    return Group(version=claimed.version, rewards=verdict.rewards or (), rollouts=samples)
