"""What an auditor checks of the log alone: the invariants of section 8.1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .admission import (
    FIGURE_ORDER,
    Drift,
    Standing,
    close,
    evidence,
    first_finding,
    limit_of,
    reason_of,
)
from .log import MAX_ENTRY_BYTES
from .messages import ENTRY, STATISTICS
from .slots import Slot, candidate_of, kept_of, mean_of
from .values import Refused, decode

Entry = dict[str, Any]
FALSE_ALARM_NATS = math.log(1e9)


@dataclass(frozen=True)
class Disagreement:
    """A rule of the page that the log or a verdict breaks. `index` is the entry's, None for the log as a whole."""

    rule: str
    index: int | None
    detail: str = ""


@dataclass
class Account:
    """One node, as the log shows it: standing, credit in tokens, drift, and how often it was measured in full."""

    standing: Standing
    drift: Drift
    vested: int = 0
    void: int = 0
    whole_groups: int = 0
    since_ban: int = 0
    expected: float = 0.0
    variance: float = 0.0
    measured: int = 0
    pending: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By submission: its tokens, and how many fully measured groups had been admitted before it."""

    @property
    def unvested(self) -> int:
        """Tokens that are pending."""
        return sum(tokens for tokens, _ in self.pending.values())

    def void_all(self) -> set[str]:
        """Void what is pending and return the submissions behind it."""
        owed = set(self.pending)
        self.void += self.unvested
        self.pending.clear()
        return owed


class LogAudit:
    """Reads a log from its first leaf to its last; `disagreements` are what breaks an invariant of 8.1."""

    def __init__(self, *, run_id: str, spec: dict[str, Any], spec_digest: str) -> None:
        self.run_id, self.spec, self.spec_digest = run_id, spec, spec_digest
        self.disagreements: list[Disagreement] = []
        self.entries: list[Entry | None] = []
        self.accounts: dict[str, Account] = {}
        self.policies: dict[int, tuple[str, int]] = {}
        self.admitted: dict[str, Entry] = {}
        self.used: dict[str, int] = {}
        self.owed: dict[str, int] = {}
        self._judged: set[str] = set()
        self._spots: dict[str, Entry] = {}
        self._taken: set[tuple[int, int]] = set()
        self._done: dict[int, set[int]] = {}
        self._gaps: set[tuple[int, int]] = set()
        self._closed = -1
        self._step = -1
        self._means: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def read(self, leaves: Iterable[bytes]) -> None:
        """Read all leaves of the log."""
        for leaf in leaves:
            try:
                entry = decode(ENTRY, leaf, max_bytes=MAX_ENTRY_BYTES)
            except Refused as error:
                entry = None
                self._note("encoding", str(error))
            if (entry is not None and entry["type"] == "run") != (not self.entries):
                self._note("run", "exactly the first entry names the rules")
            if entry is not None:
                getattr(self, f"_{entry['type']}")(entry)
            self.entries.append(entry)
        self._check_shares()

    def _note(self, rule: str, detail: str = "") -> None:
        self.disagreements.append(Disagreement(rule, len(self.entries), detail))

    def _run(self, entry: Entry) -> None:
        if (entry["run_id"], entry["spec_digest"]) != (self.run_id, self.spec_digest):
            self._note("run", "another run or other rules")

    def _policy(self, entry: Entry) -> None:
        if self.policies and entry["version"] <= max(self.policies):
            self._note("policy", "versions rise strictly")
            return
        if entry["version"] > self._step + 1:
            self._note("policy", f"version {entry['version']} comes before step {entry['version'] - 1}")
        self.policies[entry["version"]] = entry["manifest_digest"], len(self.entries)

    def published(self, before: int) -> frozenset[int]:
        """Return the versions whose entry comes before entry `before`."""
        return frozenset(version for version, (_, index) in self.policies.items() if index < before)

    # Verdicts

    def _verdict(self, entry: Entry) -> None:
        if self.policies.get(entry["version"], ("",))[0] != entry["manifest_digest"]:
            self._note("policy", "the verdict is of a policy that was not published before")
        if entry["recheck"]:
            self._recheck(entry)
        elif entry["submission"] in self._judged:
            self._note("verdict", "the submission has a verdict already")
        self._judged.add(entry["submission"])
        self._check_pool(entry)
        self._follow(entry)
        for contradiction in (contradiction_of(entry, self.spec), self._drift(entry)):
            if contradiction:
                self._note("contradiction", contradiction)
        if entry["outcome"] == "admitted" and not entry["recheck"]:
            place = entry["version"], entry["slot"]
            if place in self._taken:
                self._note("verdict", f"slot {place} was admitted before")
            self._taken.add(place)
            if place in self._gaps or entry["version"] <= self._closed:
                self._note("gap", f"slot {place} was logged as missing before, or its last chance is over")
            self._done.setdefault(entry["version"], set()).add(entry["slot"])
            self.admitted[entry["submission"]] = entry
            self._remember_mean(entry)

    def _recheck(self, entry: Entry) -> None:
        first = self._spots.pop(entry["submission"], None)
        same = ("node", "version", "manifest_digest", "slot", "candidate", "request", "body", "tokens")
        if first is None or any(first.get(name) != entry.get(name) for name in same):
            self._note("recheck", "it follows no admission by one row, or differs from it")
            return
        self.owed.pop(entry["submission"], None)
        if entry["outcome"] != "admitted" and entry["submission"] not in self.used:
            self.admitted.pop(entry["submission"], None)
            self._taken.discard((entry["version"], entry["slot"]))
            if not self._without_signal(first):
                self._done[entry["version"]].discard(entry["slot"])

    def account(self, node: str) -> Account:
        """Return a node's account."""
        empty = Account(Standing(self.spec["standing"]), Drift(self.spec["limits"]))
        return self.accounts.setdefault(node, empty)

    def _follow(self, entry: Entry) -> None:
        """Follow standing, credit and what has to be measured again (7.6)."""
        account, spot = self.account(entry["node"]), entry["spot"]
        rate = account.standing.full_rate
        if spot is not None and rate >= 1:
            self._note("spot", "the node's standing asks for all rows")
        account.since_ban = account.since_ban + (not entry["recheck"]) if account.standing.banned else 0
        if account.since_ban == self.spec["batch"]["max_leases_per_node"] + 1:
            self._note("ban", "a banned node got more work")
        outcome = entry["outcome"]
        if entry["recheck"]:
            tokens, _ = account.pending.pop(entry["submission"], (0, 0))
            if outcome == "admitted":
                account.vested += tokens
            else:
                account.void += tokens
        elif outcome == "admitted" and spot is not None:
            account.pending[entry["submission"]] = entry["tokens"], account.whole_groups
            self._spots[entry["submission"]] = entry
        elif outcome == "admitted":
            account.whole_groups += 1
            account.vested += entry["tokens"]
            for name, (tokens, since) in list(account.pending.items()):
                if account.whole_groups - since >= self.spec["standing"]["vesting"]:
                    account.vested += tokens
                    del account.pending[name]
        if not entry["recheck"] and outcome != "indeterminate":
            account.expected += rate
            account.variance += rate * (1 - rate)
            account.measured += spot is None
        if outcome == "rejected" or not entry["recheck"]:
            account.standing.add(outcome, whole=spot is None)
        if outcome == "rejected":
            spots = {name: self._spots[name] for name in account.void_all() if name in self._spots}
            self.owed |= {name: len(self.entries) for name, spot in spots.items() if not self._without_signal(spot)}

    def _drift(self, entry: Entry) -> str | None:
        """Follow the node's drift; return what the verdict says against it (8.1, 6)."""
        finding = entry["finding"]
        named = finding["figure"] if finding and finding["figure"].endswith("_drift") else None
        counts = entry["totals"] and not entry["recheck"] and (entry["outcome"] == "admitted" or named)
        if not counts:
            return None
        drift = self.account(entry["node"]).drift
        drift.add(entry["totals"])
        over = drift.findings()
        if named:
            if next(iter(over), None) != named or not close(over[named], finding["value"]):
                return f"{named} is not what the node's slots show"
        elif any(value > limit_of(figure, self.spec["limits"]) * (1 + 1e-9) for figure, value in over.items()):
            return f"admitted with {over}"
        return None

    def _check_shares(self) -> None:
        """Check that as many slots were measured in full as standings ask for (8.1, 7)."""
        accounts = self.accounts.values()
        groups = {name: ([one], math.log(len(self.accounts))) for name, one in self.accounts.items()}
        groups["all nodes"] = list(accounts), 0.0
        for name, (members, more) in groups.items():
            nats = FALSE_ALARM_NATS + more
            missing = sum(one.expected - one.measured for one in members)
            variance = sum(one.variance for one in members)
            if missing > nats / 3 + math.sqrt(nats**2 / 9 + 2 * nats * variance):
                self.disagreements.append(Disagreement("spot", None, f"{name}: too few slots measured in full"))

    # Pools

    def problem_at(self, entry: Entry) -> tuple[int, int]:
        """Return environment and problem of a verdict's slot."""
        environments = self.spec["environments"]
        slot = Slot(self.run_id, entry["manifest_digest"], entry["slot"])
        environment = slot.environment([one["weight"] for one in environments])
        kept = kept_of(environments[environment])
        return environment, slot.problem(kept, entry.get("candidate", 0))

    def _check_pool(self, entry: Entry) -> None:
        pools = self.spec["batch"].get("pools")
        if ("candidate" in entry) != (pools is not None):
            self._note("pool", "a candidate is named exactly in a run with pools")
        elif pools is not None:
            environment, _ = self.problem_at(entry)
            published = self.policies.get(entry["version"], ("", -1))[1]
            means = {
                problem: [mean for index, mean in history if index < published]
                for (of, problem), history in self._means.items()
                if of == environment
            }
            last = {problem: history[-1] for problem, history in means.items() if history}
            slot = Slot(self.run_id, entry["manifest_digest"], entry["slot"])
            wanted = candidate_of(slot, self.spec["environments"][environment], pools, last)
            if wanted != entry["candidate"]:
                self._note("pool", f"the slot is for candidate {wanted}")

    def _remember_mean(self, entry: Entry) -> None:
        if self.spec["batch"].get("pools") is not None and entry["rewards"]:
            history = self._means.setdefault(self.problem_at(entry), [])
            history.append((len(self.entries), mean_of(entry["rewards"])))

    # Batches: one method per rule, so that a new field is one line in messages.py and one rule here.

    def _batch(self, entry: Entry) -> None:
        if entry["step"] != self._step + 1:
            self._note("batch", "each step is one more than the last")
        self._step = max(self._step, entry["step"])
        unmet = [name for name in self.owed if name not in self.used]
        if unmet:
            self._note("recheck", f"{unmet[0][:16]} had to be measured again before")
        for name in unmet:
            del self.owed[name]
        used = {self._place(self.admitted[name]) for name in entry["submissions"] if name in self.admitted}
        due = self._due(entry["step"])
        if len(due) < self.spec["batch"]["groups_per_step"] or list(entry["submissions"]) != due:
            self._note("batch", f"the groups whose turn it is are {[name[:16] for name in due]}")
        for name in entry["submissions"]:
            self._batch_member(entry["step"], name)
        self._check_gaps(entry, used)

    def _check_gaps(self, entry: Entry, used: set[tuple[int, int]]) -> None:
        """Check that the last chance of each slot left it admitted or a gap (8.1, 11)."""
        last_chance = entry["step"] - self.spec["batch"]["max_async"]
        missing = {self._place(gap) for gap in entry["gaps"]}
        for version, slot in map(self._place, entry["gaps"]):
            if not self._closed < version <= last_chance or slot in self._done.get(version, ()):
                self._note("gap", f"slot {version}/{slot} is not missing, or not yet")
            self._done.setdefault(version, set()).add(slot)
        self._gaps |= missing
        if any(self._place(one) not in used | missing for one in entry["missed"]):
            self._note("gap", "somebody missed a slot that has no part in this step")
        blamed = [self._place(one) for one in entry["missed"]]
        if len(blamed) > 1000 or any(blamed.count(place) > 8 for place in set(blamed)):
            self._note("gap", "more nodes are named than an entry may name")
        for version, slots in self._done.items():
            if version <= last_chance and slots and max(slots) + 1 != len(slots):
                self._note("gap", f"slots of policy {version} were left out without a word")
        self._closed = max(self._closed, last_chance)

    def _due(self, step: int) -> list[str]:
        """Return the groups that this step has to use, in order (8.1, 12)."""
        batch = self.spec["batch"]
        unused = [name for name in self.admitted if name not in self.used]
        unused = [name for name in unused if not self._without_signal(self.admitted[name])]
        unused.sort(key=lambda name: self._place(self.admitted[name]))
        oldest = unused[: batch["groups_per_step"]]
        last_chance = step - batch["max_async"]
        return oldest + [name for name in unused[len(oldest) :] if self.admitted[name]["version"] <= last_chance]

    @staticmethod
    def _place(named: Entry) -> tuple[int, int]:
        return named["version"], named["slot"]

    def _without_signal(self, verdict: Entry) -> bool:
        return self.spec["batch"]["only_signal"] and len(set(verdict["rewards"] or ())) < 2

    def _batch_member(self, step: int, name: str) -> None:
        verdict = self.admitted.get(name)
        if verdict is None:
            self._note("batch", f"{name[:16]} was not admitted before")
        elif not step - self.spec["batch"]["max_async"] <= verdict["version"] <= step:
            self._note("batch", f"step {step} uses work of policy {verdict['version']}")
        elif self._without_signal(verdict):
            self._note("batch", f"{name[:16]} has equal rewards")
        if name in self.used:
            self._note("batch", f"{name[:16]} is used twice")
        self.used[name] = step


def contradiction_of(entry: Entry, spec: dict[str, Any]) -> str | None:
    """Return how a verdict contradicts itself, None if it does not (8.1, 5 and the second half of 7)."""
    return next(_contradictions(entry, spec), None)


def _contradictions(entry: Entry, spec: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong; only the first counts, since the rest may follow from it."""
    outcome, finding, spot = entry["outcome"], entry["finding"], entry["spot"]
    drift = finding is not None and finding["figure"].endswith("_drift")
    enough = not entry["recheck"] and (outcome == "admitted" or drift)
    if spot is not None and (not enough or spot >= spec["sampling"]["group_size"]):
        yield "one row is not enough for this verdict"
    if entry["totals"] is not None and (excess := _impossible(entry["totals"], spec["limits"])):
        yield f"the total of {excess} is more than its values can sum up to"
    if outcome == "admitted":
        yield from _admission_contradictions(entry, spec)
        return
    if entry["reason"] is None or entry["rewards"] is not None:
        yield "not admitted, but without a reason or with rewards"
    if (entry["reason"] == "verifier_failed") != (outcome == "indeterminate"):
        yield f"{outcome} for {entry['reason']}"
    if {entry["figures"] is None, entry["totals"] is None, finding is None} == {True, False}:
        yield "figures and totals come with a finding"
    if finding:
        yield from _finding_contradictions(entry, spec)


def _impossible(totals: dict[str, Any], limits: dict[str, Any]) -> str | None:
    for name in STATISTICS:
        level, total = limits["honest"][name], totals[name]
        most = 0.0 if level is None else total["count"] * level["largest"]
        if (level is None and total["count"]) or (total["sum"] > most and not close(total["sum"], most)):
            return name
    return None


def _admission_contradictions(entry: Entry, spec: dict[str, Any]) -> Iterator[str]:
    figures, totals, rewards, limits = entry["figures"], entry["totals"], entry["rewards"], spec["limits"]
    if entry["reason"] is not None or entry["finding"] is not None:
        yield "admitted with a reason"
    if figures is None or totals is None or rewards is None:
        yield "admitted without figures, totals or rewards"
    if finding := first_finding([figures], limits):
        yield f"admitted with {finding['figure']} over its limit"
    if _first_evidence(totals, limits) is not None:
        yield "admitted with totals over their limit"
    if len(rewards) != spec["sampling"]["group_size"] or not all(0 <= reward <= 1 for reward in rewards):
        yield "not one reward from 0 to 1 for each row"


def _first_evidence(totals: dict[str, Any], limits: dict[str, Any]) -> tuple[str, float] | None:
    """Return the first evidence of a group that is over its limit, and its value."""
    for name in STATISTICS:
        nats = evidence(totals[name], limits["honest"][name])
        if nats > limit_of(f"{name}_evidence", limits):
            return f"{name}_evidence", nats
    return None


def _finding_contradictions(entry: Entry, spec: dict[str, Any]) -> Iterator[str]:
    finding, limits = entry["finding"], spec["limits"]
    figure, row, value = finding["figure"], finding["row"], finding["value"]
    of_group = figure in {f"{name}_{kind}" for name in STATISTICS for kind in ("evidence", "drift")}
    of_group |= figure in {f"{suspect}_gain" for suspect in limits["suspects"]}
    if not (of_group if row is None else figure in FIGURE_ORDER and row < spec["sampling"]["group_size"]):
        yield f"there is no finding of {figure} in row {row}"
    if not close(finding["limit"], limit_of(figure, limits)) or value <= finding["limit"]:
        yield f"{figure} is not over its limit"
    if {finding["reason"], entry["reason"]} != {reason_of(figure)}:
        yield f"{figure} is no reason for {entry['reason']}"
    if row is not None and value > entry["figures"][figure]:
        yield f"the row's {figure} is over the worst of all rows"
    if row is None and figure.endswith("_evidence"):
        first = _first_evidence(entry["totals"], limits)
        if first is None or first[0] != figure or not close(first[1], value):
            yield f"{figure} is not what the totals show first"
