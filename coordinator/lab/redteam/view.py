"""The table that `swarmproof redteam` ends with."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coordinator.lab.redteam.tally import AttackResult, AttackRow

_AUDIT_WORDS: dict[int | None, str] = {0: "agrees", 1: "DISAGREES", 2: "incomplete"}


def render(result: AttackResult) -> RenderableType:
    """Render every attack with its outcome."""
    return Group(Padding(_attacks(result), (1, 0)), _totals(result))


def _attacks(result: AttackResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attack", no_wrap=True)
    table.add_column("tries", justify="right")
    table.add_column("got through", justify="right")
    table.add_column("stopped by")
    for row in result.attacks:
        through = Text(str(row.succeeded), "bold red" if row.succeeded else "")
        table.add_row(row.attack, str(row.tries), through, _stopped(row))
    return table


def _stopped(row: AttackRow) -> Text:
    said = Text(", ".join(f"{code} {count}" for code, count in row.stopped.items()))
    if row.honest:
        said.append(f"{'; ' if row.stopped else ''}{row.honest} done honestly", "dim")
    if not row.tries and not row.honest:
        said.append("not tried", "yellow")
    return said


def _totals(result: AttackResult) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("hostile", f"{result.hostile_admitted} of {result.hostile_slots} slots admitted")
    grid.add_row("share", f"{result.hostile_share:.1%} of {result.slots} slots, by {result.identities} identities")
    grid.add_row("honest", f"{result.honest_rejected} of {result.honest_slots} slots rejected")
    if result.rewards:
        grid.add_row("reward", f"{result.rewards[0]:.3f} -> {result.rewards[-1]:.3f} in {result.steps} steps")
    if result.audit is not None:
        grid.add_row("audit", _AUDIT_WORDS.get(result.audit.exit_code, "failed"))
    grid.add_row("time", f"{result.seconds:.0f} s")
    return grid
