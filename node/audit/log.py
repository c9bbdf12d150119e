"""Checks of the log alone, without any policy (docs/protocol.md, section 8).

Pure: entries in, problems out. An honest coordinator's log has none.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from node.audit.batches import BatchChecker, LoggedGroup, Submission
from node.audit.contradictions import SAME, contradiction, is_possible, same_finding
from node.audit.gaps import GapChecker, Withholding
from node.audit.leaves import LOG_TOO_LARGE
from node.audit.pools import PoolChecker
from node.audit.problems import MAX_DETAIL_CHARACTERS, MAX_PROBLEMS, AuditProblem
from node.errors import BadReply
from node.protocol.admission import DRIFT, Outcome, has_signal, judge_drift
from node.protocol.evidence import Drift, follow
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, RunEntry, VerdictEntry
from node.protocol.run import RunSpec
from node.protocol.standing import Account, Draws
from shardcast.errors import Malformed

FALSE_ALARMS: Final = 1e-9
"""False positive rate of `too_little_measured`."""

MAX_NODES: Final = 500_000
"""Nodes with a verdict or a missed slot that are followed, each counted once; a few KiB each."""


@dataclass(frozen=True, slots=True)
class LoggedVerdict:
    """A verdict and where the log has it."""

    log_index: int
    entry: VerdictEntry


@dataclass(slots=True)
class LogIndex:
    """Counts of a log's entries, its policies with their places, and the places of verdicts: 16 bytes for each.

    `latest` is, by entry, the latest time of a verdict up to it: an operator may date one back.
    """

    policies: list[tuple[int, PolicyEntry]] = field(default_factory=list)
    batches: int = 0
    newest_step: int = -1
    verdicts: dict[Outcome, array[int]] = field(default_factory=lambda: {one: array("Q") for one in Outcome})
    latest: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, entry: LogEntry | Malformed) -> None:
        """Add the next entry."""
        time = self.latest[-1] if self.latest else 0
        index = len(self.latest)
        match entry:
            case PolicyEntry():
                self.policies.append((index, entry))
            case VerdictEntry():
                self.verdicts[entry.outcome].append(index)
                time = max(time, entry.decided_at)
            case BatchEntry():
                self.batches += 1
                self.newest_step = max(self.newest_step, entry.step)
        self.latest.append(time)


@dataclass(slots=True)
class LogReading:
    """What follows from the log: every violation of section 8.1, each node's account, and what training should not
    have used: (log index of the second verdict, or of what asks for it if there is none yet, submission, step).

    `fault` is set where the log was not read to its end because it has more nodes than can be followed.
    """

    problems: list[AuditProblem] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    reached_training: list[tuple[int, str, int]] = field(default_factory=list)
    withholding: Withholding = field(default_factory=Withholding)
    index: LogIndex = field(default_factory=LogIndex)
    fault: BadReply | None = None


def read_log(entries: Iterable[LogEntry | Malformed], *, run_id: str, spec: RunSpec) -> LogReading:
    """Follow the log from its first entry to its last, or to where it has MAX_PROBLEMS or more than MAX_NODES nodes.

    No entry is kept but those of policies. Too many nodes are the reading's `fault` (`log_too_large`).
    """
    checker = _Checker(run_id=run_id, spec=spec)
    for index, entry in enumerate(entries):
        checker.check(index, entry)
        if checker.is_full or checker.reading.fault is not None:
            break
    return checker.end()


def choose_verdicts(
    admitted: Sequence[int], rejected: Sequence[int], *, count: int | None, rng: random.Random
) -> list[int]:
    """Draw `count` of these places of verdicts (None: all), half of them rejections if there are enough of either kind.

    Indeterminate ones claim nothing and are not drawn.
    """
    if count is not None:
        of_rejected = min(len(rejected), max(count // 2, count - len(admitted)))
        rejected = rng.sample(rejected, of_rejected)
        admitted = rng.sample(admitted, min(len(admitted), count - of_rejected))
    return [*admitted, *rejected]


class _Checker:
    """Walks the log once, in order."""

    def __init__(self, *, run_id: str, spec: RunSpec) -> None:
        self.reading = LogReading()
        self._run_id = run_id
        self._spec = spec
        self._manifests: dict[int, str] = {}
        self._newest = -1
        self._drifts: dict[str, Drift] = {}
        self._spots: dict[Submission, bytes] = {}  # by what a second verdict has to agree in
        self._owed: dict[Submission, int] = {}  # to be measured in full before the next step
        self._late: dict[Submission, int] = {}  # to be measured in full, which no step waits for
        self._since_ban: Counter[str] = Counter()
        self._nodes: set[str] = set()
        self._pools = PoolChecker(run_id=run_id, spec=spec)
        self._batches = BatchChecker(spec.batch)
        self._gaps = GapChecker(run_id=run_id, spec=spec)

    @property
    def is_full(self) -> bool:
        """Whether there are as many problems as are kept."""
        return len(self.reading.problems) >= MAX_PROBLEMS

    def check(self, index: int, entry: LogEntry | Malformed) -> None:
        self.reading.index.add(entry)
        if index == 0 and not isinstance(entry, RunEntry):
            self._note(index, "wrong_rules", "The first entry does not name the rules.")
        match entry:
            case RunEntry():
                self._check_rules(index, entry)
            case PolicyEntry():
                self._check_policy(index, entry)
            case VerdictEntry():
                self._check_verdict(index, entry)
            case BatchEntry():
                self._check_batch(index, entry)
            case Malformed():
                self._note(index, "malformed_entry", f"{entry}.")
        if len(self._nodes) > MAX_NODES:
            detail = f"The log has more than {MAX_NODES} nodes, which is too many here."
            self.reading.fault = BadReply(detail, code=LOG_TOO_LARGE)

    def _note(self, index: int | None, code: str, detail: str) -> None:
        if not self.is_full:
            self.reading.problems.append(AuditProblem(code, detail[:MAX_DETAIL_CHARACTERS], index))

    def _check_rules(self, index: int, entry: RunEntry) -> None:
        if index != 0:
            self._note(index, "wrong_rules", "The rules are named a second time.")
        elif entry.run_id != self._run_id or entry.spec_digest != self._spec.digest:
            self._note(index, "wrong_rules", "The log's rules are not those of the descriptor.")

    def _check_policy(self, index: int, entry: PolicyEntry) -> None:
        if entry.version <= self._newest:
            self._note(index, "policy_order", f"Policy {entry.version} after policy {self._newest}.")
            return
        if entry.version > self._batches.step + 1:
            step = entry.version - 1
            detail = f"Policy {entry.version} was published before what step {step} trained on was logged."
            self._note(index, "unlogged_step", detail)
        self._newest = entry.version
        self._manifests[entry.version] = entry.manifest_digest

    def _check_verdict(self, index: int, entry: VerdictEntry) -> None:
        if self._manifests.get(entry.version) != entry.manifest_digest:
            self._note(index, "unknown_policy", f"No such policy {entry.version} was published before.")
        self._nodes.add(entry.node)
        name = bytes.fromhex(entry.submission)
        is_first = self._batches.judge(name)
        if entry.recheck:
            self._check_recheck(index, entry, name)
        elif not is_first:
            self._note(index, "duplicate_verdict", f"Submission {entry.submission[:16]}… was judged before.")
        self._follow(index, entry, name)
        drifted = self._drift_contradiction(entry)
        found = contradiction(entry, spec=self._spec) or drifted
        if found is not None:
            self._note(index, "contradictory_verdict", found)
        elsewhere = self._pools.contradiction(entry)
        if elsewhere is not None:
            self._note(index, "wrong_pool", elsewhere)
        if entry.outcome is Outcome.ADMITTED and is_first and not entry.recheck:
            self._admit(index, entry, name)

    def _admit(self, index: int, entry: VerdictEntry, name: Submission) -> None:
        self._pools.follow(entry, head=self._newest)
        problem = self._gaps.admit(entry)
        if problem is not None:
            self._note(index, *problem)
            return
        group = LoggedGroup(entry.version, entry.slot, entry.node, has_signal(entry.rewards or ()))
        self._batches.admit(name, group)

    def _check_recheck(self, index: int, entry: VerdictEntry, name: Submission) -> None:
        """Check that a recheck follows a spot verdict; a rejection revokes the admission."""
        if self._spots.pop(name, None) != _work_of(entry):
            self._note(index, "unfounded_recheck", f"Submission {entry.submission[:16]}… was not admitted in part.")
            return
        self._owed.pop(name, None)
        self._late.pop(name, None)
        if entry.outcome is Outcome.ADMITTED:
            return
        step = self._batches.step_of(name)
        if step is not None:
            self.reading.reached_training.append((index, entry.submission, step))
        else:
            self._gaps.revoke(entry, is_open=self._batches.revoke(name))

    def _follow(self, index: int, entry: VerdictEntry, name: Submission) -> None:
        """Follow the node's standing: whether it allowed what was not measured, and what has to be measured now."""
        rules = self._spec.standing
        account = self.reading.accounts.setdefault(entry.node, Account())
        if entry.spot is not None and account.standing.full_rate(rules) >= 1.0:
            self._note(index, "spot_without_standing", "One row was measured where the node's standing needs all.")
        if entry.spot is not None and entry.outcome is Outcome.ADMITTED:
            self._spots[name] = _work_of(entry)
        self._check_ban(index, entry, account)
        for owed in map(bytes.fromhex, sorted(account.follow(entry, rules=rules))):
            if owed in self._spots:
                (self._owed if self._batches.is_waiting(owed) else self._late)[owed] = index

    def _check_ban(self, index: int, entry: VerdictEntry, account: Account) -> None:
        """Check that a banned node got no further leases; what it held may still be judged."""
        if not account.standing.is_banned(self._spec.standing):
            self._since_ban[entry.node] = 0
            return
        self._since_ban[entry.node] += not entry.recheck
        if self._since_ban[entry.node] == self._spec.batch.max_leases_per_node + 1:
            self._note(index, "banned_node_served", f"Node {entry.node[:16]}… was banned, and went on to get work.")

    def end(self) -> LogReading:
        """Finish the checks that need the whole log, and return the result."""
        if not self.reading.index.latest:
            self._note(None, "wrong_rules", "The log is empty; its first entry must name the rules.")
        if self.is_full:
            detail = f"There are {MAX_PROBLEMS} problems already; the rest of the log was not read."
            self.reading.problems.append(AuditProblem("too_many_problems", detail))
        else:
            self._check_shares()
        self.reading.withholding = self._gaps.withholding
        late = ((at, name, self._batches.step_of(name)) for name, at in self._late.items())
        self.reading.reached_training += [(at, name.hex(), step) for at, name, step in late if step is not None]
        return self.reading

    def _check_shares(self) -> None:
        """Whether as many slots were measured in full as the nodes' standings ask for, but for chance: of each node,
        so that no friend is spared among many others, and of all together."""
        accounts = self.reading.accounts
        rare = FALSE_ALARMS / max(1, len(accounts))
        few = {f"node {name[:16]}…": one.drawn for name, one in accounts.items()}
        few = {whose: drawn for whose, drawn in few.items() if not drawn.are_chance(false_alarms=rare)}
        together = sum((one.drawn for one in accounts.values()), Draws())
        if not few and not together.are_chance(false_alarms=FALSE_ALARMS):
            few = {"all nodes": together}
        for whose, drawn in few.items():
            detail = f"{drawn.full} slots of {whose} were measured in full, {drawn.expected:.0f} are to be expected."
            self._note(None, "too_little_measured", detail)

    def _drift_contradiction(self, entry: VerdictEntry) -> str | None:
        """Describe how the verdict contradicts the node's drift so far; None if it does not."""
        claimed = entry.finding if entry.finding is not None and entry.finding.figure.endswith(DRIFT) else None
        if entry.totals is None:
            return None
        limits = self._spec.limits
        if not is_possible(entry.totals, limits=limits):
            return "Its totals are more than its values can sum up to."
        if entry.recheck or (entry.outcome is not Outcome.ADMITTED and claimed is None):
            return None
        drift = self._drifts[entry.node] = follow(self._drifts.get(entry.node, Drift()), entry.totals, limits=limits)
        found = judge_drift(drift, limits=limits)
        if claimed is not None and (found is None or not same_finding(found, claimed)):
            return f"Its {claimed.figure} of {claimed.value:g} is not what the node's slots show."
        if found is not None and entry.outcome is Outcome.ADMITTED and found.value > found.limit * (1 + SAME):
            return f"Admitted, although the node's {found.figure} is {found.value:g}, over {found.limit:g}."
        return None

    def _check_batch(self, index: int, entry: BatchEntry) -> None:
        self._nodes.update(miss.node for miss in entry.missed)
        problems, used = self._batches.take(entry)
        if self._owed:
            owed = min(self._owed).hex()
            problems.append(("batch_before_recheck", f"Submission {owed[:16]}… had to be measured in full before."))
            self._owed.clear()
        for code, detail in (*problems, *self._gaps.check(entry, used, self._manifests)):
            self._note(index, code, detail)


def _work_of(entry: VerdictEntry) -> bytes:
    """Return a digest of whose work a verdict is on: what a second verdict has in common with the first."""
    of = (entry.node, entry.version, entry.manifest_digest, entry.slot, entry.candidate)
    return hashlib.sha256(repr((*of, entry.request, entry.body, entry.tokens)).encode()).digest()
