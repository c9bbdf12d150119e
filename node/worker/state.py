"""The worker's persistent state, in one folder that one process uses at a time.

    run.json                   the run that the folder belongs to, and the digest of its rules
    instance                   the secret behind this instance's id (`node.worker.instance`)
    pending/<lease>.json       a slot that was generated and has no receipt yet
    pending/<lease>.rollouts   its submission, until the coordinator acknowledges it
    receipts.ndjson            every receipt in its signed envelope: the worker's proof of its credit
    status.json                the current status, for observers
    shardcast/                 the highest policy version seen, and the newest policies (`shardcast.client`)

A submission is on disk before its first byte leaves, and a receipt before its submission is forgotten, so
kill -9 at any instruction neither loses nor double-counts work. The counters are a fold over the receipts.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar

from node.errors import StateError
from node.protocol.admission import Outcome
from node.protocol.messages import MAX_RECEIPT_LINE_BYTES, KeptReceipt, Lease, Receipt
from shardcast.errors import LocalFault, Malformed
from shardcast.files import FolderLock, read_bounded, sync_folder, write_atomically
from shardcast.wire import Count, Digest, Wire, decode, encode

log = logging.getLogger(__name__)

MAX_RECORD_BYTES: Final = MAX_RECEIPT_LINE_BYTES

T = TypeVar("T")


class Binding(Wire, frozen=True):
    """The run that a state folder belongs to."""

    run_id: Digest
    spec_digest: Digest


class PendingDelivery(Wire, frozen=True):
    """A generated slot. `submission` is None until the coordinator has acknowledged it."""

    lease: Lease
    tokens: Count
    submission: Digest | None = None


@dataclass(slots=True)
class VerdictTally:
    """Verdicts on this worker's submissions; `tokens` counts those of admitted groups."""

    admitted: int = 0
    rejected: int = 0
    indeterminate: int = 0
    tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, receipt: Receipt) -> None:
        """Count one receipt."""
        if receipt.outcome is Outcome.ADMITTED:
            self.admitted += 1
            self.tokens += receipt.tokens
        elif receipt.outcome is Outcome.REJECTED:
            self.rejected += 1
            self.reasons[str(receipt.reason)] += 1
        else:
            self.indeterminate += 1


class WorkerState:
    """The state folder under an exclusive lock; use as a context manager. Raises StateError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tally = VerdictTally()
        self._pending = folder / "pending"
        self._receipts = folder / "receipts.ndjson"
        try:
            self._lock = FolderLock(folder)
            self._pending.mkdir(exist_ok=True)
        except LocalFault as error:
            raise StateError(f"{error}; give each worker its own --state.", code=error.code) from error
        except OSError as error:
            raise StateError(f"The state folder {folder} cannot be used: {error.strerror}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._lock.release()

    def bind(self, run_id: str, spec_digest: str) -> None:
        """Bind the folder to a run; raises StateError if it belongs to another run or other rules."""
        path = self.folder / "run.json"
        wanted = Binding(run_id=run_id, spec_digest=spec_digest)
        if not path.exists():
            write_atomically(path, encode(wanted))
            return
        bound = self._read(Binding, path)
        if bound.run_id != run_id:
            raise StateError(f"{self.folder} belongs to run {bound.run_id[:16]}…; give this run its own --state.")
        if bound.spec_digest != spec_digest:
            raise StateError(
                "The run's rules are not those that this worker joined under, and a run cannot change its rules: "
                "ask the operator. Only if you agree to the new rules, start with another --state.",
                code="spec_changed",
            )

    def recover(self) -> list[PendingDelivery]:
        """Load the receipts, and return the slots that have none yet."""
        for leftover in self._pending.glob("*.tmp"):
            leftover.unlink()
        waiting = {}
        for path in sorted(self._pending.glob("*.json")):
            pending = self._read(PendingDelivery, path)
            waiting[pending.lease.lease_id] = pending
        for body in self._pending.glob("*.rollouts"):
            if body.stem not in waiting:
                body.unlink()
        by_submission = {pending.submission: pending for pending in waiting.values() if pending.submission}
        for kept in self._read_receipts():
            self.tally.count(kept.receipt)
            settled = by_submission.get(kept.receipt.submission)
            if settled is not None:
                self.forget(waiting.pop(settled.lease.lease_id))
        return list(waiting.values())

    def keep(self, lease: Lease, body: bytes, *, tokens: int) -> PendingDelivery:
        """Persist a generated slot."""
        pending = PendingDelivery(lease=lease, tokens=tokens)
        write_atomically(self.body_of(pending), body)
        write_atomically(self._record(pending), encode(pending))
        return pending

    def body_of(self, pending: PendingDelivery) -> Path:
        """Return the path of a slot's submission, kept until it is acknowledged."""
        return self._pending / f"{pending.lease.lease_id}.rollouts"

    def acknowledge(self, pending: PendingDelivery, submission: str) -> PendingDelivery:
        """Record the submission's id and delete its body: only the receipt is pending."""
        acknowledged = PendingDelivery(lease=pending.lease, tokens=pending.tokens, submission=submission)
        write_atomically(self._record(pending), encode(acknowledged))
        self.body_of(pending).unlink(missing_ok=True)
        return acknowledged

    def settle(self, pending: PendingDelivery, receipt: Receipt, envelope: bytes) -> None:
        """Persist and count a slot's receipt, then forget the slot."""
        self._append(encode(KeptReceipt(receipt=receipt, envelope=envelope)) + b"\n")
        self.tally.count(receipt)
        self.forget(pending)

    def forget(self, pending: PendingDelivery) -> None:
        """Delete a slot's files."""
        self._record(pending).unlink(missing_ok=True)
        self.body_of(pending).unlink(missing_ok=True)
        sync_folder(self._pending)

    def _append(self, line: bytes) -> None:
        """Append a receipt; roll back on a full disk, because half a line would corrupt the next one."""
        file = self._receipts.open("ab")
        whole = file.tell()
        try:
            with file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.truncate(self._receipts, whole)
            raise

    def _record(self, pending: PendingDelivery) -> Path:
        return self._pending / f"{pending.lease.lease_id}.json"

    def _read_receipts(self) -> Iterable[KeptReceipt]:
        """Read every whole line; a torn last line is truncated, its slot is still pending."""
        if not self._receipts.exists():
            return
        whole = 0
        with self._receipts.open("r+b") as file:
            while (line := file.readline(MAX_RECORD_BYTES)).endswith(b"\n"):
                whole += len(line)
                yield self._decode(KeptReceipt, line[:-1], self._receipts)
            if line:
                file.truncate(whole)

    def _read(self, cls: type[T], path: Path) -> T:
        try:
            return self._decode(cls, read_bounded(path, max_bytes=MAX_RECORD_BYTES), path)
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror}.") from error

    def _decode(self, cls: type[T], data: bytes, path: Path) -> T:
        try:
            return decode(cls, data, max_bytes=MAX_RECORD_BYTES)
        except Malformed as error:
            raise StateError(
                f"{path} is damaged ({error}); move it away, what it records will be lost.", code="damaged_state"
            ) from error
