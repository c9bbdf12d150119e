"""Report of an audit, as JSON or tables.

Text of the coordinator or a worker is made printable.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.audit.gaps import WithheldRow, Withholding
from node.audit.log import LoggedVerdict, LogIndex
from node.audit.problems import AuditProblem
from node.audit.witnesses import Witnesses
from node.client.http import printable
from node.protocol.admission import Outcome, Verdict
from node.protocol.checkpoints import Checkpoint
from node.protocol.run import StandingSpec
from node.protocol.standing import Account
from node.protocol.withholding import EVEN, odds

AGREE, DISAGREE, INCOMPLETE, PARTIAL = 0, 1, 2, 3
MAX_SHOWN = 50

QUIET_SECONDS = 86400
"""Age of the newest verdict from which a run that is not over is said to be quiet."""


class AuditResult(StrEnum):
    """How a logged verdict compares with the derived one.

    `unseen`: the one measured row is right, another row is not. `ungraded`: all but the rewards is right, whose answers
    the operator keeps. `expired`: not derived, since the operator says to have removed its files.
    """

    AGREE = "agree"
    DISAGREE = "disagree"
    INDETERMINATE = "indeterminate"
    UNAVAILABLE = "unavailable"
    UNSEEN = "unseen"
    UNGRADED = "ungraded"
    EXPIRED = "expired"


CONFIRMED = {AuditResult.AGREE, AuditResult.UNGRADED}
_IF_ANY = {AuditResult.UNGRADED, AuditResult.EXPIRED}
"""Results that the table has a column for only where there are some."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One verdict that was derived again."""

    verdict: LoggedVerdict
    result: AuditResult
    detail: str = ""
    derived: Verdict | None = None


@dataclass(slots=True)
class Report:
    """Findings of an audit, valid at any moment while it runs."""

    url: str
    run_id: str
    seed: int = 0
    checkpoint: Checkpoint | None = None
    previous: Checkpoint | None = None
    witnesses: Witnesses | None = None
    counts: dict[str, int] = field(default_factory=dict)
    newest_verdict_at: int | None = None
    is_over: bool = False
    coordinator_indeterminate: list[int] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    problems: list[AuditProblem] = field(default_factory=list)
    reached_training: list[tuple[int, str, int]] = field(default_factory=list)
    withholding: Withholding = field(default_factory=Withholding)
    accounts: dict[str, Account] = field(default_factory=dict)
    rules: StandingSpec = field(default_factory=StandingSpec)
    fault: tuple[str, str] | None = None
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: agree, 1: disagree, 2: incomplete, 3: partial."""
        if self.problems:
            return DISAGREE
        missing = any(check.result is AuditResult.UNAVAILABLE for check in self.checked)
        if self.fault or missing or self.is_all_expired or self.lacks_witnesses:
            return INCOMPLETE
        return PARTIAL if self.count(AuditResult.EXPIRED) else AGREE

    @property
    def is_all_expired(self) -> bool:
        """Whether verdicts were drawn and none of them has its files any more."""
        return bool(self.checked) and self.count(AuditResult.EXPIRED) == len(self.checked)

    @property
    def lacks_witnesses(self) -> bool:
        """Whether fewer witnesses than asked for have signed what was audited."""
        return self.witnesses is not None and not self.witnesses.has_quorum

    @property
    def outcome(self) -> str:
        return ("agree", "disagree", "incomplete", "partial")[self.exit_code]

    def count(self, result: AuditResult) -> int:
        """Return the number of checked verdicts with this result."""
        return sum(check.result is result for check in self.checked)

    def describe_log(self, log: LogIndex) -> None:
        """Set the log's counts."""
        self.counts = {
            "entries": len(log.latest),
            "policies": len(log.policies),
            "batches": log.batches,
            **{outcome.value: len(places) for outcome, places in log.verdicts.items()},
        }
        if any(log.verdicts.values()):
            self.newest_verdict_at = log.latest[-1]
        self.coordinator_indeterminate = list(log.verdicts[Outcome.INDETERMINATE])


def render_json(report: Report) -> str:
    """Render one line of JSON; `node.audit.auditor` documents its keys."""
    value = {
        "run_id": report.run_id,
        "url": report.url,
        "outcome": report.outcome,
        "exit_code": report.exit_code,
        "seed": report.seed,
        "seconds": round(report.seconds, 3),
        "checkpoint": _checkpoint(report.checkpoint),
        "previous_checkpoint": _checkpoint(report.previous),
        "witnesses": render_witnesses(report.witnesses),
        "log": report.counts,
        "newest_verdict_at": report.newest_verdict_at,
        "coordinator_indeterminate": report.coordinator_indeterminate,
        "reached_training": [
            {"log_index": index, "submission": submission, "step": step}
            for index, submission, step in report.reached_training
        ],
        "withholding": {
            "gaps": report.withholding.gaps,
            "nodes": [asdict(row) for row in report.withholding.rows()],
        },
        "accounts": [
            {
                "node": node,
                "credit": account.vested,
                "pending": account.pending,
                "void": account.void,
                "verified": account.standing.verified,
                "strikes": account.standing.strikes,
                "banned": account.standing.is_banned(report.rules),
                "full_rate": account.standing.full_rate(report.rules),
            }
            for node, account in report.accounts.items()
        ],
        "results": {result.value: report.count(result) for result in AuditResult},
        "verdicts": [_verdict(check) for check in report.checked],
        "problems": [asdict(problem) for problem in report.problems],
        "error": None if report.fault is None else {"code": report.fault[0], "message": report.fault[1]},
    }
    return json.dumps(value, allow_nan=False)


def _checkpoint(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    return {"size": checkpoint.size, "root": checkpoint.root.hex()}


def render_witnesses(found: Witnesses | None) -> dict[str, Any] | None:
    """Return what witnesses signed as it stands in JSON, None where none were asked for."""
    if found is None:
        return None
    rows = []
    for one in found.rule.witnesses:
        size, at = found.signed.get(one.key, (None, None))
        covers = one.key in found.covered
        said = {"covers": covers, "detail": "" if covers else found.lacking.get(one.key, "")}
        rows.append({"name": one.key.name, "key": str(one.key), "size": size, "signed_at": at, **said})
    return {"quorum": found.rule.quorum, "has_quorum": found.has_quorum, "of": rows}


def _verdict(check: Checked) -> dict[str, Any]:
    entry, derived = check.verdict.entry, check.derived
    return {
        "log_index": check.verdict.log_index,
        "submission": entry.submission,
        "node": entry.node,
        "version": entry.version,
        "slot": entry.slot,
        "logged": {"outcome": entry.outcome, "reason": entry.reason},
        "derived": None if derived is None else {"outcome": derived.outcome, "reason": derived.reason},
        "result": check.result,
        "detail": check.detail,
    }


def show(report: Report, console: Console) -> None:
    """Print the report for a person."""
    if report.checkpoint is not None:
        console.print(f"log of run {report.run_id[:16]}…: {_log_line(report)}", highlight=False)
    if quiet := _quiet_line(report, now=time.time()):
        console.print(Text(quiet))
    if report.witnesses is not None:
        console.print(Text(witnesses_line(report.witnesses)))
    if report.checked:
        console.print(_results(report))
    disputed = [check for check in report.checked if check.result not in CONFIRMED]
    if disputed:
        console.print(_disputes(disputed))
    if report.accounts:
        console.print(_accounts(report))
    if withheld := report.withholding.rows():
        console.print(_withheld(withheld))
    if report.withholding.gaps:
        console.print(f"{report.withholding.gaps} slots were delivered by nobody in time, and not trained on")
    if report.reached_training:
        steps = ", ".join(map(str, sorted({step for _, _, step in report.reached_training})[:MAX_SHOWN]))
        count = len(report.reached_training)
        console.print(f"{count} groups were trained on before all of their rows were measured, in step {steps}")
    if report.problems:
        console.print(_problems(report.problems))
    console.print(Text(_conclusion(report), style="bold"))


def witnesses_line(found: Witnesses) -> str:
    """Return what witnesses signed as a person reads it."""
    line = f"witnessed by {len(found.covered)} of {len(found.rule.witnesses)}, {found.rule.quorum} asked for"
    missing = [printable(name) for name in found.missing]
    return f"{line}; not by {', '.join(missing)}" if missing else line


def _log_line(report: Report) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    since = "" if report.previous is None else f"; extends the {report.previous.size} entries seen before"
    unjudged = len(report.coordinator_indeterminate)
    undecided = f"; the coordinator could not decide {unjudged}" if unjudged else ""
    return f"{counts or 'not read'}{since}{undecided}"


def _quiet_line(report: Report, *, now: float) -> str | None:
    """Return what to say of a log, read whole, that has had no verdict for long though the run goes on; else None."""
    if (
        report.newest_verdict_at is None
        or report.is_over
        or report.fault is not None
        or now - report.newest_verdict_at < QUIET_SECONDS
    ):
        return None
    days = int((now - report.newest_verdict_at) // 86400)
    return f"the newest verdict is {days} days old, and the run is not over: it stands still, or its log goes on unseen"


def _results(report: Report) -> Table:
    table = Table(title="verdicts derived again")
    shown = [each for each in AuditResult if each not in _IF_ANY or report.count(each)]
    for column in ("logged", *shown):
        table.add_column(str(column), justify="left" if column == "logged" else "right")
    for outcome in (Outcome.ADMITTED, Outcome.REJECTED):
        checks = [check.result for check in report.checked if check.verdict.entry.outcome is outcome]
        table.add_row(outcome, *(str(checks.count(result)) for result in shown))
    return table


def _accounts(report: Report) -> Table:
    """Render credit and standing of each node by the log, largest credit first."""
    table = Table(title="credit in tokens, and standing")
    for column in ("node", "credit", "pending", "void", "verified", "strikes", "next slot"):
        table.add_column(column, justify="left" if column in ("node", "next slot") else "right")
    accounts = sorted(report.accounts.items(), key=lambda one: -one[1].vested)
    for node, account in accounts[:MAX_SHOWN]:
        standing = account.standing
        rate = standing.full_rate(report.rules)
        coming = "banned" if standing.is_banned(report.rules) else f"measured in full with {rate:.0%}"
        counts = (account.vested, account.pending, account.void, standing.verified, standing.strikes)
        table.add_row(f"{node[:16]}…", *map(str, counts), coming)
    return table


def _withheld(rows: list[WithheldRow]) -> Table:
    """Render what nodes had and did not deliver, the least likely to be chance first."""
    caption = (
        "by chance: how often any of so many honest nodes looks as uneven (corrected for the nodes and kinds that are "
        "compared). A slow machine lets go what takes long."
    )
    table = Table(title="slots that nodes had and did not deliver", caption=caption)
    for column in ("node", "delivered", "missed", "above all of", "by chance"):
        table.add_column(column, justify="right" if column in ("delivered", "missed") else "left")
    for row in rows[:MAX_SHOWN]:
        kind, probability = min(
            (row.environment, row.environment_probability), (row.signal, row.signal_probability), key=lambda one: one[1]
        )
        uneven = (printable(kind), odds(probability)) if probability < EVEN else ("-", "-")
        table.add_row(f"{row.node[:16]}…", str(row.delivered), str(row.missed), *map(Text, uneven))
    return table


def _disputes(checks: list[Checked]) -> Table:
    table = Table(title="verdicts that were not confirmed")
    for column in ("entry", "slot", "node", "logged", "result", "why"):
        table.add_column(column)
    for check in checks[:MAX_SHOWN]:
        entry = check.verdict.entry
        cells = (
            str(check.verdict.log_index),
            f"{entry.version}/{entry.slot}",
            f"{entry.node[:8]}…",
            f"{entry.outcome} {entry.reason or ''}".strip(),
            str(check.result),
            printable(check.detail),
        )
        table.add_row(*map(Text, cells))
    return table


def _problems(problems: list[AuditProblem]) -> Table:
    table = Table(title="the audit disagrees")
    for column in ("entry", "what", "why"):
        table.add_column(column)
    for problem in problems[:MAX_SHOWN]:
        where = "-" if problem.log_index is None else str(problem.log_index)
        table.add_row(where, problem.code, Text(printable(problem.detail)))
    return table


def _conclusion(report: Report) -> str:
    if report.exit_code == DISAGREE:
        unread = "" if report.fault is None else f" And it was not finished: {printable(report.fault[1])}"
        return f"disagree: {len(report.problems)} problems.{unread}"
    if report.fault is not None:
        return f"could not run: {printable(report.fault[1])}"
    unsure = report.count(AuditResult.INDETERMINATE)
    border = f" {unsure} lie too close to a limit to tell on this machine." if unsure else ""
    unseen = report.count(AuditResult.UNSEEN)
    border += f" {unseen} have rows that nobody measured and that are not right." if unseen else ""
    ungraded = report.count(AuditResult.UNGRADED)
    border += f" {ungraded} are right as far as can be told without the answers (--answers)." if ungraded else ""
    expired = [check for check in report.checked if check.result is AuditResult.EXPIRED]
    if expired:
        newest = time.strftime("%Y-%m-%d", time.gmtime(max(check.verdict.entry.decided_at for check in expired)))
        border += f" Of {len(expired)} the operator has removed the files; the newest of these is of {newest}."
    if report.lacks_witnesses:
        return f"incomplete: too few witnesses have signed this log; others may be shown another one.{border}"
    if report.is_all_expired:
        return f"incomplete: nothing could be derived again.{border}"
    if report.exit_code == INCOMPLETE:
        return f"incomplete: {report.count(AuditResult.UNAVAILABLE)} verdicts could not be derived again.{border}"
    return (
        f"{report.outcome}: {report.count(AuditResult.AGREE)} verdicts derived again.{border} "
        f"(--seed {report.seed} repeats this draw)"
    )
