"""Rendering of a node's standing: its state, the reasons, and what happens next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, UnsetType
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.client.http import printable
from node.protocol.messages import NodeStanding, Rejection
from node.protocol.run import StandingSpec

FRESH_SECONDS = 15.0
"""A worker writes its status every second, but not while its engine starts."""


class LocalWorker(msgspec.Struct, frozen=True):
    """The fields of a worker's status.json that are shown."""

    run_id: str
    coordinator: str
    doing: str
    updated_at: float
    coordinator_away: bool = False
    dismissed: str | None = None
    undelivered: int = 0
    admitted: int = 0
    rejected: int = 0
    tokens_per_s: float = 0.0


class _Problem(msgspec.Struct, frozen=True):
    text: Annotated[str, Meta(max_length=300)]


class _Health(msgspec.Struct, frozen=True):
    state: Annotated[str, Meta(max_length=20)]
    problems: tuple[_Problem, ...]


class _RunStatus(msgspec.Struct, frozen=True):
    health: _Health


MAX_PROBLEMS = 8
ENDED = "ended"
"""`doing` of a worker that ended cleanly."""


@dataclass(frozen=True, slots=True)
class StatusLine:
    """A labelled line."""

    name: str
    said: str
    style: str = ""


def lines_of(standing: NodeStanding, rules: StandingSpec) -> list[StatusLine]:
    """Render everything about the node but its rejections."""
    nickname = "" if isinstance(standing.nickname, UnsetType) else f" ({standing.nickname})"
    said = [
        StatusLine("node", f"{standing.node}{nickname}"),
        StatusLine("standing", _standing(standing), _style(standing)),
    ]
    if standing.known:
        said += [StatusLine("credit", _credit(standing)), StatusLine("verdicts", _verdicts(standing))]
    if rules.stake:
        said.append(StatusLine("stake", f"{standing.stake:,} of the {rules.stake:,} that the run asks for."))
    return [*said, StatusLine("next", _next(standing, rules))]


def health_lines(status: bytes) -> list[StatusLine]:
    """Render what a coordinator's status says of the run; nothing where it is of another release, or is nonsense."""
    try:
        health = msgspec.json.decode(status, type=_RunStatus).health
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if not health.problems:
        return [StatusLine("health", "The run is over." if health.state == "over" else "Everything works.")]
    return [StatusLine("health", one.text, "yellow") for one in health.problems[:MAX_PROBLEMS]]


def line_of(worker: LocalWorker, *, now: float) -> StatusLine:
    """Render the local worker's activity."""
    if worker.dismissed is not None:
        return StatusLine("worker here", f"Ended: {worker.dismissed}", "yellow")
    age = max(0.0, now - worker.updated_at)
    if worker.doing == ENDED:
        return StatusLine("worker here", f"Not running: it ended at {_moment(worker.updated_at)}.")
    if age > FRESH_SECONDS:
        return StatusLine("worker here", f"Not running: it was last {worker.doing}, at {_moment(worker.updated_at)}.")
    waiting = "1 slot" if worker.undelivered == 1 else f"{worker.undelivered} slots"
    said = f"{worker.doing}; {worker.tokens_per_s:.0f} tokens/s, {waiting} without a receipt yet."
    return StatusLine("worker here", f"{said} The coordinator is away." if worker.coordinator_away else said)


def deciding(standing: NodeStanding) -> Sequence[Rejection]:
    """Return the rejections that led to a ban, if they are among the last ones; else the last ones."""
    after = standing.strikes - standing.ban_after
    if standing.banned and after >= 0 and standing.strikes <= len(standing.rejections):
        return standing.rejections[after : standing.strikes]
    return standing.rejections


def show(lines: Sequence[StatusLine], rejections: Sequence[Rejection], console: Console) -> None:
    """Print the lines, each rejection, and their reasons' meaning and advice."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(line.name, Text(printable(line.said), style=line.style))
    console.print(table)
    if rejections:
        console.print(_rejections(rejections))
        console.print(_reasons(rejections))


def _standing(standing: NodeStanding) -> str:
    probation, strikes = standing.probation, standing.strikes
    if not standing.known:
        return "Not registered with this run, and not banned: a worker with this key would register."
    if standing.banned:
        since = "" if standing.banned_at is None else f" since {_moment(standing.banned_at)}"
        return f"Banned{since}: {standing.ban_after} of its slots were rejected without a passed probation in between."
    warned = f" {strikes} of the {standing.ban_after} rejections that end in a ban have come." if strikes else ""
    if standing.verified >= probation:
        return f"Trusted: {standing.verified} fully measured slots in a row were admitted.{warned}"
    state = "On probation again" if standing.rejected else "On probation"
    return f"{state}: {standing.verified} of {probation} probation slots were admitted in a row.{warned}"


def _style(standing: NodeStanding) -> str:
    if standing.banned:
        return "bold red"
    return "yellow" if standing.strikes else "green"


def _credit(standing: NodeStanding) -> str:
    said = f"{standing.vested:,} tokens vested"
    if standing.unvested:
        said += f", {standing.unvested:,} not yet: a rejection would void them"
    if standing.void:
        said += f", {standing.void:,} void since a rejection"
    return f"{said}."


def _verdicts(standing: NodeStanding) -> str:
    said = f"{standing.admitted} slots admitted, {standing.rejected} rejected"
    return f"{said}, {standing.indeterminate} undecided." if standing.indeterminate else f"{said}."


def _next(standing: NodeStanding, rules: StandingSpec) -> str:
    if standing.banned:
        return (
            "The coordinator gives this key no more work. Mend what the rejections below say (swarmproof doctor looks "
            "at this machine); a new key (swarmproof keys new) begins a probation of its own."
        )
    if standing.most_slots == 0:
        return "The run is over: the coordinator gives nobody any more work."
    has = f"{standing.leases} leased, {standing.unjudged} without a verdict"
    slots = "1 slot" if standing.most_slots == 1 else f"{standing.most_slots} slots"
    said = f"It may have {slots} at a time, and has {standing.leases + standing.unjudged} ({has})."
    if standing.wait_seconds > 0:
        wait = f"No lease for another {standing.wait_seconds:.0f} s: a slot was rejected, or a lease lapsed."
        said = f"{wait} Then: {said}"
    return f"{said} {_measured(standing, rules)}"


def _measured(standing: NodeStanding, rules: StandingSpec) -> str:
    if standing.full_rate < 1.0:
        return f"The next one is measured in full with {standing.full_rate:.0%}, else one row of it."
    if standing.verified >= standing.probation and standing.stake < rules.stake:
        return "Each is measured in full, because too little is staked."
    return "Each is measured in full."


def _rejections(rejections: Sequence[Rejection]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("rejected at", no_wrap=True)
    table.add_column("log entry", justify="right", no_wrap=True)
    table.add_column("why")
    for one in rejections:
        why = Text.assemble((one.reason.value, "bold"), f" {printable(one.detail)}")
        table.add_row(_moment(one.decided_at), str(one.log_index), why)
    return table


def _reasons(rejections: Sequence[Rejection]) -> Table:
    """Render each reason once, with meaning and advice."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for reason in dict.fromkeys(one.reason for one in rejections):
        table.add_row(reason.value, Text.assemble(reason.meaning, ("\n→ ", "bold"), reason.todo))
    return table


def _moment(at: float) -> str:
    """Format Unix seconds in this machine's time zone; an untrusted value may be out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return f"{at} s after 1970"
