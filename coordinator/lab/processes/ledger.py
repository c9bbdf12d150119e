"""What the run's public log says about each node, kept up to date entry by entry."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.lab.processes.local_http import get
from node.protocol.admission import Figures, Outcome, worst
from node.protocol.messages import MAX_ENTRY_BYTES, BatchEntry, LogEntry, VerdictEntry
from shardcast.wire import decode

RATE_SECONDS = 20.0
_TIMEOUT_SECONDS = 5.0


@dataclass(slots=True)
class NodeRecord:
    """One node's verdicts so far. `tokens` are those of admitted rollouts, `rate` of them per second lately."""

    submitted: int = 0
    admitted: int = 0
    indeterminate: int = 0
    tokens: int = 0
    version: int | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    worst: Figures | None = None
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def rejected(self) -> int:
        """Submissions that failed a check."""
        return self.reasons.total()

    @property
    def main_reason(self) -> str | None:
        """The most frequent reason of a rejection."""
        return self.reasons.most_common(1)[0][0] if self.reasons else None

    def add(self, entry: VerdictEntry, *, now: float) -> None:
        """Count a verdict that was seen at `now` (monotonic seconds)."""
        if entry.recheck:
            self._add_second(entry)
            return
        self.submitted += 1
        self.version = max(entry.version, -1 if self.version is None else self.version)
        if entry.outcome is Outcome.ADMITTED:
            self.admitted += 1
            self.tokens += entry.tokens
            self._recent.append((now, entry.tokens))
            self._forget(now)
            if entry.figures is not None:
                self.worst = entry.figures if self.worst is None else worst((self.worst, entry.figures))
        elif entry.outcome is Outcome.REJECTED:
            self.reasons[str(entry.reason)] += 1
        else:
            self.indeterminate += 1

    def _add_second(self, entry: VerdictEntry) -> None:
        """Count a second verdict on a group that was admitted by one row of it."""
        if entry.outcome is Outcome.ADMITTED:
            return
        self.admitted -= 1
        self.tokens -= entry.tokens
        if entry.outcome is Outcome.REJECTED:
            self.reasons[str(entry.reason)] += 1
        else:
            self.indeterminate += 1

    def take(self, other: NodeRecord) -> None:
        """Count another record into this one."""
        self.submitted += other.submitted
        self.admitted += other.admitted
        self.indeterminate += other.indeterminate
        self.tokens += other.tokens
        self.version = max((v for v in (self.version, other.version) if v is not None), default=None)
        self.reasons += other.reasons
        known = [figures for figures in (self.worst, other.worst) if figures is not None]
        self.worst = worst(known) if known else None
        self._recent = deque(sorted((*self._recent, *other._recent)))

    def rate(self, *, now: float) -> float:
        """Return admitted tokens per second over the last RATE_SECONDS."""
        self._forget(now)
        return sum(tokens for _, tokens in self._recent) / RATE_SECONDS

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()


@dataclass(slots=True)
class Ledger:
    """A reader of the log that remembers how far it has read.

    `verdicts` has the last verdict on each submission, `used` the submissions that a training step took, and `gaps` the
    slots that no step trains on, as version/number.
    """

    coordinator_url: str
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    verdicts: dict[str, VerdictEntry] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    gaps: set[str] = field(default_factory=set)
    read: int = 0

    def catch_up(self, size: int) -> None:
        """Read on to entry `size`; raises OSError and HTTPException while the coordinator is away."""
        while self.read < size:
            body = get(f"{self.coordinator_url}/v1/log/entries?start={self.read}&end={size}", seconds=_TIMEOUT_SECONDS)
            lines = body.splitlines() if body else []
            if not lines:
                return
            self.add(lines, now=time.monotonic())

    def add(self, leaves: Iterable[bytes], *, now: float) -> None:
        """Count the log's next leaves."""
        for leaf in leaves:
            entry: LogEntry = decode(LogEntry, leaf, max_bytes=MAX_ENTRY_BYTES)  # type: ignore[arg-type]
            if isinstance(entry, VerdictEntry):
                self.nodes.setdefault(entry.node, NodeRecord()).add(entry, now=now)
                self.verdicts[entry.submission] = entry
            elif isinstance(entry, BatchEntry):
                self.used.update(entry.submissions)
                self.gaps.update(f"{gap.version}/{gap.slot}" for gap in entry.gaps)
            self.read += 1

    def record(self, *nodes: str) -> NodeRecord:
        """Sum the records of `nodes`; empty before their first verdict."""
        together = NodeRecord()
        for node in nodes:
            if node in self.nodes:
                together.take(self.nodes[node])
        return together
