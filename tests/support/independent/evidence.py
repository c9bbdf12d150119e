"""One verdict decided again from its evidence (section 8.4)."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .admission import FIGURE_ORDER, evidence, limit_of
from .audit import Disagreement, Entry, LogAudit
from .chat import seen_turn
from .envelope import open_envelope
from .measure import Measured, Model, add_totals, measure
from .messages import REQUEST_CLAIM, STATISTICS
from .policy import Policy
from .sampling import Turns
from .slots import Problem, Slot, problem_of, slot_name
from .submission import Expected, Row, check_rows, read_file
from .values import Refused, decode, digest


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
        if claim.get("slot", slot_name(entry)) != slot_name(entry):
            raise Refused("evidence", "signed as the work of another slot")
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
        own = self.spec["environments"][environment]
        problem = problem_of(own, number, self.spec["sampling"].get("chat"))
        slot = Slot(self.log.run_id, entry["manifest_digest"], entry["slot"])
        return problem, expected_of(
            own, problem, slot, policy, self.spec, version=entry["version"], published=self.log.published(index)
        )

    def _measured(self, entry: Entry, rows: Sequence[Row], expected: Expected) -> list[Disagreement]:
        limits = self.spec["limits"]
        measured = {
            number: measure(row, expected.course(row.completion_ids).replies, self.models, self.spec)
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
        policy = self.policies(expected.version)
        turns = [policy.text(turn) for turn in expected.course(row.completion_ids).turns]
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
    environment: dict[str, Any],
    problem: Problem,
    slot: Slot,
    policy: Policy,
    spec: dict[str, Any],
    *,
    version: int,
    published: frozenset[int],
) -> Expected:
    """Return what a submission for a slot has to hold."""
    sampling = spec["sampling"]
    chat = sampling.get("chat")
    most = {
        key: min(sampling[key], environment.get(key, sampling[key])) for key in ("max_prompt_tokens", "max_new_tokens")
    }
    thinking = environment.get("thinking")
    turns = Turns(
        policy.eos_ids,
        most["max_new_tokens"],
        sampling["max_turns"],
        sampling["max_reply_tokens"],
        stop=environment.get("stop", ()),
        text=policy.text,
        thought=None if thinking is None else (thinking["tokens"], policy.reply_ids(thinking["end"])),
        is_open=lambda text: _is_open(text, chat),
    )

    def ask(said: list[list[int]]) -> list[int] | None:
        reply = problem.reply(policy.text(said[-1]))
        if reply is None or len(reply) > 65536:
            return None
        has_end = chat is None or said[-1][-1] in policy.eos_ids
        return [*([] if has_end else [policy.end_mark]), *policy.reply_ids(reply)]

    return Expected(
        version=version,
        prompt_ids=tuple(policy.prompt_ids(problem.prompt, special_tokens=chat is None or chat["special_tokens"])),
        seeds=tuple(slot.seeds(sampling["group_size"])),
        vocabulary=policy.vocabulary,
        hidden=policy.hidden,
        published=published,
        **most,
        course=lambda tokens: turns.course(tokens, ask),
    )


def _is_open(text: str, chat: dict[str, Any] | None) -> bool:
    """Return whether a turn that begins with `text` is in a thought (4.10)."""
    if chat is None:
        return "</think>" not in text
    _, mark, thought = seen_turn(chat, text).rpartition("<think>")
    return mark != "" and "</think>" not in thought
