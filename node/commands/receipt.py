"""`swarmproof receipt`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from node.commands.click_ext import CouldNotRun, reported
from node.commands.joining_options import run_id_option
from node.commands.options import json_option, state_folder, state_option
from node.commands.witness_options import witness_options, witness_rule


@click.group()
def receipt() -> None:
    """Check the receipts that a run has signed.

    \b
    Example:
      swarmproof receipt verify ~/.swarmproof/5f3c.../worker/receipts.ndjson \\
        --run-id 5f3c... --coordinator http://192.0.2.1:8700
    """


@receipt.command()
@click.argument("sources", nargs=-1, required=True, metavar="FILE|URL...")
@run_id_option
@click.option("--coordinator", metavar="URL", help="Whose log to ask.  [default: that of the first URL]")
@witness_options
@state_option()
@json_option("One JSON object instead of a line for each receipt.")
@click.pass_context
def verify(
    ctx: click.Context,
    *,
    sources: tuple[str, ...],
    run_id: str,
    coordinator: str | None,
    witnesses: tuple[str, ...],
    quorum: int | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Check receipts against the run's log: of files, such as a worker's receipts.ndjson, or of URLs.

    \b
    Example:
      swarmproof receipt verify http://192.0.2.1:8700/v1/receipts/7b1e... --run-id 5f3c...

    Exit code 0: the log holds what they promise. 1: it does not, or its witnesses have signed another one: either
    proves that the run broke its word. 2: it could not be checked, or too few witnesses have signed it.
    """
    with reported(CouldNotRun):
        from node.audit.receipts import coordinator_of, verify_receipts

        code = asyncio.run(
            verify_receipts(
                sources,
                run_id=run_id,
                url=coordinator_of(sources, coordinator),
                as_json=as_json,
                witnesses=witness_rule(witnesses, quorum),
                state_dir=state_folder(state, run_id, "audit"),
            )
        )
    ctx.exit(code)
