"""Lease requests: when, for which policies, and validation of the reply.

A lease whose manifest is not the one that this worker verified is refused, so a coordinator cannot equivocate between
workers unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import UNSET

from node.client.api import FOREVER
from node.errors import BadReply, CoordinatorFault, Refused
from node.joining.session import RunSession
from node.protocol.messages import Lease, LeaseReply, LeaseRequest
from node.protocol.pools import has_candidate
from node.protocol.reasons import Reason
from node.worker.complaints import WarnOnce
from node.worker.events import NO_OBSERVER, EventKind, Observer
from node.worker.policies import PolicyFeed
from node.worker.registration import Registrar

log = logging.getLogger(__name__)

MAX_HELD_VERSIONS: Final = 64
MAX_SLOTS: Final = 1024
HAND_BACK_SECONDS: Final = 3.0
REFUSED_PAUSE_SECONDS: Final = 2.0
UNSOUND_PAUSE_SECONDS: Final = 5.0
LEAST_PAUSE_SECONDS: Final = 0.05
MOST_PAUSE_SECONDS: Final = 60.0
FINAL: Final = (Reason.BANNED, Reason.KEY_IN_USE)
"""Refusals that are permanent."""

IDLE_SECONDS: Final = 15.0
"""Idle time after which the reason is logged; doubled each time."""


class LeaseClient:
    """One worker's lease requests. `is_over` is set once the run's last policy is published.

    `evidence` is the folder that a person is to keep when the coordinator equivocates.
    """

    def __init__(
        self,
        session: RunSession,
        feed: PolicyFeed,
        *,
        registrar: Registrar,
        evidence: Path,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.is_over = False
        self.came_empty = False
        self._client, self._spec = session.client, session.descriptor.spec
        self._feed = feed
        self._registrar = registrar
        self._evidence = evidence
        self._observer = observer
        self._warn_once = WarnOnce()
        self._ask_at = 0.0
        self._idle_since: float | None = None
        self._idle_said = IDLE_SECONDS

    @property
    def pause_seconds(self) -> float:
        """The seconds until the next lease request is due."""
        return max(0.0, self._ask_at - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Send no lease request for `seconds`."""
        self._ask_at = time.monotonic() + seconds

    async def ask(self, held: Sequence[int], slots: int, *, lacks: tuple[int, ...] = ()) -> list[Lease]:
        """Request leases, return the valid ones (of one version) and hand back the others; sets `pause_seconds`.

        `lacks` are the environments that are not installed here.
        """
        request = LeaseRequest(
            held_versions=tuple(held[:MAX_HELD_VERSIONS]),
            slots=min(slots, MAX_SLOTS),
            instance=self._registrar.instance.id,
            lacks=lacks or UNSET,
        )
        try:
            reply = await self._client.lease(request, patience_seconds=FOREVER)
        except (Refused, BadReply) as error:
            self._warn_once.note("no work", error)
            self.pause(REFUSED_PAUSE_SECONDS)
            if isinstance(error, Refused) and error.code in FINAL:
                self._registrar.dismiss(error)
            if isinstance(error, Refused) and error.code == Reason.UNKNOWN_IDENTITY:
                await self._registrar.register_until_known()
            return []
        self._warn_once.clear("no work")
        self._registrar.heard()
        sound = [lease for lease in reply.leases if self._is_sound(lease, reply.leases[0].version)]
        self._note(reply, wanted=request.slots, sound=len(sound))
        await self.give_back([lease for lease in reply.leases if lease not in sound])
        return sound

    async def give_back(self, leases: Sequence[Lease]) -> None:
        """Return leases, so that their slots are leased again at once; on failure they expire."""
        await asyncio.gather(*(self._give_back(lease) for lease in leases))

    async def _give_back(self, lease: Lease) -> None:
        try:
            await self._client.return_lease(lease.lease_id, patience_seconds=HAND_BACK_SECONDS)
            log.info("returned the lease of slot %d of policy %d", lease.slot, lease.version)
            self._observer.notify(EventKind.RETURNED, policy=lease.version, slot=lease.slot)
        except CoordinatorFault as error:
            log.warning("the lease of slot %d of policy %d was not returned: %s", lease.slot, lease.version, error)

    def _is_sound(self, lease: Lease, version: int) -> bool:
        """Return whether a lease fits its reply's version, the manifest verified here, and the problems of its slot."""
        if not has_candidate(self._spec, lease, run_id=self._client.run_id):
            log.error("not working on slot %d: its lease is on a problem that the run's rules do not know", lease.slot)
            return False
        held = self._feed.get(lease.version)
        if lease.version == version and held is not None and held.manifest_digest == lease.manifest_digest:
            return True
        log.error(
            "not working on slot %d: the coordinator names manifest %s… for policy %d, which is not the one that the "
            "run signed for this worker; ask the operator, and keep %s",
            lease.slot,
            lease.manifest_digest[:16],
            lease.version,
            self._evidence,
        )
        return False

    def _note(self, reply: LeaseReply, *, wanted: int, sound: int) -> None:
        self.came_empty = not reply.leases
        if sound < len(reply.leases):
            self.pause(UNSOUND_PAUSE_SECONDS)
        elif sound < wanted:
            self.pause(min(max(reply.retry_after_seconds, LEAST_PAUSE_SECONDS), MOST_PAUSE_SECONDS))
        if reply.head_version >= self._spec.training.steps and not self.is_over:
            self.is_over = True
            log.info("the run is over: policy %d was its last. This worker may be stopped", reply.head_version)
        if sound:
            self._idle_since, self._idle_said = None, IDLE_SECONDS
        elif not self.is_over:
            self._note_idle(reply.head_version)

    def _note_idle(self, head: int) -> None:
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        idle = now - self._idle_since
        if idle < self._idle_said:
            return
        self._idle_said *= 2
        if head >= 0 and self._feed.get(head) is None:
            why = f"the newest policy is {head}, and no relay has brought it here"
        else:
            why = "the run has given out all that its next steps need, or waits for verdicts on this node's work"
        log.info("No lease for %.0f s (%s); still polling.", idle, why)
