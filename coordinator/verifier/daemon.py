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

from coordinator.errors import StoreAway
from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.home import Home
from coordinator.storage import locks, training, verdicts
from coordinator.storage.faults import DatabaseAway
from coordinator.storage.verdicts import Claimed
from coordinator.training.groups import Group, Sample, encode_group
from coordinator.verifier.bodies import bodies_of
from coordinator.verifier.evidence import DEFAULT_EVIDENCE_LIMITS, EvidenceLimits, encode_evidence, kept_tokens
from coordinator.verifier.policy_cache import PolicyShelf
from node.environments import load_environment
from node.policy.errors import PolicyError
from node.policy.file import Blueprint, render_completion, render_tokens
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.protocol.submission import Rollout
from node.runtime.logs import bound
from node.verification.judge import JudgedClaim
from node.verification.measure import PolicyAway
from node.verification.plan import Claim, Rules
from node.verification.readings import MakePrefills, make_prefills, transformers_prefills
from node.verification.verify import decide_many, read, undecided
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
        self._bodies = bodies_of(home)

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

    async def _work_until(self, stop: asyncio.Event, shelf: PolicyShelf) -> None:
        while not stop.is_set():
            try:
                pause = 0.0 if await self._work(shelf) else IDLE_SECONDS
            except (DatabaseAway, OSError) as error:
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
        for one, found in zip(claimed, await self._verify(claimed, shelf, published), strict=True):
            if isinstance(found, PolicyAway):
                with _about(one):
                    log.warning("cannot verify %s now: %s", one.submission[:16], found)
                if not one.recheck or verdicts.clock() < one.recheck_by:
                    await asyncio.to_thread(self._defer, one)
                    continue
                found = JudgedClaim(verdict=undecided(found))  # noqa: PLW2901  (training does not wait for ever)
            evidence = await self._evidence(one, found, shelf)
            one = await asyncio.to_thread(self._bodies.keep, one)  # noqa: PLW2901  (under the name of what it is)
            await asyncio.to_thread(self._record, one, found, evidence, published)
            await asyncio.to_thread(self._bodies.release, one)

    async def _verify(
        self, claimed: Sequence[Claimed], shelf: PolicyShelf, published: Mapping[int, str]
    ) -> list[JudgedClaim | PolicyAway]:
        """Judge each, and return what was found in their order."""
        found: dict[str, JudgedClaim | PolicyAway] = {}
        claims: dict[str, Claim] = {}
        for one in claimed:
            rollouts = await self._read(one)
            if isinstance(rollouts, Verdict):
                found[one.submission] = JudgedClaim(verdict=rollouts)
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
        return [found[one.submission] for one in claimed]

    async def _evidence(self, claimed: Claimed, judgement: JudgedClaim, shelf: PolicyShelf) -> bytes | None:
        """Encode what people may look at beside the verdict, which does not depend on it."""
        if not judgement.rollouts or judgement.verdict.outcome is Outcome.INDETERMINATE:
            return None
        try:
            blueprint = await shelf.blueprint(claimed.version)
            return await asyncio.to_thread(self._encode_evidence, judgement, blueprint)
        except (PolicyAway, PolicyError) as error:
            log.warning("no evidence is kept of %s: %s", claimed.submission[:16], error)
            return None

    def _encode_evidence(self, judgement: JudgedClaim, blueprint: Blueprint) -> bytes | None:
        limits, spec, rollouts = self._settings.evidence, self._home.spec, judgement.rollouts
        most = kept_tokens(limits, rows=len(rollouts))
        return encode_evidence(
            rollouts,
            {row: one.deviations for row, one in judgement.rows.items()},
            prompt=render_completion(blueprint, rollouts[0].prompt_ids[: 2 * spec.sampling.max_prompt_tokens]),
            pieces=[render_tokens(blueprint, rollout.completion_ids[:most]) for rollout in rollouts],
            replies=[
                [(before, render_completion(blueprint, list(ids))) for before, ids in said]
                for said in judgement.replies
            ],
            chunk_tokens=spec.proofs.chunk_tokens,
            limits=limits,
        )

    async def _read(self, claimed: Claimed) -> list[Rollout] | Verdict:
        body = await asyncio.to_thread(self._bodies.read, claimed)
        return body if isinstance(body, Verdict) else await read(body, spec=self._home.spec)

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

    def _record(
        self, claimed: Claimed, judgement: JudgedClaim, evidence: bytes | None, published: Mapping[int, str]
    ) -> None:
        verdict, blobs = judgement.verdict, self._home.blobs
        is_group = verdict.outcome is Outcome.ADMITTED and not claimed.recheck
        group = blobs.put(encode_group(_group(claimed, judgement))) if is_group else None
        seen = None if evidence is None else blobs.put(evidence)
        now = verdicts.clock()
        with self._home.database.write() as connection:
            if verdict.reason is Reason.WRONG_SEGMENTS:
                # Had a policy been logged meanwhile, an auditor would count it as published and find another verdict.
                locks.deciding(connection)
                if training.newest(connection) != max(published, default=None):
                    verdicts.defer(connection, claimed, until=now)
                    return
            stored = verdicts.record(
                connection, claimed, verdict, spec=self._home.spec, now=now, group=group, evidence=seen
            )
        self._metrics.decided(verdict, in_time=stored)
        if stored:
            why = f" ({verdict.reason}: {verdict.detail})" if verdict.reason else ""
            where, again = f"{claimed.version}/{claimed.slot}", " again" if claimed.recheck else ""
            with _about(claimed):
                log.info("slot %s of %s… %s%s%s", where, claimed.node[:8], verdict.outcome, again, why)


def _about(claimed: Claimed) -> contextlib.AbstractContextManager[None]:
    return bound(submission=claimed.submission, node=claimed.node, policy=claimed.version, slot=claimed.slot)


def _group(claimed: Claimed, judgement: JudgedClaim) -> Group:
    samples = tuple(
        Sample(
            prompt_ids=tuple(rollout.prompt_ids),
            completion_ids=tuple(rollout.completion_ids),
            logprobs=tuple(logprobs),
            segments=tuple(zip(rollout.segment_versions, rollout.segment_tokens, strict=True)),
            replies=replies,
        )
        for rollout, logprobs, replies in zip(
            judgement.rollouts, judgement.logprobs or (), judgement.replies, strict=True
        )
    )
    return Group(version=claimed.version, rewards=judgement.verdict.rewards or (), rollouts=samples)
