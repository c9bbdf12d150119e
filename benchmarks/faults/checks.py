"""Invariants after any faults: nothing admitted is lost, nothing counts twice, and the log is consistent.

Pure: what was seen goes in, what is wrong with it comes out, in sentences. Only what an outsider sees is looked at:
the log, receipts, what the coordinator acknowledged, and its status page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from node.audit.leaves import LeafTree
from node.audit.log import read_log
from node.protocol.admission import Outcome
from node.protocol.checkpoints import Checkpoint
from node.protocol.merkle import leaf_hash
from node.protocol.messages import BatchEntry, LogEntry, Receipt, VerdictEntry
from node.protocol.run import RunSpec

_ENTRY: Any = LogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Observations of a run, up to a moment at rest at which no submission waited for a verdict.

    `leaves` is the log as it was read at the end, `witnessed` as it was read while it grew, with the `checkpoints` of
    that time. `receipts` are those that workers keep, `acknowledged` gives the lease of every submission that was
    answered with 202, and `waiting` is how many admitted groups wait for a training step.
    """

    leaves: Sequence[bytes]
    witnessed: Sequence[bytes]
    checkpoints: Sequence[Checkpoint]
    receipts: Sequence[Receipt]
    acknowledged: Mapping[str, str]
    waiting: int


@dataclass(slots=True)
class Violations:
    """Violations, one sentence each."""

    admitted_lost: list[str] = field(default_factory=list)
    admitted_twice: list[str] = field(default_factory=list)
    log_inconsistencies: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[str]:
        return [*self.admitted_lost, *self.admitted_twice, *self.log_inconsistencies]


def judge(evidence: Evidence, *, run_id: str, spec: RunSpec) -> Violations:
    """Return every violation that the evidence shows."""
    found = Violations()
    entries = [msgspec.json.decode(leaf, type=_ENTRY) for leaf in evidence.leaves]
    reading = _Reading(entries)
    _check_history(evidence, found)
    _check_receipts(evidence, found)
    _check_acknowledged(evidence, reading, found)
    _check_use(evidence, reading, found, max_async=spec.batch.max_async)
    found.admitted_twice += reading.twice
    for problem in read_log(entries, run_id=run_id, spec=spec).problems:
        found.log_inconsistencies.append(f"entry {problem.log_index}: {problem.code}: {problem.detail}")
    return found


class _Reading:
    """The log, entry by entry: what is admitted, what of it was used, and what happened more than once."""

    def __init__(self, entries: Iterable[LogEntry]) -> None:
        self.judged: set[str] = set()
        self.admitted: dict[str, VerdictEntry] = {}
        self.used: set[str] = set()
        self.next_step = 0
        self.twice: list[str] = []
        self._taken: set[tuple[int, int]] = set()
        for entry in entries:
            if isinstance(entry, VerdictEntry):
                self._take_verdict(entry)
            elif isinstance(entry, BatchEntry):
                self._take_batch(entry)

    def _take_verdict(self, entry: VerdictEntry) -> None:
        if entry.recheck:
            if entry.outcome is not Outcome.ADMITTED and entry.submission not in self.used:
                self.admitted.pop(entry.submission, None)
                self._taken.discard((entry.version, entry.slot))
            return
        if entry.submission in self.judged:
            self.twice.append(f"submission {entry.submission[:16]} was judged twice")
        self.judged.add(entry.submission)
        if entry.outcome is not Outcome.ADMITTED:
            return
        if (entry.version, entry.slot) in self._taken:
            self.twice.append(f"slot {entry.version}/{entry.slot} was admitted twice")
        self._taken.add((entry.version, entry.slot))
        self.admitted[entry.submission] = entry

    def _take_batch(self, entry: BatchEntry) -> None:
        if entry.step != self.next_step:
            self.twice.append(f"the batch of step {entry.step} came where that of {self.next_step} was to come")
        self.next_step = entry.step + 1
        for submission, times in Counter(entry.submissions).items():
            if times > 1 or submission in self.used:
                self.twice.append(f"submission {submission[:16]} was trained on twice, in step {entry.step} again")
        self.used.update(entry.submissions)


def _check_history(evidence: Evidence, found: Violations) -> None:
    """Check that the log begins with all that was seen of it, and had every root that was signed."""
    for index, (before, after) in enumerate(zip(evidence.witnessed, evidence.leaves, strict=False)):
        if before != after:
            found.log_inconsistencies.append(f"entry {index} was rewritten")
    if len(evidence.witnessed) > len(evidence.leaves):
        found.log_inconsistencies.append(
            f"{len(evidence.witnessed)} entries were seen, {len(evidence.leaves)} are left"
        )
    roots, tree = {0: LeafTree().root()}, LeafTree()
    for leaf in evidence.leaves:
        tree.append(leaf)
        roots[tree.size] = tree.root()
    for checkpoint in evidence.checkpoints:
        if roots.get(checkpoint.size) != checkpoint.root:
            found.log_inconsistencies.append(f"the log is not that of the checkpoint of {checkpoint.size} entries")


def _check_receipts(evidence: Evidence, found: Violations) -> None:
    """Check that every receipt's entry is where it says."""
    for receipt in evidence.receipts:
        held = evidence.leaves[receipt.log_index] if receipt.log_index < len(evidence.leaves) else None
        if held is not None and leaf_hash(held).hex() == receipt.leaf_hash:
            continue
        said = f"the receipt of {receipt.submission[:16]} ({receipt.outcome}) names entry {receipt.log_index}"
        broken = found.admitted_lost if receipt.outcome is Outcome.ADMITTED else found.log_inconsistencies
        broken.append(f"{said}, which is another")


def _check_acknowledged(evidence: Evidence, reading: _Reading, found: Violations) -> None:
    """Check that what was acknowledged is judged, and that one lease brings one admission."""
    for submission in evidence.acknowledged.keys() - reading.judged:
        found.admitted_lost.append(f"submission {submission[:16]} was acknowledged, and nobody knows it any more")
    of_lease = Counter(evidence.acknowledged[one] for one in reading.admitted if one in evidence.acknowledged)
    for lease, times in of_lease.items():
        if times > 1:
            found.admitted_twice.append(f"{times} submissions under lease {lease[:16]} were admitted")


def _check_use(evidence: Evidence, reading: _Reading, found: Violations, *, max_async: int) -> None:
    """Check that each admitted group is in a batch, or that a coming step can still take it."""
    unused = [entry for submission, entry in reading.admitted.items() if submission not in reading.used]
    for entry in unused:
        if entry.version < reading.next_step - max_async:
            found.admitted_lost.append(f"slot {entry.version}/{entry.slot} is admitted, and too old for any step")
    if len(unused) > evidence.waiting:
        found.admitted_lost.append(f"{len(unused)} admitted groups are unused, only {evidence.waiting} of them wait")
    if len(unused) < evidence.waiting:
        found.admitted_twice.append(f"{evidence.waiting} admitted groups wait, of which {len(unused)} are unused")
