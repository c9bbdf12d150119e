"""Record what a verifier judged: evidence and groups as blobs, then the verdicts of a batch in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.home import Home
from coordinator.storage import locks, training, verdicts
from coordinator.storage.verdicts import QueueItem
from coordinator.training.groups import encode_group
from coordinator.verifier.bodies import BodyReader
from coordinator.verifier.claimed import evidence_of, group_of, log_context
from coordinator.verifier.evidence import EvidenceLimits
from node.policy.errors import PolicyError
from node.policy.file import Blueprint
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.verification.judge import JudgedClaim

log = logging.getLogger(__name__)


class VerdictRecorder:
    """Stores the verdicts of one verifier; every method may block and raise DatabaseAway or OSError."""

    def __init__(self, home: Home, bodies: BodyReader, metrics: VerifierMetrics, *, limits: EvidenceLimits) -> None:
        self._home = home
        self._bodies = bodies
        self._metrics = metrics
        self._limits = limits

    def record(
        self,
        judged: Sequence[tuple[QueueItem, JudgedClaim]],
        blueprints: Mapping[int, Blueprint],
        published: Mapping[int, str],
    ) -> None:
        """Store these verdicts, all or, where an error is raised, none.

        `blueprints` are those of the policies that could be had: of others no evidence is kept. `published` are the
        versions that they were judged by.
        """
        ready = self._with_blobs(judged, blueprints)
        stored: list[bool | None] = []
        with self._home.database.write() as connection:
            for claimed, verdict, group, evidence in ready:
                if verdict.reason is Reason.WRONG_SEGMENTS:
                    # An auditor would count a policy logged meanwhile as published, and reach another verdict.
                    locks.deciding(connection)
                    if training.newest_version(connection) != max(published, default=None):
                        verdicts.defer(connection, claimed, until=verdicts.clock())
                        stored.append(None)
                        continue
                now = verdicts.clock()
                spec = self._home.spec
                stored.append(
                    verdicts.record(connection, claimed, verdict, spec=spec, now=now, group=group, evidence=evidence)
                )
        for (claimed, verdict, _, _), in_time in zip(ready, stored, strict=True):
            if in_time is not None:
                self._tell(claimed, verdict, in_time=in_time)
            self._bodies.release(claimed)

    def _with_blobs(
        self, judged: Sequence[tuple[QueueItem, JudgedClaim]], blueprints: Mapping[int, Blueprint]
    ) -> list[tuple[QueueItem, Verdict, str | None, str | None]]:
        """Store what belongs to these verdicts; return each item by its body's actual digest, and the names of the
        blobs of its group and its evidence.
        """
        kept = [(self._bodies.keep(claimed), judgement.verdict) for claimed, judgement in judged]
        made: list[bytes | None] = []
        for claimed, judgement in judged:
            is_group = judgement.verdict.outcome is Outcome.ADMITTED and not claimed.recheck
            made.append(encode_group(group_of(claimed, judgement, spec=self._home.spec)) if is_group else None)
            made.append(self._evidence(claimed, judgement, blueprints))
        names = iter(self._home.blobs.put_many([data for data in made if data is not None]))
        named = [None if data is None else next(names) for data in made]
        return [(*each, *blobs) for each, blobs in zip(kept, zip(named[::2], named[1::2], strict=True), strict=True)]

    def _evidence(
        self, claimed: QueueItem, judgement: JudgedClaim, blueprints: Mapping[int, Blueprint]
    ) -> bytes | None:
        """Encode the measurements for the submission's page; None if there are none. The verdict ignores them."""
        if not has_evidence(judgement) or claimed.version not in blueprints:
            return None
        try:
            return evidence_of(judgement, blueprints[claimed.version], limits=self._limits, spec=self._home.spec)
        except PolicyError as error:
            warn_without_evidence(claimed, error)
            return None

    def _tell(self, claimed: QueueItem, verdict: Verdict, *, in_time: bool) -> None:
        self._metrics.decided(verdict, in_time=in_time)
        if in_time:
            why = f" ({verdict.reason}: {verdict.detail})" if verdict.reason else ""
            where, again = f"{claimed.version}/{claimed.slot}", " again" if claimed.recheck else ""
            with log_context(claimed):
                log.info("slot %s of %s… %s%s%s", where, claimed.node[:8], verdict.outcome, again, why)


def has_evidence(judgement: JudgedClaim) -> bool:
    """Return whether there is anything to keep for the submission's page."""
    return bool(judgement.rollouts) and judgement.verdict.outcome is not Outcome.INDETERMINATE


def warn_without_evidence(claimed: QueueItem, error: Exception) -> None:
    """Log that a submission's page will lack its measurements, because its policy cannot be used."""
    log.warning("no evidence kept of submission %s…, its policy is unusable: %s", claimed.submission[:16], error)
