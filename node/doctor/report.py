"""Results of the doctor's checks, as a table or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.client.http import printable


class Level(StrEnum):
    """Result of a check: a warning works, but badly; a problem does not work."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `sentence` says what was found, `advice` what to do ("" if ok)."""

    name: str
    level: Level
    sentence: str
    advice: str = ""


def fine(name: str, sentence: str) -> Check:
    """Return a passed check."""
    return Check(name, Level.OK, sentence)


def warning(name: str, sentence: str, *, advice: str) -> Check:
    """Return a check with a warning."""
    return Check(name, Level.WARNING, sentence, advice)


def problem(name: str, sentence: str, *, advice: str) -> Check:
    """Return a check with a problem."""
    return Check(name, Level.PROBLEM, sentence, advice)


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if there is a problem, else 0."""
    return int(any(check.level is Level.PROBLEM for check in checks))


def render_json(checks: Sequence[Check]) -> str:
    """Render one object: `exit_code`, and `checks`, each with name, level, sentence and advice, which may be ""."""
    return json.dumps({"exit_code": exit_code(checks), "checks": [asdict(check) for check in checks]})


def show(checks: Sequence[Check], console: Console, *, left_out: Sequence[str] = ()) -> None:
    """Print the checks with their advice, a summary, and what was left out."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found, and what to do")
    for check in checks:
        found = Text(printable(check.sentence))
        if check.advice:
            found.append(f"\n→ {printable(check.advice)}", style="bold")
        table.add_row(check.name.replace("_", " "), Text(check.level, style=_STYLES[check.level]), found)
    console.print(table)
    console.print(Text(_conclusion(checks), style="bold"))
    if left_out:
        console.print(Text(f"Not looked at: {', '.join(left_out)}."))


def size(count: float) -> str:
    """Format bytes for a person."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _conclusion(checks: Sequence[Check]) -> str:
    counts = Counter(check.level for check in checks)
    said = [
        f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}"
        for level in (Level.PROBLEM, Level.WARNING)
        if counts[level]
    ]
    return f"{' and '.join(said)}." if said else "Everything that was looked at is in order."
