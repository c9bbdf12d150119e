"""What a verifier puts back into the queue, and the two lines of the log about each reason to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.metrics.roles import VerifierMetrics
from coordinator.run.home import Home
from coordinator.storage import verdicts
from coordinator.storage.verdicts import QueueItem
from coordinator.verifier.bodies import BodyUnavailable
from node.protocol.submission import Rollout
from node.verification.measure import PolicyUnavailable

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
FORGOTTEN_SECONDS = 600.0
"""After so long without a deferral, more than a batch takes, somebody else has judged what waited."""

STORE = "submissions in the blob store"


@dataclass(slots=True)
class _Waiting:
    """Since when, and until when at least, submissions have been deferred for one reason (monotonic)."""

    since: float
    last: float


class Deferrals:
    """Puts submissions back, and logs when those of a policy, or of a damaged body, begin to wait and when they go on.

    A line for each that is put back would be thousands a minute while no source serves a policy; a metric counts them.
    """

    def __init__(self, home: Home, metrics: VerifierMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._home, self._metrics, self._clock = home, metrics, clock
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._unreleased: list[QueueItem] = []

    async def defer(self, claimed: QueueItem, why: PolicyUnavailable | BodyUnavailable) -> None:
        """Put back a submission that cannot be judged now."""
        self.begin(_subject(claimed, why), why)
        await asyncio.to_thread(self._put_back, claimed)

    async def defer_all(self, claimed: Sequence[QueueItem]) -> None:
        """Put back a batch; raises as `release`."""
        self._unreleased += claimed
        await self.release()

    async def release(self) -> None:
        """Put back what is still to be; raises DatabaseAway or OSError, and the rest is put back the next time."""
        while self._unreleased:
            await asyncio.to_thread(self._put_back, self._unreleased[0])
            del self._unreleased[0]

    def measured(self, claimed: QueueItem, rollouts: Sequence[Rollout]) -> None:
        """Note that a submission was measured: its body, and the policies that drew `rollouts`, are here."""
        if self._waiting:
            versions = {claimed.version}.union(*(rollout.segment_versions for rollout in rollouts))
            for subject in (STORE, *map(_of_policy, sorted(versions)), _of_body(claimed)):
                self.end(subject)

    def begin(self, subject: str, why: Exception) -> None:
        """Log that `subject` has to wait, unless that is known."""
        now = self._forget()
        if subject not in self._waiting:
            log.warning("%s: deferred, trying again every %.0f s: %s", subject, RETRY_SECONDS, why)
        self._waiting.setdefault(subject, _Waiting(now, now)).last = now
        self._waiting.move_to_end(subject)

    def end(self, subject: str) -> None:
        """Log that `subject` waits no longer, if it did."""
        now = self._forget()
        if (waited := self._waiting.pop(subject, None)) is not None:
            log.info("%s: judged again, after %.0f s", subject, now - waited.since)

    def _forget(self) -> float:
        """Drop what somebody else has judged meanwhile; return the time."""
        now = self._clock()
        while self._waiting and now - next(iter(self._waiting.values())).last > FORGOTTEN_SECONDS:
            self._waiting.popitem(last=False)
        return now

    def _put_back(self, claimed: QueueItem) -> None:
        with self._home.database.write() as connection:
            verdicts.defer(connection, claimed, until=verdicts.clock() + RETRY_SECONDS)
        self._metrics.deferred.inc()


def _subject(claimed: QueueItem, why: PolicyUnavailable | BodyUnavailable) -> str:
    if isinstance(why, BodyUnavailable):
        return _of_body(claimed)
    return _of_policy(claimed.version if why.version is None else why.version)


def _of_policy(version: int) -> str:
    return f"submissions that policy {version} drew"


def _of_body(claimed: QueueItem) -> str:
    return f"submission {claimed.submission[:16]}…"
