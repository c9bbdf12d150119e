"""The verifier process: takes submissions from the queue, judges them, and writes verdicts.

It holds no key. Policies come through SHARDCAST like everybody's, so that it can run on another machine than
the trainer. Any number of verifiers share one queue; one that dies loses nothing but its claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from sqlalchemy.exc import OperationalError

from coordinator.home import Home
from coordinator.policy_shelf import PolicyShelf
from coordinator.storage import training, verdicts
from coordinator.storage.verdicts import Claimed, Decision
from coordinator.training.groups import encode_group
from coordinator.training.grpo import Group, Sample
from node.environments import load_environment
from node.parquet_reader import ParquetReader
from node.prefill import Prefills, TransformersPrefills
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.protocol.run import RunSpec
from node.verification import PolicyAway, Rules, Verdict, verify
from shardcast import Client

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
CLAIM_SECONDS = 60.0
RETRY_SECONDS = 1.0

PUBLICATION_SECONDS = 10.0
"""How long a submission that names a policy newer than the newest published is waited with. The trainer announces
a policy a moment before it is in the log, so an honest worker can be ahead of the log by so much.
"""

MAX_AWAITED = 4096
"""Submissions whose missing policy is remembered; beyond that some are read again, which costs time alone."""


@dataclass(frozen=True)
class VerifierSettings:
    """How this process works; what it checks is the run's. `make_prefills` None: transformers, in this process."""

    name: str
    state: Path
    sources: tuple[str, ...]
    threads: int = 1
    make_prefills: Callable[[RunSpec], Prefills] | None = None


class Verifier:
    """Judges one submission after another until it is stopped."""

    def __init__(self, home: Home, settings: VerifierSettings) -> None:
        self._home = home
        self._settings = settings
        environments = [load_environment(environment) for environment in home.spec.environments]
        self._rules = Rules(home.run_id, home.spec, environments)
        self._reader = ParquetReader()
        self._awaited: OrderedDict[str, Verdict] = OrderedDict()

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
            prefills = self._make_prefills()
            shelf = PolicyShelf(self._home, client, prefills)
            log.info("verifying for run %s as %s", self._home.run_id[:16], self._settings.name)
            ahead = asyncio.create_task(shelf.prefetch())
            try:
                await self._work_until(stop, shelf)
            finally:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
                await shelf.close()
                await prefills.close()
        self._reader.close()

    def _make_prefills(self) -> Prefills:
        spec, make = self._home.spec, self._settings.make_prefills
        return TransformersPrefills(dtype=spec.model.dtype) if make is None else make(spec)

    async def _work_until(self, stop: asyncio.Event, shelf: PolicyShelf) -> None:
        while not stop.is_set():
            try:
                pause = 0.0 if await self._work(shelf) else IDLE_SECONDS
            except (OperationalError, OSError) as error:
                log.warning("the database or the disk is away, trying again: %s", error)
                pause = RETRY_SECONDS
            if pause:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)

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
        published = await asyncio.to_thread(self._published, claimed)
        # To name a policy that never comes is free, so what is known of such a submission is not found out again.
        verdict = self._awaited.get(claimed.submission)
        if verdict is None or verdict.awaits in published:
            try:
                verdict = await self._verify(claimed, shelf, published)
            except PolicyAway as error:
                log.warning("cannot verify %s now: %s", claimed.submission[:16], error)
                await asyncio.to_thread(self._defer, claimed)
                return
        if verdict.awaits is not None:
            self._remember(claimed.submission, verdict)
            if verdicts.clock() < claimed.received_at + PUBLICATION_SECONDS:
                await asyncio.to_thread(self._defer, claimed)
                return
            verdict = _undecided(verdict)
        decision = await asyncio.to_thread(self._stored, claimed, verdict)
        await asyncio.to_thread(self._record, claimed, decision)

    async def _verify(self, claimed: Claimed, shelf: PolicyShelf, published: Mapping[int, str]) -> Verdict:
        return await verify(
            self._home.blobs.path(claimed.body),
            reader=self._reader,
            version=claimed.version,
            manifest_digest=claimed.manifest_digest,
            slot=claimed.slot,
            policies=shelf,
            published=published,
            rules=self._rules,
        )

    def _remember(self, submission: str, verdict: Verdict) -> None:
        self._awaited[submission] = verdict
        while len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)

    def _published(self, claimed: Claimed) -> Mapping[int, str]:
        """What the run has published; whatever is in here is in the log before the verdict."""
        with self._home.database.read() as connection:
            return training.published_since(connection, claimed.version)

    def _defer(self, claimed: Claimed) -> None:
        with self._home.database.write() as connection:
            verdicts.defer(connection, claimed, until=verdicts.clock() + RETRY_SECONDS)

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


def _undecided(verdict: Verdict) -> Verdict:
    """Whether an unpublished policy is a lie, or one that the trainer announced and could not record, is not known."""
    return replace(
        verdict,
        outcome=Outcome.INDETERMINATE,
        reason=Reason.VERIFIER_FAILED,
        detail=f"Policy {verdict.awaits} is not in the log.",
    )


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
