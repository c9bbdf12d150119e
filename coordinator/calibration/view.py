"""Terminal output of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coordinator.calibration.fit import single_value_limits
from coordinator.calibration.result import CalibrationResult, CheatOutcome
from node.protocol.evidence import STATISTICS, evidence_limit
from node.protocol.run import LimitsSpec

WIDTH = 100


def show(found: CalibrationResult, console: Console, *, written: Sequence[Path]) -> None:
    """Print the limits, what they mean for honest work and cheats, and the `written` files."""
    console.print(render(found, written=written))


def render(found: CalibrationResult, *, written: Sequence[Path]) -> RenderableType:
    """Render the page."""
    parts: list[RenderableType] = [_alone(found), _levels(found), _honest(found)]
    if found.recorded:
        parts.append(_recorded(found))
    if found.cheats:
        parts.append(_cheats(found))
    parts += [Text(f"! {line}", "yellow") for line in found.warnings]
    parts += [Text(f"written  {path}") for path in written]
    return Padding(Group(*parts), (1, 0, 1, 0))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim"
    )
    table.add_column(columns[0])
    for column in columns[1:]:
        # Else rich cuts words of the headings in 80 characters, and wraps no name.
        table.add_column(column, justify="right", min_width=max(map(len, column.split())))
    return table


def _alone(found: CalibrationResult) -> Table:
    table = _table("Limits of single values", "value", "most seen", "limit", "default")
    limits, defaults = found.spec.limits, LimitsSpec()
    for name in single_value_limits(found.spec.proofs):
        limit, default = getattr(limits, name), getattr(defaults, name)
        wide = "yellow" if limit > default else "green"
        table.add_row(name, f"{found.largest[name]:.3g}", Text(f"{limit:g}", wide), f"{default:g}")
    if found.spec.proofs.has_sketch:
        table.add_row("(proofs.sketch_step)", "", f"{found.spec.proofs.sketch_step:g}", "")
    return table


def _levels(found: CalibrationResult) -> Table:
    table = _table("Levels of honest work", "statistic", "mean", "spread of one value", "of a group", "counts at most")
    for name in STATISTICS:
        level = getattr(found.spec.limits.honest, name)
        if level is not None:
            values = (level.mean, level.variance**0.5, level.shared_variance**0.5, level.largest)
            table.add_row(name, *(f"{value:.3g}" for value in values))
    return table


def _honest(found: CalibrationResult) -> Table:
    nats = evidence_limit(found.spec.limits)
    table = _table(
        f"Honest work that no level was fitted to (evidence in nats, the limit is {nats:.1f})",
        "worker",
        "groups",
        "rollouts",
        "tokens",
        "rejected",
        "drifted",
        "most of a rollout",
        "of a group",
    )
    for one in found.honest:
        caught = one.caught
        rejected = Text(str(one.rejected_groups), "bold red" if one.rejected_groups else "green")
        drifted = Text(str(caught.drifted_groups), "bold red" if caught.drifted_groups else "green")
        table.add_row(
            one.name,
            f"{caught.groups:,}",
            f"{caught.rollouts:,}",
            f"{one.tokens:,}",
            rejected,
            drifted,
            f"{one.rollout_evidence:.1f}",
            f"{one.group_evidence:.1f}",
        )
    return table


def _recorded(found: CalibrationResult) -> Table:
    """Show other machines; cells are texts, since strangers chose these words."""
    table = _table(
        "Recordings of other machines, judged by limits that are fitted without them",
        "node",
        "rejected",
        "drifted",
        "most of a group",
        "widens",
        "fitted",
    )
    table.add_column("machine", ratio=1)
    for one in found.recorded:
        judged, machine = one.judged, one.machine
        threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
        fitted = "accepted" if one.accepted else "yes" if one.fitted else "no"
        table.add_row(
            Text(one.node[:16]),
            f"{judged.rejected_groups:,} of {judged.caught.groups:,}",
            f"{judged.caught.drifted_groups:,}",
            f"{judged.group_evidence:.1f}",
            f"{one.widened} x {one.ratio:.2g}" if one.ratio > 1 else "nothing",
            Text(fitted, "bold red" if judged.would_be_stopped else "green"),
            Text(f"{judged.name}: {machine.device}, {machine.instructions}, {threads}, torch {machine.torch}"),
        )
    return table


def _cheats(found: CalibrationResult) -> Table:
    table = _table(
        f"Cheats, {found.cheats[0].caught.groups} groups of {found.spec.sampling.group_size} each",
        "cheat",
        "rollouts rejected",
        "groups rejected",
        "stopped by drift",
    )
    table.add_column("mostly for", no_wrap=True)
    for one in found.cheats:
        caught = one.caught
        table.add_row(
            one.name,
            _share(caught.rollout_share),
            _share(one.rejected_groups / max(1, caught.groups)),
            "-" if caught.first_drifted is None else f"at slot {caught.first_drifted}",
            _reason(one),
        )
    return table


def _share(share: float) -> Text:
    return Text(f"{share:.0%}", "green" if share >= 1 else "yellow" if share >= 0.5 else "red")


def _reason(one: CheatOutcome) -> str:
    return next((figure for figure, _ in one.by.most_common(1)), "nothing")
