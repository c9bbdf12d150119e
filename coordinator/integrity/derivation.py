"""What the tables must say, as a fold over the log's entries: entries in, expected rows out, without IO.

`LogFold.follow` yields the rows that no later entry changes; `end` the ones that were still open, and what the whole
log adds up to. So memory is bounded by what is open (groups that no step has used, credit that may be voided), by the
number of nodes, policies and steps, and by the minutes with a verdict (`verdict_tallies`): not by the log.

Only named fields of an entry are read, so that entries may gain fields. Not derived: leases, open slots, stakes,
descriptors, relays, times of arrival and waiting, and the measurements behind a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import UnsetType

from coordinator.storage.schema import RECHECK_DUE, UNKNOWN_SIGNAL, SlotState, SubmissionState
from coordinator.storage.tallies import WIDTHS, VerdictKind
from node.protocol.admission import DRIFT, Outcome, has_signal
from node.protocol.evidence import Drift, follow
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, VerdictEntry, candidate_of
from node.protocol.pools import group_mean, has_pools
from node.protocol.run import PoolsSpec, RunSpec
from node.protocol.slots import SlotProblem, slot_problem
from node.protocol.standing import Account
from shardcast.wire import encode

Key: TypeAlias = tuple[Any, ...]
Columns: TypeAlias = dict[str, Any]

NEW_NODE: Columns = {"admitted": 0, "rejected": 0, "tokens": 0, "verified": 0, "strikes": 0, "drift": None}
"""What the log says of a node that it does not name."""


@dataclass(frozen=True, slots=True)
class DerivedRow:
    """Columns of one row that follow from the log; None: there is no such row. `slot` is a (version, number)."""

    table: str
    key: Key
    columns: Columns | None


@dataclass(slots=True)
class _Node:
    account: Account = field(default_factory=Account)
    drift: Drift | None = None
    admitted: int = 0
    rejected: int = 0
    tokens: int = 0
    open: dict[str, Columns] = field(default_factory=dict)
    """Submissions that were admitted by one row, until their credit vests or a second verdict is in the log."""

    def columns(self) -> Columns:
        standing = self.account.standing
        drift = None if self.drift is None else encode(self.drift)
        return {
            "admitted": self.admitted,
            "rejected": self.rejected,
            "tokens": self.tokens,
            "verified": standing.verified,
            "strikes": standing.strikes,
            "drift": drift,
        }


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An admitted group that no step has used."""

    slot: tuple[int, int]
    node: str
    reward_mean: float
    signal: bool


class LogFold:
    """Follows the log from its first entry to its last, then `end`."""

    def __init__(self, *, run_id: str, spec: RunSpec) -> None:
        self._run_id, self._spec = run_id, spec
        self._head = -1
        self._decided_at = 0
        self._nodes: dict[str, _Node] = {}
        self._waiting: dict[str, _Waiting] = {}
        self.first_verdicts = 0
        self.tables: dict[str, dict[Key, Columns]] = {
            name: {}
            for name in ("policies", "steps", "nodes", "rejections", "problem_means", "verdict_tallies", "deliveries")
        }
        """Whole tables, complete after `end`."""

    def follow(self, index: int, entry: LogEntry) -> Iterator[DerivedRow]:
        """Apply the log's next entry; yield the rows that are final with it."""
        match entry:
            case PolicyEntry():
                self._head = entry.version
                self.tables["policies"][entry.version,] = policy_columns(entry)
                if (step := self.tables["steps"].get((entry.version - 1,))) is not None:
                    step["finished_at"] = self._decided_at
            case BatchEntry():
                yield from self._use(entry)
            case VerdictEntry():
                self._tally(entry)
                self._decided_at = entry.decided_at
                yield from self._settle(index, entry) if entry.recheck else self._judge(index, entry)

    def end(self) -> Iterator[DerivedRow]:
        """Yield the rows that were still open, and complete `tables`."""
        for submission, waiting in self._waiting.items():
            yield from self._group(submission, waiting, step=None, state=SlotState.ADMITTED)
        for name, node in self._nodes.items():
            for submission, columns in node.open.items():
                yield DerivedRow("submissions", (submission,), columns)
            self.tables["nodes"][name,] = node.columns()

    def _judge(self, index: int, entry: VerdictEntry) -> Iterator[DerivedRow]:
        self.first_verdicts += 1
        node = self._nodes.setdefault(entry.node, _Node())
        columns = verdict_columns(index, entry) | {"recheck": None, "recheck_index": None, "void": False}
        self._drift(node, entry)
        if entry.outcome is Outcome.REJECTED:
            node.rejected += 1
            reason = "" if entry.reason is None else entry.reason.value
            counts = self.tables["rejections"].setdefault((entry.node, reason), {"rejected": 0})
            counts["rejected"] += 1
        if entry.outcome is Outcome.ADMITTED and entry.spot is not None:
            node.open[entry.submission] = columns
        else:
            yield DerivedRow("submissions", (entry.submission,), columns)
        if entry.outcome is Outcome.ADMITTED:
            yield from self._admit(node, entry)
        elif (drawn := self._drawn(entry)) is not None:
            yield DerivedRow("slots", (entry.version, entry.slot), drawn)
        yield from self._account(node, entry)

    def _admit(self, node: _Node, entry: VerdictEntry) -> Iterator[DerivedRow]:
        node.admitted += 1
        node.tokens += entry.tokens
        rewards = entry.rewards or ()
        self._note_mean(entry)
        slot = (entry.version, entry.slot)
        drawn = self._drawn(entry) or {}
        if self._spec.batch.only_signal and not has_signal(rewards):
            yield DerivedRow("slots", slot, drawn | {"state": SlotState.SET_ASIDE})
            return
        if drawn:
            yield DerivedRow("slots", slot, drawn)
        mean = sum(rewards) / max(1, len(rewards))
        self._waiting[entry.submission] = _Waiting(slot, entry.node, mean, has_signal(rewards))

    def _settle(self, index: int, entry: VerdictEntry) -> Iterator[DerivedRow]:
        """Apply a second verdict; what it does not confirm is no group any more, unless a step has used it."""
        node = self._nodes.setdefault(entry.node, _Node())
        columns = node.open.pop(entry.submission, {})
        final = {"state": SubmissionState.DONE, "recheck": entry.outcome, "recheck_index": index}
        yield DerivedRow("submissions", (entry.submission,), columns | final)
        if entry.outcome is not Outcome.ADMITTED:
            node.admitted -= 1
            node.tokens -= entry.tokens
            node.rejected += entry.outcome is Outcome.REJECTED
            if self._waiting.pop(entry.submission, None) is not None:
                yield DerivedRow("groups", (entry.submission,), None)
        yield from self._account(node, entry)

    def _account(self, node: _Node, entry: VerdictEntry) -> Iterator[DerivedRow]:
        """Follow standing and credit: a rejection voids what is pending, and what has vested is final."""
        owed = node.account.follow(entry, rules=self._spec.standing)
        for submission in owed & node.open.keys():
            node.open[submission] |= _due(node.open[submission]) | {"void": True}
        pending = node.account.unvested
        for submission in [name for name in node.open if name not in pending]:
            if node.open[submission]["recheck"] is None:
                yield DerivedRow("submissions", (submission,), node.open.pop(submission))

    def _use(self, entry: BatchEntry) -> Iterator[DerivedRow]:
        used = [(name, self._waiting.pop(name)) for name in entry.submissions if name in self._waiting]
        for submission, waiting in used:
            yield from self._group(submission, waiting, step=entry.step, state=SlotState.USED)
        for gap in entry.gaps:
            yield DerivedRow("slots", (gap.version, gap.slot), {"state": SlotState.STALE})
        of_groups = [waiting for _, waiting in used]
        self._count_deliveries(entry, of_groups)
        self.tables["steps"][entry.step,] = {
            "reward_mean": sum(one.reward_mean for one in of_groups) / max(1, len(of_groups)),
            "staleness_mean": sum(entry.step - one.slot[0] for one in of_groups) / max(1, len(of_groups)),
            "finished_at": None,
        }
        if entry.step + 1 == self._spec.training.steps:  # nothing vests any more
            for node in self._nodes.values():
                for submission in node.account.unvested & node.open.keys():
                    node.open[submission] |= _due(node.open[submission])

    def _group(self, submission: str, waiting: _Waiting, *, step: int | None, state: SlotState) -> Iterator[DerivedRow]:
        columns = {
            "slot": waiting.slot,
            "reward_mean": waiting.reward_mean,
            "signal": waiting.signal,
            "step": step,
        }
        yield DerivedRow("groups", (submission,), columns)
        yield DerivedRow("slots", waiting.slot, {"state": state})

    def _count_deliveries(self, entry: BatchEntry, used: Sequence[_Waiting]) -> None:
        signals = {one.slot: int(one.signal) for one in used}
        of_slots = [("delivered", one.slot, one.node) for one in used]
        of_slots += [("missed", (miss.version, miss.slot), miss.node) for miss in entry.missed]
        for column, (version, number), node in of_slots:
            if (policy := self.tables["policies"].get((version,))) is None:
                continue
            where = {"manifest_digest": policy["manifest_digest"], "slot": number}
            environment = slot_problem(self._spec, run_id=self._run_id, **where).environment
            key = (node, environment, signals.get((version, number), UNKNOWN_SIGNAL))
            counts = self.tables["deliveries"].setdefault(key, {"delivered": 0, "missed": 0})
            counts[column] += 1

    def _drift(self, node: _Node, entry: VerdictEntry) -> None:
        """Follow the node's drift through slots that were admitted but for it."""
        of_drift = entry.finding is not None and entry.finding.figure.endswith(DRIFT)
        if entry.totals is not None and (entry.outcome is Outcome.ADMITTED or of_drift):
            node.drift = follow(node.drift or Drift(), entry.totals, limits=self._spec.limits)

    def _drawn(self, entry: VerdictEntry) -> Columns | None:
        """Return the columns of a slot that say what it is about; None where none are kept."""
        with_pools = isinstance(self._spec.batch.pools, PoolsSpec)
        if not with_pools and not self._spec.has_packages:
            return None
        problem = self._problem(entry)
        if not with_pools:
            return {"environment": problem.environment}
        finite = has_pools(self._spec, problem.environment)
        candidate = None if isinstance(entry.candidate, UnsetType) else entry.candidate
        drawn = {"candidate": candidate, "environment": problem.environment}
        return drawn | {"problem": problem.problem if finite else None}

    def _note_mean(self, entry: VerdictEntry) -> None:
        if not isinstance(self._spec.batch.pools, PoolsSpec) or not entry.rewards:
            return
        problem = self._problem(entry)
        if not has_pools(self._spec, problem.environment):
            return
        mean, means = group_mean(entry.rewards), self.tables["problem_means"]
        known = means.get((problem.environment, problem.problem), {"mean": None, "head": -1, "before": None})
        before = known["mean"] if known["head"] < self._head else known["before"]
        means[problem.environment, problem.problem] = {"mean": mean, "head": self._head, "before": before}

    def _problem(self, entry: VerdictEntry) -> SlotProblem:
        return slot_problem(
            self._spec,
            run_id=self._run_id,
            manifest_digest=entry.manifest_digest,
            slot=entry.slot,
            candidate=candidate_of(entry),
        )

    def _tally(self, entry: VerdictEntry) -> None:
        kind = VerdictKind.FULL if entry.spot is None else VerdictKind.SPOT
        kind = VerdictKind.SECOND if entry.recheck else kind
        reason = "" if entry.reason is None else entry.reason.value
        for width in WIDTHS:
            start = entry.decided_at // width * width if width else 0
            key = (width, start, kind.value, entry.outcome.value, reason)
            tally = self.tables["verdict_tallies"].setdefault(key, {"verdicts": 0, "tokens": 0})
            tally["verdicts"] += 1
            tally["tokens"] += entry.tokens


def policy_columns(entry: PolicyEntry) -> Columns:
    """Return what a policy's row must say; `manifest` stands for the envelope whose payload has that digest."""
    return {
        "manifest_digest": entry.manifest_digest,
        "result_digest": entry.result_digest,
        "manifest": entry.manifest_digest,
    }


def verdict_columns(index: int, entry: VerdictEntry) -> Columns:
    """Return what a first verdict's own entry says of its submission's row, whatever comes later."""
    return {
        "slot": (entry.version, entry.slot),
        "node": entry.node,
        "request": entry.request,
        "body": entry.body,
        "state": SubmissionState.DONE,
        "outcome": entry.outcome,
        "reason": entry.reason,
        "detail": entry.detail,
        "figure": None if entry.finding is None else entry.finding.figure,
        "tokens": entry.tokens,
        "log_index": index,
        "decided_at": entry.decided_at,
        "spot": entry.spot,
    }


def _due(columns: Columns) -> Columns:
    """Return the changes by which a submission waits for its second verdict, if it does not already."""
    return {"recheck": RECHECK_DUE, "state": SubmissionState.QUEUED} if columns["recheck"] is None else {}
