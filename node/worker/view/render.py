"""Rendering of the live view for any terminal size; the least important lines are left out first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from node.broadcast.progress import clock
from node.client.http import page_of, printable
from node.protocol.reasons import reason_of

MOST_COLUMNS: Final = 110
"""Maximum width, for legibility."""

LABEL_COLUMNS: Final = 13
LEAST_COLUMNS: Final = 40
"""Below this width, labels are left out."""

BAR_COLUMNS: Final = 16
MOST_REASONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Input of one rendering: the sums of `SessionTally`, and the worker's status ({} before it has joined)."""

    run_id: str
    node: str
    coordinators: Sequence[str]
    sums: Mapping[str, Any]
    status: Mapping[str, Any]
    note: str = ""
    """Since when the worker has been waiting, or ""."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A labelled text of the view, wrapped if needed; the highest rank is left out first."""

    label: str
    said: Text
    rank: int


def rows(frame: Frame, console: Console, *, columns: int, lines: int) -> list[Text]:
    """Render the view as at most `lines` lines of at most `columns` cells."""
    width = max(20, min(columns, MOST_COLUMNS))
    entries = list(_entries(frame, width))
    folded = [_fold(entry, width, console) for entry in entries]
    while len(folded) > 1 and 1 + sum(map(len, folded)) > lines:
        least = max(range(len(entries)), key=lambda index: entries[index].rank)
        del entries[least], folded[least]
    texts = [_title(frame, width), *(line for each in folded for line in each)]
    return [_cut(text, width) for text in texts[: max(1, lines)]]


def final_summary(sums: Mapping[str, Any], console: Console, *, columns: int) -> list[Text]:
    """Render the summary that stays on the terminal after the worker has ended."""
    width = max(20, min(columns, MOST_COLUMNS))
    tokens = f"{sums['tokens']:,} generated, {sums['mean_tokens_per_s']:,.0f} a second on average"
    entries = [
        _Entry("ended", Text(f"after {clock(sums['seconds'])}", "bold"), 0),
        _Entry("slots", Text(_slots(sums)), 0),
        _Entry("verdicts", _colored(_verdicts(sums), bad=sums["rejected"]), 0),
        *(_Entry("", _reason(reason, count), 0) for reason, count in sums["reasons"].items()),
        _Entry("credit", Text(_credit(sums)), 0),
        _Entry("tokens", Text(tokens), 0),
    ]
    return [_cut(text, width) for entry in entries for text in _fold(entry, width, console)]


def line(sums: Mapping[str, Any]) -> str:
    """Format the sums in one line, for a log."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sums["reasons"].items())
    waiting = f", {sums['waiting']} without a verdict" if sums["waiting"] else ""
    return (
        f"{_number(sums['generated'], 'slot')} generated, {sums['admitted']:,} admitted, {sums['rejected']:,} rejected"
        f"{f' ({reasons})' if reasons else ''}{waiting}; {sums['credit_tokens']:,} tokens credited; "
        f"{sums['tokens_per_s']:,.0f} tokens/s now, {sums['mean_tokens_per_s']:,.0f} on average"
    )


def standing_line(said: Mapping[str, Any]) -> str:
    """Format a node's standing in one line."""
    if said["banned"]:
        return "banned: this key gets no more work; `swarmproof status` says why"
    if said["verified"] < said["probation"]:
        state = f"on probation, {said['verified']} of {said['probation']} slots admitted in a row"
    else:
        state = f"trusted, {said['verified']:,} verified slots admitted in a row"
    if said["strikes"]:
        state += f"; {said['strikes']} of {said['ban_after']} rejections to a ban"
    if said["wait_seconds"] > 0:
        return f"{state}; no new slot for {said['wait_seconds']:.0f} s after a rejection or a lapsed lease"
    share = "" if said["full_rate"] >= 1 else f"{said['full_rate']:.0%} "
    return f"{state}; {share}measured in full"


def _entries(frame: Frame, width: int) -> Iterator[_Entry]:
    """Yield the entries from top to bottom."""
    sums, status = frame.sums, frame.status
    run = Text.assemble((printable(str(status.get("run_name", ""))), "bold"), (f"  {frame.run_id[:16]}…", "dim"))
    if width >= 80:
        run.append(f"   node {frame.node[:16]}…", "dim")
    yield _Entry("run", run if status else Text(f"{frame.run_id[:16]}…", "dim"), 8)
    if said := _profile(status):
        yield _Entry("shown as", Text(said), 8)
    yield _Entry("coordinator", _coordinator(frame), 6)
    yield _Entry("now", _now(frame), 0)
    if status.get("broadcast"):
        yield _Entry("fetching", _fetching(status["broadcast"], width), 1)
    if not status:
        return
    yield _Entry("policy", _policy(sums), 7)
    yield _Entry("tokens", _tokens(sums), 3)
    yield _Entry("slots", Text(_slots(sums)), 4)
    yield _Entry("verdicts", _colored(_verdicts(sums), bad=sums["rejected"]), 2)
    reasons = list(sums["reasons"].items())
    for place, (reason, count) in enumerate(reasons[:MOST_REASONS]):
        yield _Entry("", _reason(reason, count), 9 + place)
    if len(reasons) > MOST_REASONS:
        yield _Entry("", Text(f"and {_number(len(reasons) - MOST_REASONS, 'other reason')}", "dim"), 9 + MOST_REASONS)
    yield _Entry("credit", Text(_credit(sums)), 5)
    if sums["standing"] is not None:
        said = sums["standing"]
        style = "bold red" if said["banned"] else "yellow" if said["strikes"] else ""
        yield _Entry("standing", Text(standing_line(said), style), 6)
    yield _Entry("page", Text(printable(page_of(str(status["coordinator"]), frame.node))), 8)


def _profile(status: Mapping[str, Any]) -> str:
    """Return what the run's pages show of this node beside its id, "" for nothing."""
    return ": ".join(said for said in (status.get("nickname"), status.get("hardware")) if said)


def _title(frame: Frame, width: int) -> Text:
    name, elapsed = " swarmproof worker ", f" {clock(frame.sums['seconds'])} "
    rest = width - cell_len(name) - cell_len(elapsed) - 4
    return Text.assemble(("──", "dim"), (name, "bold"), ("─" * max(0, rest), "dim"), (elapsed, "bold"), ("──", "dim"))


def _coordinator(frame: Frame) -> Text:
    if not frame.status:
        return Text(printable(", ".join(frame.coordinators)) or "asking the run's peers")
    url, others = printable(str(frame.status["coordinator"])), len(frame.status["endpoints"]) - 1
    said = Text(url)
    if others > 0:
        said.append(f"  and {_number(others, 'other')}", "dim")
    if frame.status["network"] is not None:
        said.append(f"  {_number(len(frame.status['network']['neighbours']), 'peer')}", "dim")
    if frame.status["coordinator_away"]:
        said.append("  away", "bold red")
    return said


def _now(frame: Frame) -> Text:
    away = not frame.status or frame.status["coordinator_away"]
    said = Text(printable(frame.sums["doing"]), "yellow" if away else "bold")
    if frame.note:
        said.append(f"  {frame.note}", "dim")
    return said


def _fetching(fetch: Mapping[str, Any], width: int) -> Text:
    """Render a progress bar with share, size, rate, sources and time left."""
    done, total = fetch["done_bytes"], fetch["total_bytes"]
    if not total:
        return Text(f"{fetch['version']}  looking at what is here")
    share = min(1.0, done / total)
    columns = BAR_COLUMNS if width >= 72 else 8
    filled = round(share * columns)
    bar = Text.assemble(("━" * filled, "cyan"), ("━" * (columns - filled), "dim"))
    if done >= total:
        return Text.assemble(f"{fetch['version']}  ", bar, "  putting it together")
    left = "" if fetch["seconds_left"] is None else f", {clock(fetch['seconds_left'])} left"
    rate, sources = decimal(fetch["bytes_per_s"]), _number(fetch["sources"], "source")
    return Text.assemble(f"{fetch['version']}  ", bar, f"  {share:.0%} of {decimal(total)}, {rate}/s, {sources}{left}")


def _policy(sums: Mapping[str, Any]) -> Text:
    loaded = "none is loaded yet" if sums["policy"] is None else f"{sums['policy']}"
    said = Text(loaded)
    if sums["newest_policy"] is not None and sums["newest_policy"] != sums["policy"]:
        said.append(f", the newest is {sums['newest_policy']}")
    return said


def _tokens(sums: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (f"{sums['tokens_per_s']:,.0f}", "bold cyan"),
        f" a second now, {sums['mean_tokens_per_s']:,.0f} on average, {sums['tokens']:,} in all",
    )


def _slots(sums: Mapping[str, Any]) -> str:
    said = (
        f"{sums['under_way']} leased, {sums['generated']:,} generated, {sums['delivered']:,} delivered, "
        f"{sums['waiting']} waiting for a verdict"
    )
    for name in ("returned", "expired", "lost"):
        if sums[name]:
            said += f", {sums[name]:,} {'handed back' if name == 'returned' else name}"
    return said


def _verdicts(sums: Mapping[str, Any]) -> str:
    said = f"{sums['admitted']:,} admitted, {sums['rejected']:,} rejected"
    if sums["undecided"]:
        said += f", {sums['undecided']:,} undecided"
    earlier = sums["total"]["admitted"] - sums["admitted"], sums["total"]["rejected"] - sums["rejected"]
    if max(earlier) > 0:
        said += f"; before this start {earlier[0]:,} and {earlier[1]:,}"
    return said


def _colored(said: str, *, bad: int) -> Text:
    text = Text(said)
    text.highlight_regex(r"^[\d,]+ admitted", "green")
    if bad:
        text.highlight_regex(r"[\d,]+ rejected", "bold red")
    return text


def _reason(reason: str, count: int) -> Text:
    said = reason_of(reason)
    text = Text(f"{count:,} {reason}", "red")
    return text if said is None else Text.assemble(text, f"  {said.meaning} ", ("→ ", "bold"), said.todo)


def _credit(sums: Mapping[str, Any]) -> str:
    said = f"{_number(sums['credit_tokens'], 'token')} admitted"
    if sums["total"]["credit_tokens"] > sums["credit_tokens"]:
        said += f", {sums['total']['credit_tokens']:,} with those before this start"
    if sums["standing"] is not None and sums["standing"]["unvested_tokens"]:
        said += f"; {sums['standing']['unvested_tokens']:,} would be void after a rejection"
    return said


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _fold(entry: _Entry, width: int, console: Console) -> list[Text]:
    """Wrap an entry's text in the column right of its label."""
    if width < LEAST_COLUMNS:
        return list(entry.said.wrap(console, width))
    lines: Iterable[Text] = entry.said.wrap(console, width - LABEL_COLUMNS) or [Text()]
    labels = [entry.label]
    return [Text.assemble((f"{labels.pop() if labels else '':<{LABEL_COLUMNS}}", "dim"), each) for each in lines]


def _cut(text: Text, width: int) -> Text:
    text.rstrip()
    text.truncate(width)
    return text
