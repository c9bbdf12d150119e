"""`swarmproof check`, with deferred imports: every command loads this module."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.commands.options import existing_run_options
from node.commands.click_ext import CouldNotRun, reported
from node.commands.options import EXISTING_FOLDER, json_option

if TYPE_CHECKING:
    from coordinator.integrity.differences import Difference
    from coordinator.run.home import Home

MOST_IN_JSON = 10_000


@click.command()
@existing_run_options
@click.option(
    "--state",
    "states",
    type=EXISTING_FOLDER,
    multiple=True,
    metavar="DIRECTORY",
    help="A verifier's or the trainer's folder, whose kept checkpoint the log must extend, too; repeatable.",
)
@click.option("--no-blobs", is_flag=True, help="Leave the blobs unread, which are most of the work.")
@click.option("--repair", is_flag=True, help="Write what follows from the log. Stop the run's processes first.")
@click.option(
    "--accept-rollback",
    is_flag=True,
    help="Compare nothing: have the log go on from the older state that it is in, and forget what was published since.",
)
@json_option("One JSON object instead of a line for each difference.")
@click.pass_context
def check(
    ctx: click.Context,
    *,
    data: Path,
    database_url: str | None,
    states: tuple[Path, ...],
    no_blobs: bool,
    repair: bool,
    accept_rollback: bool,
    as_json: bool,
) -> None:
    """Compare the database and the blobs with the run's log, from which most of them follows.

    \b
    Example:
      swarmproof check --data run/ --state verifier-1/ --state trainer/

    Each difference is one line: table, row and column, what is stored, and what follows from the log. The run may go on
    meanwhile, unless with --repair, which writes all that can be derived, or nothing.

    Exit code 0: it agrees, or all of it is repaired. 1: it does not. 2: it could not be checked.
    """
    with reported(CouldNotRun):
        from coordinator.run.home import open_home

        if accept_rollback and (repair or no_blobs):
            raise click.UsageError("--accept-rollback compares nothing: give it alone, with --data and --state.")
        home = open_home(data, database_url=database_url)
        with closing(home.database):
            if accept_rollback:
                _accept_rollback(home, states)
                return
            code = _check(home, states, repair=repair, with_blobs=not no_blobs, as_json=as_json)
    ctx.exit(code)


def _check(home: Home, states: tuple[Path, ...], *, repair: bool, with_blobs: bool, as_json: bool) -> int:
    from coordinator.integrity.check import check_state

    found: list[dict[str, Any]] = []
    count = left = 0

    def report(difference: Difference) -> None:
        nonlocal count, left
        count += 1
        left += not (repair and difference.can_repair)
        if not as_json:
            click.echo(difference.sentence)
        elif len(found) < MOST_IN_JSON:
            found.append(asdict(difference))

    check_state(home, states, repair=repair, with_blobs=with_blobs, report=report)
    if as_json:
        counts = {"differences": count, "repaired": count - left, "left": left}
        click.echo(json.dumps({"run_id": home.run_id} | counts | {"found": found}))
    elif not count:
        click.echo("everything is what the log says")
    else:
        click.echo(f"{count} differences, {count - left} repaired, {left} left")
    return int(left > 0)


def _accept_rollback(home: Home, states: tuple[Path, ...]) -> None:
    """Set aside the kept checkpoints that the log does not extend, and say what that means."""
    from coordinator.errors import HistoryLost
    from coordinator.integrity.check import histories
    from coordinator.storage import log

    with home.database.read() as connection:
        size = log.size(connection)
        abandoned = []
        for history in histories(home, states):
            try:
                history.check(connection)
            except HistoryLost:
                abandoned.append(history)
    for history in abandoned:
        kept = history.load()
        click.echo(f"{history.set_aside()}: the log had {kept.size if kept else 0} entries, and goes on from {size}")
    if not abandoned:
        click.echo("nothing to accept: the log continues what is kept")
        return
    click.echo(
        "What the run's key signs from now on contradicts what it signed of later entries, and everybody who has that "
        "can prove it: tell contributors and auditors when and why, and from which log size on. If a policy was "
        "published since, do not go on: begin a new run with a new key."
    )
