"""Groups that were lost after their admission: measured again, and kept where they are the logged ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from coordinator.run.home import Home
from coordinator.storage import rebuilds
from coordinator.storage.rebuilds import AdmittedGroup
from coordinator.storage.verdicts import QueueItem
from coordinator.training.groups import encode_group
from coordinator.verifier.bodies import BodyReader, BodyUnavailable
from coordinator.verifier.claimed import claim_of, given_up, group_of, log_context
from coordinator.verifier.deferrals import Deferrals
from coordinator.verifier.policy_cache import PolicyCache
from node.protocol.admission import Outcome, Verdict
from node.protocol.submission import Rollout
from node.verification.judge import JudgedClaim
from node.verification.measure import DatasetAway, EngineAway, PolicyUnavailable
from node.verification.plan import Claim, Rules, never
from node.verification.verify import decide_many, read
from shardcast.wire import digest

log = logging.getLogger(__name__)


class GroupRebuilder:
    """Rebuilds the groups of claimed submissions."""

    def __init__(self, home: Home, bodies: BodyReader, deferrals: Deferrals) -> None:
        self._home = home
        self._bodies = bodies
        self._deferrals = deferrals

    async def rebuild(
        self, claimed: QueueItem, cache: PolicyCache, published: Mapping[int, str], *, rules: Rules
    ) -> None:
        """Measure an admitted submission once more, alone, and keep its group if it is the logged one.

        Raises EngineAway or DatasetAway once it is deferred, and what the database and the blob store raise.
        """
        kept = await asyncio.to_thread(self._admitted_group, claimed)
        if claimed.is_hopeless:
            await asyncio.to_thread(self._record, claimed, given_up(claimed), kept)
            return
        found: JudgedClaim | PolicyUnavailable | BodyUnavailable
        rollouts: Sequence[Rollout] | Verdict = ()
        try:
            body = await asyncio.to_thread(self._bodies.read, claimed)
            rollouts = body if isinstance(body, Verdict) else await asyncio.to_thread(read, body, spec=self._home.spec)
            if isinstance(rollouts, Verdict):
                found = JudgedClaim(verdict=rollouts)
            else:
                found = await self._measure_again(
                    claim_of(claimed, rollouts), claimed, kept, cache, published, rules=rules
                )
        except BodyUnavailable as error:
            found = error
        if isinstance(found, PolicyUnavailable | BodyUnavailable):
            await self._deferrals.defer(claimed, found)
            if isinstance(found, EngineAway | DatasetAway):
                raise found
            return
        if found.rows and not isinstance(rollouts, Verdict):
            self._deferrals.measured(claimed, rollouts)
        await asyncio.to_thread(self._record, claimed, found, kept)

    async def _measure_again(
        self,
        claim: Claim,
        claimed: QueueItem,
        kept: AdmittedGroup,
        cache: PolicyCache,
        published: Mapping[int, str],
        *,
        rules: Rules,
    ) -> JudgedClaim | PolicyUnavailable:
        """Judge as the first time; until the group has the same bits, with another row first, which rounds otherwise.

        They may differ all the same, where other submissions shared the first forward passes.
        """
        probes = [*range(len(claim.rollouts))] if claimed.spot is None else [claimed.spot]
        for probe in probes:
            (found,) = await decide_many(
                [claim],
                policies=cache,
                published=published,
                rules=rules,
                probe=lambda _rows, probe=probe: probe,  # type: ignore[misc]
                look=never,
            )
            if isinstance(found, PolicyUnavailable) or found.verdict.outcome is not Outcome.ADMITTED:
                break
            if digest(encode_group(group_of(claimed, found, spec=self._home.spec))) == kept.blob:
                break
        return found

    def _admitted_group(self, claimed: QueueItem) -> AdmittedGroup:
        with self._home.database.read() as connection:
            return rebuilds.admitted_group(connection, claimed.submission)

    def _record(self, claimed: QueueItem, found: JudgedClaim, kept: AdmittedGroup) -> None:
        """Keep the group if its rewards are the logged ones and, once a policy was trained on it, if each bit is."""
        verdict, blob = found.verdict, None
        if verdict.outcome is Outcome.ADMITTED and tuple(verdict.rewards or ()) == kept.rewards:
            data = encode_group(group_of(claimed, found, spec=self._home.spec))
            if digest(data) == kept.blob or not kept.is_trained:
                blob = self._home.blobs.put(data)
        with self._home.database.write() as connection:
            again = verdict.outcome is Outcome.INDETERMINATE
            if not rebuilds.finish(connection, claimed, blob=blob, again=again):
                return
        with log_context(claimed):
            if blob is None:
                why = "its bits differ from those trained on" if verdict.outcome is Outcome.ADMITTED else verdict.detail
                log.warning("the group of submission %s… could not be rebuilt: %s", claimed.submission[:16], why)
            else:
                how = "bit for bit" if blob == kept.blob else "of a new measurement"
                log.info("rebuilt the group of submission %s…, %s", claimed.submission[:16], how)
