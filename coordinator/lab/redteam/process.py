"""A hostile process: `python -m coordinator.lab.redteam.process --attack NAME ...`, otherwise with a worker's options.

With several attacks it takes turns through them. It tells the truth about what it did in its own journal only.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import click

from coordinator.lab.redteam.attacks import ATTACKS
from coordinator.lab.redteam.raid import RaidSettings, open_raid
from node.commands.options import state_option
from node.runtime.signals import stop_on_signals


@click.command()
@click.option("--attack", "names", type=click.Choice(sorted(ATTACKS)), required=True, multiple=True, help="Repeatable.")
@click.option("--coordinator", required=True, help="The coordinator's URL.")
@click.option("--run-id", required=True, help="The run to attack.")
@state_option("This process's folder.", required=True)
@click.option("--share", type=click.FloatRange(0, 1), default=1.0, help="Of all submitted slots, to aim at.")
@click.option("--door-seconds", type=click.FloatRange(0.01, 3600), default=2.0, help="Between attacks at the door.")
@click.option("--address", help="The local address to come from.")
def main(
    *,
    names: tuple[str, ...],
    coordinator: str,
    run_id: str,
    state: Path,
    share: float,
    door_seconds: float,
    address: str | None,
) -> None:
    """Join a run dishonestly, to see it refuse what this process sends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = RaidSettings(
        coordinator=coordinator,
        run_id=run_id,
        state=state,
        attacks=tuple(ATTACKS[name]() for name in names),
        share=share,
        door_seconds=door_seconds,
        address=address,
    )

    async def work() -> None:
        stop = stop_on_signals()
        async with open_raid(settings) as raid:
            await raid.run(stop)

    asyncio.run(work())


if __name__ == "__main__":
    main()
