"""What an auditor checks: the log against its rules, and verdicts against their evidence (sections 8.1 and 8.4)."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from .envelope import open_envelope
from .log import MAX_ENTRY_BYTES
from .measure import Measured, Model, add_totals, measure
from .messages import ENTRY, REQUEST_CLAIM, STATISTICS
from .policy import Policy
from .sampling import Turns
from .slots import Problem, Slot, candidate_of, kept_of, mean_of, problem_of
from .submission import Expected, Row, check_rows, read_file
from .values import Refused, decode, digest

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
            self.owed |= {name: len(self.entries) for name in account.void_all() if name in self._spots}

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
        if entry["step"] <= self._step:
            self._note("batch", "steps rise strictly")
        self._step = max(self._step, entry["step"])
        unmet = [name for name in self.owed if name not in self.used]
        if unmet:
            self._note("recheck", f"{unmet[0][:16]} had to be measured again before")
        for name in unmet:
            del self.owed[name]
        for name in entry["submissions"]:
            self._batch_member(entry["step"], name)

    def _batch_member(self, step: int, name: str) -> None:
        verdict = self.admitted.get(name)
        if verdict is None:
            self._note("batch", f"{name[:16]} was not admitted before")
        elif not step - self.spec["batch"]["max_async"] <= verdict["version"] <= step:
            self._note("batch", f"step {step} uses work of policy {verdict['version']}")
        elif self.spec["batch"]["only_signal"] and len(set(verdict["rewards"] or ())) < 2:
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


# Evidence: one verdict decided again


@dataclass(frozen=True)
class Judge:
    """Decides verdicts again. `policies` and `models` give, by version, the policy file read and its forward pass."""

    log: LogAudit
    blob: Callable[[str], bytes]
    policies: Callable[[int], Policy]
    models: Callable[[int], Model]

    @property
    def spec(self) -> dict[str, Any]:
        """The run's rules."""
        return self.log.spec

    def check(self, index: int) -> list[Disagreement]:
        """Return what the verdict at `index` says otherwise than its evidence; rule `close` is no disagreement."""
        entry = self.log.entries[index]
        assert entry is not None
        note = lambda rule, detail="": [Disagreement(rule, index, detail)]  # noqa: E731
        try:
            body = self._body(entry)
        except Refused as error:
            return note("evidence", str(error))
        try:
            rows = read_file(body, self.spec)
            tokens = sum(len(row.completion_ids) for row in rows)
        except Refused as error:
            return [] if self._same(entry, error.code, 0) else note("outcome", error.code)
        problem, expected = self.expected(entry, index)
        try:
            check_rows(rows, expected, self.spec)
        except Refused as error:
            return [] if self._same(entry, error.code, tokens) else note("outcome", str(error))
        if entry["tokens"] != tokens:
            return note("tokens", f"{tokens}, not {entry['tokens']}")
        if entry["outcome"] == "rejected" and entry["finding"] is None:
            return note("outcome", f"nothing is wrong with it, logged as {entry['reason']}")
        found = self._measured(entry, rows, expected)
        if entry["outcome"] == "admitted":
            rewards = [self._reward(problem, row, expected) for row in rows]
            if rewards != entry["rewards"]:
                found.append(Disagreement("rewards", index, f"{rewards}, not {entry['rewards']}"))
        return [Disagreement(one.rule, index, one.detail) for one in found]

    def _same(self, entry: Entry, reason: str, tokens: int) -> bool:
        logged = entry["outcome"], entry["reason"], entry["finding"], entry["tokens"]
        return logged == ("rejected", reason, None, tokens)

    def _body(self, entry: Entry) -> bytes:
        """Return the submitted file, for which the node has signed (8.4)."""
        envelope = self.blob(entry["request"])
        if digest(envelope) != entry["request"] or entry["request"] != entry["submission"]:
            raise Refused("evidence", "another request")
        opened = open_envelope(envelope, "swarmproof/request", max_payload_bytes=2048, signer=entry["node"])
        claim = decode(REQUEST_CLAIM, opened.payload, max_bytes=2048)
        match = re.fullmatch("/v1/submissions/[0-9a-f]{64}(?:/([0-9a-f]{64}))?", claim["path"])
        if match is None or claim["method"] != "PUT" or claim["run_id"] != self.log.run_id:
            raise Refused("evidence", "the request is no submission to this run")
        body = self.blob(entry["body"])
        if digest(body) != entry["body"] or len(body) != claim["body_bytes"]:
            raise Refused("evidence", "another body")
        if match[1] is not None and hashlib.sha256(body).hexdigest() != match[1]:
            raise Refused("evidence", "not the SHA-256 that was signed")
        if entry["body"] != claim["body_digest"] and (match[1] is None or entry["reason"] != "wrong_body"):
            raise Refused("evidence", "not the body that was signed for")
        return body

    def expected(self, entry: Entry, index: int) -> tuple[Problem, Expected]:
        """Return the problem of a verdict's slot and what its submission has to hold (sections 4 to 6)."""
        environment, number = self.log.problem_at(entry)
        policy = self.policies(entry["version"])
        problem = problem_of(self.spec["environments"][environment], number)
        slot = Slot(self.log.run_id, entry["manifest_digest"], entry["slot"])
        return problem, expected_of(
            problem, slot, policy, self.spec, version=entry["version"], published=self.log.published(index)
        )

    def _measured(self, entry: Entry, rows: Sequence[Row], expected: Expected) -> list[Disagreement]:
        limits = self.spec["limits"]
        measured = {
            number: measure(row, expected.replies(row.completion_ids)[0], self.models, self.spec)
            for number, row in enumerate(rows)
            if entry["spot"] in (None, number)
        }
        totals = add_totals([one.totals(limits) for one in measured.values()])
        if entry["finding"] is not None:
            return self._finding(entry, measured, totals)
        found = []
        for name in FIGURE_ORDER:
            ours = max(one.figures(limits)[name] for one in measured.values())
            found += _over(name, ours, entry["figures"][name], limit_of(name, limits))
        return found + _compare_totals(totals, entry["totals"], limits)

    def _finding(
        self, entry: Entry, measured: dict[int, Measured], totals: dict[str, dict[str, Any]]
    ) -> list[Disagreement]:
        figure, row = entry["finding"]["figure"], entry["finding"]["row"]
        limits = self.spec["limits"]
        if row is not None:
            ours = measured[row].figures(limits)[figure]
        elif figure.endswith("_evidence"):
            name = figure.removesuffix("_evidence")
            ours = evidence(totals[name], limits["honest"][name])
        elif figure.endswith("_drift"):
            return _compare_totals(totals, entry["totals"], limits)  # the drift itself was followed along the log
        else:
            return [Disagreement("unmeasured", None, f"{figure} needs other weights")]
        if ours > entry["finding"]["limit"]:
            return []
        near = min(ours, entry["finding"]["limit"]) * 1.25 >= entry["finding"]["limit"]
        near &= entry["finding"]["value"] <= 1.25 * entry["finding"]["limit"]
        return [Disagreement("close" if near else "outcome", None, f"{figure} is {ours:g}")]

    def _reward(self, problem: Problem, row: Row, expected: Expected) -> float:
        replies, _ = expected.replies(row.completion_ids)
        policy = self.policies(expected.version)
        cuts = [0, *sorted(replies), len(row.completion_ids)]
        turns = [policy.text(row.completion_ids[a:b]) for a, b in itertools.pairwise(cuts)]
        return problem.reward(turns, len(row.completion_ids))


def _over(name: str, ours: float, logged: float, limit: float) -> list[Disagreement]:
    """Compare a figure of an admission with the auditor's own."""
    if ours <= limit:
        return []
    near = ours <= 1.25 * limit and 1.25 * logged >= limit
    return [Disagreement("close" if near else "outcome", None, f"{name} is {ours:g}, the limit {limit:g}")]


def _compare_totals(ours: dict[str, Any], logged: dict[str, Any], limits: dict[str, Any]) -> list[Disagreement]:
    """Compare number and mean of each statistic (8.4)."""
    found = []
    for name in STATISTICS:
        level, own, other = limits["honest"][name], ours[name], logged[name]
        if own["count"] != other["count"]:
            found.append(Disagreement("totals", None, f"{other['count']} values of {name}, not {own['count']}"))
        elif own["count"]:
            gap = abs(own["sum"] - other["sum"]) / own["count"] / math.sqrt(level["variance"])
            if gap > 0.25:
                found.append(Disagreement("totals" if gap > 1 else "close", None, f"the mean of {name}"))
    return found


def expected_of(
    problem: Problem, slot: Slot, policy: Policy, spec: dict[str, Any], *, version: int, published: frozenset[int]
) -> Expected:
    """Return what a submission for a slot has to hold."""
    sampling = spec["sampling"]
    turns = Turns(policy.eos_ids, sampling["max_new_tokens"], sampling["max_turns"], sampling["max_reply_tokens"])

    def replies(tokens: Sequence[int]) -> tuple[dict[int, list[int]], int | None]:
        ends = [count for count, token in enumerate(tokens, 1) if token in policy.eos_ids]

        def ask(turn: int) -> list[int] | None:
            start = ends[turn - 2] if turn > 1 else 0
            said = problem.reply(policy.text(tokens[start : ends[turn - 1]]))
            return None if said is None or len(said) > 65536 else policy.reply_ids(said)

        return turns.replies(tokens, ask)

    return Expected(
        version=version,
        prompt_ids=tuple(policy.prompt_ids(problem.prompt)),
        seeds=tuple(slot.seeds(sampling["group_size"])),
        vocabulary=policy.vocabulary,
        hidden=policy.hidden,
        published=published,
        replies=replies,
    )
