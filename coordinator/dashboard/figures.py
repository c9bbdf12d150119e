"""The figures of the run's page, read in one transaction by queries whose cost is independent of the run's length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from coordinator.dashboard.history import History, Step
from coordinator.dashboard.relay_tree import RelayView, relay_view
from coordinator.dashboard.withheld import WithholdingRow, read_rows
from coordinator.metrics.reward import RewardFigure, reward_figure
from coordinator.run.relays import RelayRegistry
from coordinator.run.status import package_rows
from coordinator.storage import log, nodes, tallies
from coordinator.storage.database import Connection
from coordinator.storage.listings import nodes_at_work
from coordinator.storage.progress import progress
from coordinator.storage.schema import SlotState
from coordinator.storage.steps import PublishedPolicy, finished_steps
from coordinator.storage.submissions import queue_length
from coordinator.storage.tallies import DAY, HOUR, MINUTE, Tally, VerdictKind
from coordinator.storage.totals import first_verdict_at, slot_counts
from node.protocol.admission import Outcome
from node.protocol.messages import MAX_ENTRY_BYTES, LogEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import RunSpec
from shardcast.errors import Malformed
from shardcast.wire import decode

RECENT_SECONDS: Final = 600
AT_WORK_SECONDS: Final = 120.0
"""A worker that holds a lease, or has submitted within it, counts as at work."""

LATEST: Final = 12
_LOG_TAIL: Final = 40
_MOST_BUCKETS: Final = {MINUTE: 180, HOUR: 192, DAY: 400}


@dataclass(frozen=True, slots=True)
class Recent:
    """First verdicts and tokens per minute, and seconds from arrival to verdict, over the last RECENT_SECONDS."""

    slots_per_minute: float
    tokens_per_minute: float
    mean_wait: float | None
    longest_wait: float | None


@dataclass(frozen=True, slots=True)
class Queue:
    """Number of submissions without a verdict, age of the oldest, and number of second verdicts due."""

    depth: int
    oldest_seconds: float
    rechecks: int


@dataclass(frozen=True, slots=True)
class Workers:
    """Number of registered nodes, in all and banned, and the ids of those at work."""

    registered: int
    at_work: frozenset[str]
    banned: int


@dataclass(frozen=True, slots=True)
class LatestVerdict:
    """A recent verdict in the log; `reward` is the group's mean."""

    index: int
    submission: str
    node: str
    version: int
    slot: int
    outcome: Outcome
    reason: Reason | None
    tokens: int
    reward: float | None
    decided_at: int
    second: bool


@dataclass(frozen=True, slots=True)
class RunPage:
    """The content of the run's page without its table of workers."""

    now: float
    head: int
    next_step: int
    total_steps: int
    finished_steps: int
    ready_groups: int
    environments: Sequence[str]
    steps: Sequence[Step]
    policies: Sequence[PublishedPolicy]
    admitted: int
    rejected: int
    undecided: int
    taken_back: int
    tokens: int
    reasons: Sequence[tuple[Reason, int]]
    width: int
    buckets: Sequence[Tally]
    recent: Recent
    queue: Queue
    workers: Workers
    relays: RelayView
    slots: dict[str, int]
    log_size: int
    latest: Sequence[LatestVerdict]
    withheld: Sequence[WithholdingRow]
    packages: Sequence[Mapping[str, Any]]

    @property
    def is_over(self) -> bool:
        return self.finished_steps >= self.total_steps

    @property
    def reward(self) -> RewardFigure | None:
        return reward_figure([step.reward for step in self.steps])

    @property
    def gaps(self) -> int:
        """Slots that nobody delivered in time."""
        return self.slots[SlotState.STALE]


def read_figures(
    connection: Connection, registry: RelayRegistry, history: History, *, spec: RunSpec, now: float
) -> RunPage:
    """Read the run's figures at `now` (Unix seconds)."""
    at = progress(connection)
    whole = tallies.whole_run(connection)
    first = [tally for tally in whole if tally.kind is not VerdictKind.SECOND]
    slots = slot_counts(connection)
    width, buckets = _over_time(connection, now=now)
    log_size = log.size(connection)
    return RunPage(
        now=now,
        head=at.head,
        next_step=at.next_step,
        total_steps=spec.training.steps,
        finished_steps=finished_steps(connection),
        ready_groups=slots["admitted"],
        environments=[one.name for one in spec.environments],
        steps=history.steps(connection),
        policies=history.policies(connection),
        admitted=_count(first, Outcome.ADMITTED),
        rejected=_count(first, Outcome.REJECTED),
        undecided=_count(first, Outcome.INDETERMINATE),
        taken_back=sum(t.verdicts for t in whole if t.kind is VerdictKind.SECOND and t.outcome is not Outcome.ADMITTED),
        tokens=tallies.admitted_tokens(whole),
        reasons=reasons_of(first),
        width=width,
        buckets=buckets,
        recent=_recent(tallies.since(connection, width=MINUTE, start=int(now) - RECENT_SECONDS - MINUTE), now=now),
        queue=_queue(connection, now=now),
        workers=_workers(connection, spec=spec, now=now),
        relays=relay_view(connection, registry, head=at.head, now=now),
        slots=slots,
        log_size=log_size,
        latest=_latest(connection, log_size),
        withheld=read_rows(connection, spec=spec),
        packages=package_rows(connection, spec),
    )


def reasons_of(counted: Sequence[Tally]) -> list[tuple[Reason, int]]:
    """Count rejections by reason, the most frequent first."""
    found = Counter[Reason]()
    for tally in counted:
        if tally.outcome is Outcome.REJECTED and tally.reason is not None:
            found[tally.reason] += tally.verdicts
    return found.most_common()


def _count(counted: Sequence[Tally], outcome: Outcome) -> int:
    return sum(tally.verdicts for tally in counted if tally.outcome is outcome)


def _over_time(connection: Connection, *, now: float) -> tuple[int, list[Tally]]:
    """Read first verdicts in buckets of the finest width in which the whole run fits on the page."""
    start = first_verdict_at(connection)
    age = 0.0 if start is None else now - start
    width = next((width for width in (MINUTE, HOUR) if age <= width * (_MOST_BUCKETS[width] - 1)), DAY)
    since = int(now) // width * width - width * (_MOST_BUCKETS[width] - 1)
    found = tallies.since(connection, width=width, start=since)
    return width, [tally for tally in found if tally.kind is not VerdictKind.SECOND]


def _recent(counted: Sequence[Tally], *, now: float) -> Recent:
    first = [tally for tally in counted if tally.kind is not VerdictKind.SECOND]
    if not first:
        return Recent(0.0, 0.0, None, None)
    begun = min(tally.start for tally in first)
    minutes = max(1.0, (now - begun) / MINUTE)
    slots = sum(tally.verdicts for tally in first)
    return Recent(
        slots_per_minute=slots / minutes,
        tokens_per_minute=sum(tally.tokens for tally in first) / minutes,
        mean_wait=sum(tally.wait_seconds for tally in first) / slots,
        longest_wait=max(tally.longest_wait for tally in first),
    )


def _queue(connection: Connection, *, now: float) -> Queue:
    waiting = queue_length(connection)
    age = 0.0 if waiting.oldest_at is None else max(0.0, now - waiting.oldest_at)
    return Queue(depth=waiting.first, oldest_seconds=age, rechecks=waiting.second)


def _workers(connection: Connection, *, spec: RunSpec, now: float) -> Workers:
    return Workers(
        registered=nodes.count_registered(connection),
        at_work=frozenset(nodes_at_work(connection, since=now - AT_WORK_SECONDS, now=now)),
        banned=nodes.count_banned(connection, ban_after=spec.standing.ban_after),
    )


def _latest(connection: Connection, size: int) -> list[LatestVerdict]:
    """Read the newest verdicts among the last entries of the log."""
    found = []
    for index, leaf in enumerate(log.leaves(connection, max(0, size - _LOG_TAIL), size), max(0, size - _LOG_TAIL)):
        if not leaf.startswith(b'{"type":"verdict"'):
            continue  # batch entries may be long
        entry = read_entry(leaf)
        if isinstance(entry, VerdictEntry):
            found.append(_latest_of(index, entry))
    return found[-LATEST:][::-1]


def read_entry(leaf: bytes) -> LogEntry | None:
    """Decode a log entry; return None for a type of another release."""
    try:
        entry: LogEntry = decode(LogEntry, leaf, max_bytes=MAX_ENTRY_BYTES)  # type: ignore[arg-type]
    except (Malformed, msgspec.ValidationError):
        return None
    return entry


def _latest_of(index: int, entry: VerdictEntry) -> LatestVerdict:
    return LatestVerdict(
        index=index,
        submission=entry.submission,
        node=entry.node,
        version=entry.version,
        slot=entry.slot,
        outcome=entry.outcome,
        reason=entry.reason,
        tokens=entry.tokens,
        reward=sum(entry.rewards) / len(entry.rewards) if entry.rewards else None,
        decided_at=entry.decided_at,
        second=entry.recheck,
    )
