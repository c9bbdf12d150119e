"""Checks of the log alone, without any policy (docs/protocol.md, section 8).

Pure: entries in, problems out. An honest coordinator's log has none.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from node.audit.gaps import GapChecker, Withholding
from node.audit.pools import PoolChecker
from node.protocol.admission import (
    DRIFT,
    EVIDENCE,
    GAIN,
    Figures,
    Finding,
    Outcome,
    has_signal,
    judge_drift,
    judge_group,
    judge_rows,
    limit_of,
)
from node.protocol.evidence import STATISTICS, Drift, Total, Totals, follow
from node.protocol.merkle import completed_nodes, leaf_hash, root
from node.protocol.messages import MAX_ENTRY_BYTES, BatchEntry, LogEntry, PolicyEntry, RunEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.standing import Account, Draws
from shardcast.errors import Malformed
from shardcast.wire import decode

_ENTRY: Any = LogEntry  # a union, which type checkers do not take for a type


FALSE_ALARMS = 1e-9
"""False positive rate of `too_little_measured`."""

SAME = 1e-9
"""Relative tolerance between two machines' logarithms, generous."""


@dataclass(frozen=True, slots=True)
class AuditProblem:
    """One point on which the audit disagrees with the coordinator; `code` is stable."""

    code: str
    detail: str
    log_index: int | None = None


@dataclass(frozen=True, slots=True)
class LoggedVerdict:
    """A verdict and where the log has it."""

    log_index: int
    entry: VerdictEntry


class LeafTree:
    """In-memory Merkle tree of a growing log; two hashes per leaf."""

    def __init__(self) -> None:
        self.size = 0
        self._levels: list[list[bytes]] = []

    def append(self, leaf: bytes) -> None:
        """Add one leaf's exact bytes."""
        for level, _, value in completed_nodes(self.size, leaf_hash(leaf), self._node):
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(value)
        self.size += 1

    def root(self) -> bytes:
        """Return the root of everything appended so far."""
        return root(self.size, self._node)

    def _node(self, level: int, index: int) -> bytes:
        return self._levels[level][index]


def read_entries(leaves: Iterable[bytes]) -> tuple[list[LogEntry | None], list[AuditProblem]]:
    """Decode every leaf; None, with a problem, for a malformed one."""
    entries: list[LogEntry | None] = []
    problems: list[AuditProblem] = []
    for index, leaf in enumerate(leaves):
        try:
            entries.append(decode(_ENTRY, leaf, max_bytes=MAX_ENTRY_BYTES))
        except Malformed as error:
            entries.append(None)
            problems.append(AuditProblem("malformed_entry", f"{error}.", index))
    return entries, problems


@dataclass(slots=True)
class LogReading:
    """What follows from the log: every violation of section 8.1, each node's account, and what training should not
    have used: (log index of the second verdict, or of what asks for it if there is none yet, submission, step).
    """

    problems: list[AuditProblem] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)
    reached_training: list[tuple[int, str, int]] = field(default_factory=list)
    withholding: Withholding = field(default_factory=Withholding)


def read_log(entries: Sequence[LogEntry | None], *, run_id: str, spec: RunSpec) -> LogReading:
    """Follow the log from its first entry to its last."""
    if not entries:
        return LogReading([AuditProblem("wrong_rules", "The log is empty; its first entry must name the rules.")])
    checker = _Checker(run_id=run_id, spec=spec)
    for index, entry in enumerate(entries):
        checker.check(index, entry)
    return checker.end()


def choose_verdicts(verdicts: Sequence[LoggedVerdict], *, count: int | None, rng: random.Random) -> list[LoggedVerdict]:
    """Draw `count` decided verdicts (None: all), half of them rejections if there are enough of either kind.

    Indeterminate ones claim nothing and are not drawn.
    """
    admitted = [verdict for verdict in verdicts if verdict.entry.outcome is Outcome.ADMITTED]
    rejected = [verdict for verdict in verdicts if verdict.entry.outcome is Outcome.REJECTED]
    if count is not None:
        of_rejected = min(len(rejected), max(count // 2, count - len(admitted)))
        rejected = rng.sample(rejected, of_rejected)
        admitted = rng.sample(admitted, min(len(admitted), count - of_rejected))
    return sorted([*admitted, *rejected], key=lambda verdict: (verdict.entry.version, verdict.log_index))


class _Checker:
    """Walks the log once, in order."""

    def __init__(self, *, run_id: str, spec: RunSpec) -> None:
        self.reading = LogReading()
        self._run_id = run_id
        self._spec = spec
        self._manifests: dict[int, str] = {}
        self._newest = -1
        self._step = -1
        self._judged: set[str] = set()
        self._drifts: dict[str, Drift] = {}
        self._taken: set[tuple[int, int]] = set()
        self._admitted: dict[str, int] = {}
        self._dull: set[str] = set()
        self._used: dict[str, int] = {}
        self._spots: dict[str, VerdictEntry] = {}
        self._owed: dict[str, int] = {}  # to be measured in full before the next step
        self._late: dict[str, int] = {}  # to be measured in full, though a step has used them
        self._since_ban: Counter[str] = Counter()
        self._pools = PoolChecker(run_id=run_id, spec=spec)
        self._gaps = GapChecker(run_id=run_id, spec=spec)

    def check(self, index: int, entry: LogEntry | None) -> None:
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

    def _note(self, index: int, code: str, detail: str) -> None:
        self.reading.problems.append(AuditProblem(code, detail, index))

    def _check_rules(self, index: int, entry: RunEntry) -> None:
        if index != 0:
            self._note(index, "wrong_rules", "The rules are named a second time.")
        elif entry.run_id != self._run_id or entry.spec_digest != self._spec.digest:
            self._note(index, "wrong_rules", "The log's rules are not those of the descriptor.")

    def _check_policy(self, index: int, entry: PolicyEntry) -> None:
        if entry.version <= self._newest:
            self._note(index, "policy_order", f"Policy {entry.version} after policy {self._newest}.")
            return
        if entry.version > self._step + 1:
            step = entry.version - 1
            detail = f"Policy {entry.version} was published before what step {step} trained on was logged."
            self._note(index, "unlogged_step", detail)
        self._newest = entry.version
        self._manifests[entry.version] = entry.manifest_digest

    def _check_verdict(self, index: int, entry: VerdictEntry) -> None:
        if self._manifests.get(entry.version) != entry.manifest_digest:
            self._note(index, "unknown_policy", f"No such policy {entry.version} was published before.")
        if entry.recheck:
            self._check_recheck(index, entry)
        elif entry.submission in self._judged:
            self._note(index, "duplicate_verdict", f"Submission {entry.submission[:16]}… was judged before.")
        self._judged.add(entry.submission)
        self._follow(index, entry)
        drifted = self._drift_contradiction(entry)
        contradiction = _contradiction(entry, spec=self._spec) or drifted
        if contradiction is not None:
            self._note(index, "contradictory_verdict", contradiction)
        elsewhere = self._pools.contradiction(entry)
        if elsewhere is not None:
            self._note(index, "wrong_pool", elsewhere)
        if entry.outcome is Outcome.ADMITTED and not entry.recheck:
            self._pools.follow(entry, head=self._newest)
            if (entry.version, entry.slot) in self._taken:
                self._note(index, "duplicate_admission", f"Slot {entry.version}/{entry.slot} was admitted before.")
            self._taken.add((entry.version, entry.slot))
            self._admitted[entry.submission] = entry.version
            missing = self._gaps.admit(entry)
            if missing is not None:
                self._note(index, "unfounded_gap", missing)
            if self._spec.batch.only_signal and not has_signal(entry.rewards or ()):
                self._dull.add(entry.submission)

    def _check_recheck(self, index: int, entry: VerdictEntry) -> None:
        """Check that a recheck follows a spot verdict; a rejection revokes the admission."""
        first = self._spots.pop(entry.submission, None)
        same = ("node", "version", "manifest_digest", "slot", "candidate", "request", "body", "tokens")
        if first is None or any(getattr(first, name) != getattr(entry, name) for name in same):
            self._note(index, "unfounded_recheck", f"Submission {entry.submission[:16]}… was not admitted in part.")
            return
        self._owed.pop(entry.submission, None)
        self._late.pop(entry.submission, None)
        if entry.outcome is Outcome.ADMITTED:
            return
        step = self._used.get(entry.submission)
        if step is not None:
            self.reading.reached_training.append((index, entry.submission, step))
        else:
            self._admitted.pop(entry.submission, None)
            self._taken.discard((entry.version, entry.slot))
            if entry.submission not in self._dull:
                self._gaps.revoke(entry)

    def _follow(self, index: int, entry: VerdictEntry) -> None:
        """Return the node's standing: whether it allowed what was not measured, and what has to be measured now."""
        rules = self._spec.standing
        account = self.reading.accounts.setdefault(entry.node, Account())
        if entry.spot is not None and account.standing.full_rate(rules) >= 1.0:
            self._note(index, "spot_without_standing", "One row was measured where the node's standing needs all.")
        if entry.spot is not None and entry.outcome is Outcome.ADMITTED:
            self._spots[entry.submission] = entry
        self._check_ban(index, entry, account)
        for name in sorted(account.follow(entry, rules=rules) & self._spots.keys()):
            (self._late if name in self._used else self._owed)[name] = index

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
        self._check_shares()
        self.reading.withholding = self._gaps.withholding
        self.reading.reached_training += [(at, name, self._used[name]) for name, at in self._late.items()]
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
            self.reading.problems.append(AuditProblem("too_little_measured", detail))

    def _drift_contradiction(self, entry: VerdictEntry) -> str | None:
        """Describe how the verdict contradicts the node's drift so far; None if it does not."""
        claimed = entry.finding if entry.finding is not None and entry.finding.figure.endswith(DRIFT) else None
        if entry.totals is None:
            return None
        limits = self._spec.limits
        if not _is_possible(entry.totals, limits=limits):
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
        if entry.step <= self._step:
            self._note(index, "batch_order", f"Step {entry.step} after step {self._step}.")
        elif entry.step > self._step + 1:
            self._note(index, "unlogged_step", f"Step {entry.step} comes where step {self._step + 1} should.")
        self._step = max(self._step, entry.step)
        if self._owed:
            owed = min(self._owed)
            self._note(index, "batch_before_recheck", f"Submission {owed[:16]}… had to be measured in full before.")
            self._owed.clear()
        for submission in entry.submissions:
            version = self._admitted.get(submission)
            if version is None:
                self._note(index, "batch_not_admitted", f"Submission {submission[:16]}… was not admitted before.")
            elif not entry.step - self._spec.batch.max_async <= version <= entry.step:
                self._note(index, "batch_stale", f"Step {entry.step} uses work of policy {version}.")
            if submission in self._dull:
                self._note(index, "batch_without_signal", f"Submission {submission[:16]}… has equal rewards.")
            if submission in self._used:
                self._note(index, "batch_reuse", f"Submission {submission[:16]}… is used twice.")
            self._used[submission] = entry.step
        for code, detail in self._gaps.check(entry, self._manifests):
            self._note(index, code, detail)


def _contradiction(entry: VerdictEntry, *, spec: RunSpec) -> str | None:
    """Describe how a verdict contradicts itself; None if it does not."""
    drifted = entry.finding is not None and entry.finding.figure.endswith(DRIFT)
    enough = not entry.recheck and (entry.outcome is Outcome.ADMITTED or drifted)
    if entry.spot is not None and (not enough or entry.spot >= spec.sampling.group_size):
        return f"Only row {entry.spot} was measured, which is not enough for this verdict."
    if entry.outcome is Outcome.ADMITTED:
        return _admission_contradiction(entry, spec=spec)
    if entry.reason is None or entry.rewards is not None:
        return "Not admitted, but without a reason or with rewards."
    if (entry.reason is Reason.VERIFIER_FAILED) != (entry.outcome is Outcome.INDETERMINATE):
        return f"Outcome {entry.outcome} for the reason {entry.reason}."
    if (entry.figures, entry.totals, entry.finding) != (None, None, None):
        return _finding_contradiction(entry, spec=spec)
    return None


def _finding_contradiction(entry: VerdictEntry, *, spec: RunSpec) -> str | None:
    """Describe how a finding contradicts figures or totals; None if it does not."""
    figures, totals, finding = entry.figures, entry.totals, entry.finding
    if figures is None or totals is None or finding is None:
        return "Figures or totals without a finding, or a finding without them."
    if finding.reason is not entry.reason or not is_finding(finding, spec=spec):
        return f"Rejected as {entry.reason}, which its finding does not show."
    if finding.row is not None and getattr(figures, finding.figure) < finding.value:
        return f"Its {finding.figure} of {finding.value:g} is more than the worst of its figures."
    if finding.row is None and finding.figure.endswith(EVIDENCE):
        together = judge_group(totals, limits=spec.limits)
        if together is None or not same_finding(together, finding):
            return f"Its {finding.figure} of {finding.value:g} is not what its totals show."
    return None


def _is_possible(totals: Totals, *, limits: LimitsSpec) -> bool:
    """Return whether each sum is at most its count times the level's largest value."""
    for name in STATISTICS:
        level, seen = getattr(limits.honest, name), getattr(totals, name)
        if level is None:
            if seen != Total():
                return False
        elif seen.sum > seen.count * level.largest + SAME * max(1.0, seen.count * abs(level.largest)):
            return False
    return True


def is_finding(finding: Finding, *, spec: RunSpec) -> bool:
    """Return whether a finding is well-formed: valid row, figure, reason and limit, with the value above it."""
    if finding.row is None:
        if not finding.figure.endswith((EVIDENCE, DRIFT, GAIN)):
            return False
    elif finding.figure not in Figures.__struct_fields__ or not 0 <= finding.row < spec.sampling.group_size:
        return False
    try:
        reason, limit = limit_of(finding.figure, spec.limits)
    except KeyError:
        return False
    return (finding.reason, finding.limit) == (reason, limit) and finding.value > limit


def same_finding(ours: Finding, theirs: Finding) -> bool:
    """Return whether two findings are equal up to `SAME` in their value."""
    return msgspec.structs.replace(ours, value=theirs.value) == theirs and math.isclose(
        ours.value, theirs.value, rel_tol=SAME
    )


def _admission_contradiction(entry: VerdictEntry, *, spec: RunSpec) -> str | None:
    if entry.reason is not None or entry.finding is not None or entry.figures is None or entry.rewards is None:
        return "Admitted with a reason or a finding, or without figures or rewards."
    if entry.totals is None:
        return "Admitted without totals."
    finding = judge_rows({0: entry.figures}, limits=spec.limits) or judge_group(entry.totals, limits=spec.limits)
    if finding is not None:
        return f"Admitted, but its {finding.figure} of {finding.value:g} is over the limit of {finding.limit:g}."
    if len(entry.rewards) != spec.sampling.group_size or not all(0 <= reward <= 1 for reward in entry.rewards):
        return "Its rewards are not one for each row, from 0 to 1."
    return None
