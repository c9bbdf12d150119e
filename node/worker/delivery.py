"""Background delivery of generated slots: upload, then wait for the receipt.

Pending slots are on disk (`node.worker.state`), so delivery resumes after a crash. Whether a lease still holds is for
the coordinator to decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from node.client.api import FOREVER, CoordinatorClient
from node.client.http import Backoff, printable
from node.errors import BadReply, Refused
from node.protocol.admission import Outcome
from node.protocol.messages import Receipt
from node.protocol.reasons import Reason
from node.runtime.logs import bound
from node.worker.events import NO_OBSERVER, EventKind, Observer, of_receipt
from node.worker.state import PendingDelivery, WorkerState

log = logging.getLogger(__name__)

RECEIPT_WAIT_SECONDS = 20.0
RECEIPT_PAUSE_SECONDS = 0.5


class Delivery:
    """Uploads and waits for receipts, one task for each slot."""

    def __init__(
        self,
        client: CoordinatorClient,
        state: WorkerState,
        *,
        register: Callable[[], Awaitable[None]],
        backoff: Backoff,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.lost = 0
        self._client = client
        self._state = state
        self._register = register
        self._backoff = backoff
        self._observer = observer
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: set[str] = set()
        self._explained: set[Reason] = set()
        self._left: tuple[int, int] | None = None
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    def __len__(self) -> int:
        """Return the number of slots in delivery; after `finish`, of those left to the next start."""
        return len(self._tasks) if self._left is None else self._left[0]

    @property
    def unsent(self) -> int:
        """The number of slots not uploaded yet."""
        return len(self._unsent) if self._left is None else self._left[1]

    def start(self, pending: PendingDelivery, group: asyncio.TaskGroup) -> None:
        """Deliver one slot in the background."""
        if pending.submission is None:
            self._unsent.add(pending.lease.lease_id)
            self._all_sent.clear()
        lease = pending.lease
        with bound(policy=lease.version, slot=lease.slot, lease=lease.lease_id):
            task = group.create_task(self._deliver(pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until every slot has its receipt or is lost."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self, *, upload_seconds: float) -> None:
        """Wait up to `upload_seconds` for uploads, then cancel the rest, which stays on disk."""
        try:
            async with asyncio.timeout(upload_seconds):
                await self._all_sent.wait()
        except TimeoutError:
            log.warning("%d submissions are not uploaded yet; the next start resumes them", len(self._unsent))
        self._left = len(self._tasks), len(self._unsent)
        for task in self._tasks:
            task.cancel()

    async def _deliver(self, pending: PendingDelivery) -> None:
        if pending.submission is None:
            try:
                submission = await self._upload(pending)
            finally:
                self._unsent.discard(pending.lease.lease_id)
                if not self._unsent:
                    self._all_sent.set()
            if submission is None:
                return
            pending = self._state.acknowledge(pending, submission)
            lease = pending.lease
            self._observer.notify(EventKind.SUBMITTED, policy=lease.version, slot=lease.slot, submission=submission)
        with bound(submission=pending.submission):
            await self._await_receipt(pending, str(pending.submission))

    async def _upload(self, pending: PendingDelivery) -> str | None:
        """Upload, retrying, and return the submission's id; None if the coordinator refuses it for good."""
        body = self._state.body_of(pending)
        failures, registered = 0, False
        while True:
            try:
                return await self._client.submit(pending.lease, body, patience_seconds=FOREVER)
            except Refused as error:
                if error.code == Reason.DUPLICATE_SUBMISSION and error.submission is not None:
                    return error.submission
                if error.code != Reason.UNKNOWN_IDENTITY or registered:
                    self._lose(pending, str(error))
                    return None
                registered = True
                await self._register()
            except BadReply as error:
                failures += 1
                await self._wait_after(error, failures)

    async def _await_receipt(self, pending: PendingDelivery, submission: str) -> None:
        failures = 0
        while True:
            asked = time.monotonic()
            try:
                found = await self._client.receipt(
                    submission, wait_seconds=RECEIPT_WAIT_SECONDS, patience_seconds=FOREVER
                )
            except Refused as error:
                self._lose(pending, str(error))
                return
            except BadReply as error:
                failures += 1
                await self._wait_after(error, failures)
                continue
            if found is not None:
                self._settle(pending, *found)
                return
            # A server that answers a long poll at once must not make this loop spin.
            if time.monotonic() - asked < RECEIPT_PAUSE_SECONDS:
                await asyncio.sleep(RECEIPT_PAUSE_SECONDS)

    def _settle(self, pending: PendingDelivery, receipt: Receipt, envelope: bytes) -> None:
        if (receipt.version, receipt.slot) != (pending.lease.version, pending.lease.slot):
            self._lose(pending, "the run signed a receipt for another slot under this submission's name")
            return
        self._state.settle(pending, receipt, envelope)
        kind, keys = of_receipt(receipt, detail=printable(receipt.detail))
        self._observer.notify(kind, **keys)
        if receipt.outcome is Outcome.ADMITTED:
            log.debug("admitted: slot %d of policy %d, %d tokens", receipt.slot, receipt.version, receipt.tokens)
            return
        log.warning("%s: slot %d of policy %d, %s", receipt.outcome, receipt.slot, receipt.version, self._why(receipt))

    def _why(self, receipt: Receipt) -> str:
        """Return reason and detail, with meaning and advice for the first of its kind."""
        if receipt.reason is None:
            return ""
        found = f"{receipt.reason}: {printable(receipt.detail)}"
        if receipt.reason in self._explained:
            return found
        self._explained.add(receipt.reason)
        return f"{found} {receipt.reason.meaning} {receipt.reason.todo}"

    def _lose(self, pending: PendingDelivery, why: str) -> None:
        self.lost += 1
        log.warning("slot %d of policy %d is dropped: %s", pending.lease.slot, pending.lease.version, why)
        self._observer.notify(EventKind.LOST, policy=pending.lease.version, slot=pending.lease.slot, why=why)
        self._state.forget(pending)

    async def _wait_after(self, error: BadReply, failures: int) -> None:
        if failures == 1:
            log.warning("%s Retrying", error)
        await asyncio.sleep(self._backoff.delay(failures))
