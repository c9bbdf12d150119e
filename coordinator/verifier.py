"""The verifier process: takes submissions from the queue, judges them, and writes verdicts.

It holds no key. Policies come through SHARDCAST like everybody's, so that it can run on another machine than
the trainer. Any number of verifiers share one queue; one that dies loses nothing but its claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sqlalchemy.exc import OperationalError

from coordinator.bodies import Bodies
from coordinator.errors import StoreAway
from coordinator.evidence import DEFAULT_EVIDENCE_LIMITS, EvidenceLimits, encode_evidence, kept_tokens
from coordinator.home import Home
from coordinator.metrics import VerifierMetrics
from coordinator.policy_shelf import PolicyShelf
from coordinator.storage import locks, training, verdicts
from coordinator.storage.verdicts import Claimed, Decision
from coordinator.training.groups import Group, Sample, encode_group
from node.environments import load_environment
from node.logs import bound
from node.parquet_reader import ParquetReader
from node.policy import Blueprint, render_completion, render_tokens
from node.policy_errors import PolicyError
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.protocol.submission import Rollout
from node.readings import MakePrefills, make_prefills, transformers_prefills
from node.verification import Claim, PolicyAway, Rules, Verdict, decide_many, read, undecided
from shardcast import Client

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
CLAIM_SECONDS = 60.0
"""After so long a submission is another verifier's; each of those that are claimed together adds as much."""

SUBMISSIONS_AT_ONCE = 8
RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class VerifierSettings:
    """How this process works; what it checks is the run's."""

    name: str
    state: Path
    sources: tuple[str, ...]
    threads: int = 1
    make_prefills: MakePrefills = transformers_prefills
    evidence: EvidenceLimits = DEFAULT_EVIDENCE_LIMITS


class Verifier:
    """Judges one submission after another until it is stopped."""

    def __init__(self, home: Home, settings: VerifierSettings, metrics: VerifierMetrics | None = None) -> None:
        self._home = home
        self._settings = settings
        self._metrics = metrics or VerifierMetrics()
        environments = [load_environment(environment) for environment in home.spec.environments]
        self._rules = Rules(home.run_id, home.spec, environments)
        self._reader = ParquetReader()
        self._bodies = Bodies(home)

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
            prefills = make_prefills(self._home.spec, self._settings.make_prefills)
            shelf = PolicyShelf(self._home, client, prefills, self._metrics)
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

    async def _work_until(self, stop: asyncio.Event, shelf: PolicyShelf) -> None:
        while not stop.is_set():
            try:
                pause = 0.0 if await self._work(shelf) else IDLE_SECONDS
            except (OperationalError, OSError) as error:
                self._metrics.outages.inc()
                log.warning("the database or the disk is away, trying again: %s", error)
                pause = RETRY_SECONDS
            if pause:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), pause)

    async def _work(self, shelf: PolicyShelf) -> bool:
        """Judge the submissions that wait, a few at a time: they share forward passes."""
        claimed = await asyncio.to_thread(self._claim)
        if claimed:
            self._metrics.claims.inc(len(claimed))
            self._metrics.batch_submissions.observe(len(claimed))
            with self._metrics.batch_seconds.time():
                try:
                    await self._handle(claimed, shelf)
                except StoreAway as error:
                    log.warning("cannot verify %d submissions now: %s", len(claimed), error)
                    for one in claimed:
                        await asyncio.to_thread(self._defer, one)
        return bool(claimed)

    def _claim(self) -> list[Claimed]:
        with self._home.database.write() as connection:
            return verdicts.claim(
                connection,
                verifier=self._settings.name,
                spec=self._home.spec,
                now=verdicts.clock(),
                seconds=CLAIM_SECONDS,
                most=SUBMISSIONS_AT_ONCE,
            )

    async def _handle(self, claimed: Sequence[Claimed], shelf: PolicyShelf) -> None:
        await asyncio.to_thread(self._bodies.find, claimed)
        published = await asyncio.to_thread(self._published, min(one.version for one in claimed))
        for one, (verdict, rollouts) in zip(claimed, await self._verify(claimed, shelf, published), strict=True):
            if isinstance(verdict, PolicyAway):
                with _about(one):
                    log.warning("cannot verify %s now: %s", one.submission[:16], verdict)
                if not one.recheck or verdicts.clock() < one.recheck_by:
                    await asyncio.to_thread(self._defer, one)
                    continue
                verdict = undecided(verdict)  # noqa: PLW2901  (training does not wait for ever)
            seen = await self._evidence(one, verdict, rollouts, shelf)
            one = await asyncio.to_thread(self._bodies.keep, one)  # noqa: PLW2901  (under the name of what it is)
            decision = await asyncio.to_thread(self._stored, one, verdict, seen)
            await asyncio.to_thread(self._record, one, decision, published)
            await asyncio.to_thread(self._bodies.release, one)

    async def _verify(
        self, claimed: Sequence[Claimed], shelf: PolicyShelf, published: Mapping[int, str]
    ) -> list[tuple[Verdict | PolicyAway, Sequence[Rollout]]]:
        """A verdict on each, in their order, and what it is on as far as it could be read."""
        found: dict[str, Verdict | PolicyAway] = {}
        claims: dict[str, Claim] = {}
        for one in claimed:
            rollouts = await self._read(one)
            if isinstance(rollouts, Verdict):
                found[one.submission] = rollouts
            else:
                claims[one.submission] = Claim(
                    version=one.version,
                    manifest_digest=one.manifest_digest,
                    slot=one.slot,
                    candidate=one.candidate or 0,
                    rollouts=rollouts,
                    full=one.full,
                )
        decided = await decide_many(list(claims.values()), policies=shelf, published=published, rules=self._rules)
        found |= dict(zip(claims, decided, strict=True))
        return [
            (found[one.submission], claims[one.submission].rollouts if one.submission in claims else ())
            for one in claimed
        ]

    async def _evidence(
        self, claimed: Claimed, verdict: Verdict, rollouts: Sequence[Rollout], shelf: PolicyShelf
    ) -> bytes | None:
        """What people may look at beside the verdict, which it does not depend on."""
        if not rollouts or verdict.outcome is Outcome.INDETERMINATE:
            return None
        try:
            blueprint = await shelf.blueprint(claimed.version)
            return await asyncio.to_thread(self._seen, rollouts, verdict, blueprint)
        except (PolicyAway, PolicyError) as error:
            log.warning("no evidence is kept of %s: %s", claimed.submission[:16], error)
            return None

    def _seen(self, rollouts: Sequence[Rollout], verdict: Verdict, blueprint: Blueprint) -> bytes | None:
        limits, spec = self._settings.evidence, self._home.spec
        most = kept_tokens(limits, rows=len(rollouts))
        return encode_evidence(
            rollouts,
            verdict.deviations,
            prompt=render_completion(blueprint, rollouts[0].prompt_ids[: 2 * spec.sampling.max_prompt_tokens]),
            pieces=[render_tokens(blueprint, rollout.completion_ids[:most]) for rollout in rollouts],
            replies=[
                [(before, render_completion(blueprint, list(ids))) for before, ids in said] for said in verdict.replies
            ],
            chunk_tokens=spec.proofs.chunk_tokens,
            limits=limits,
        )

    async def _read(self, claimed: Claimed) -> list[Rollout] | Verdict:
        body = await asyncio.to_thread(self._bodies.read, claimed)
        return body if isinstance(body, Verdict) else await read(body, reader=self._reader, spec=self._home.spec)

    def _published(self, version: int) -> Mapping[int, str]:
        """What the run has published from about `version` on; whatever is in here is in the log before the verdict.

        A policy is in the log before any worker can hear of it, and this is read after the submission came: whatever
        an honest worker names is in here.
        """
        with self._home.database.read() as connection:
            return training.published_since(connection, version)

    def _defer(self, claimed: Claimed) -> None:
        self._metrics.deferred.inc()
        with self._home.database.write() as connection:
            verdicts.defer(connection, claimed, until=verdicts.clock() + RETRY_SECONDS)

    def _stored(self, claimed: Claimed, verdict: Verdict, seen: bytes | None) -> Decision:
        group = None
        if verdict.outcome is Outcome.ADMITTED and not claimed.recheck:
            group = self._home.blobs.put(encode_group(_group(claimed, verdict)))
        return Decision(
            outcome=verdict.outcome,
            reason=verdict.reason,
            detail=verdict.detail,
            tokens=verdict.tokens,
            finding=verdict.finding,
            figures=verdict.figures,
            totals=verdict.totals,
            rewards=verdict.rewards,
            group=group,
            spot=verdict.spot,
            evidence=None if seen is None else self._home.blobs.put(seen),
        )

    def _record(self, claimed: Claimed, decision: Decision, published: Mapping[int, str]) -> None:
        now = verdicts.clock()
        with self._home.database.write() as connection:
            if decision.reason is Reason.WRONG_SEGMENTS:
                # Had a policy been logged meanwhile, an auditor would count it as published and find another verdict.
                locks.deciding(connection)
                if training.newest(connection) != max(published, default=None):
                    verdicts.defer(connection, claimed, until=now)
                    return
            stored = verdicts.record(connection, claimed, decision, spec=self._home.spec, now=now)
        self._metrics.decided(decision, in_time=stored)
        if stored:
            why = f" ({decision.reason}: {decision.detail})" if decision.reason else ""
            where, again = f"{claimed.version}/{claimed.slot}", " again" if claimed.recheck else ""
            with _about(claimed):
                log.info("slot %s of %s… %s%s%s", where, claimed.node[:8], decision.outcome, again, why)


def _about(claimed: Claimed) -> contextlib.AbstractContextManager[None]:
    return bound(submission=claimed.submission, node=claimed.node, policy=claimed.version, slot=claimed.slot)


def _group(claimed: Claimed, verdict: Verdict) -> Group:
    samples = tuple(
        Sample(
            prompt_ids=tuple(rollout.prompt_ids),
            completion_ids=tuple(rollout.completion_ids),
            logprobs=tuple(logprobs),
            segments=tuple(zip(rollout.segment_versions, rollout.segment_tokens, strict=True)),
            replies=replies,
        )
        for rollout, logprobs, replies in zip(
            verdict.rollouts or (), verdict.logprobs or (), verdict.replies, strict=True
        )
    )
    return Group(version=claimed.version, rewards=verdict.rewards or (), rollouts=samples)
