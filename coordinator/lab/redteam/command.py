"""The command line of the red team. What it runs is imported when it runs: every other command loads this."""

from __future__ import annotations

from pathlib import Path

import click

from node.commands.options import EXISTING_FILE, FOLDER, json_line, json_option, number_option

EXIT_SOMETHING_PASSED = 1
EXIT_INTERRUPTED = 130


@click.command()
@click.option(
    "--hostile",
    type=click.FloatRange(0, 0.9),
    metavar="SHARE",
    default=0.33,
    show_default=True,
    help="Of all submitted slots, that attackers send; 0 for a run without any.",
)
@number_option("--steps", "Training steps.", most=10_000, default=30)
@number_option("--workers", "Honest workers.", most=64, default=2)
@number_option("--seed", "Of the start.", least=0, most=2**31 - 1, default=2, metavar="NUMBER")
@click.option("--attacks", metavar="NAME,NAME", help="Only these; `--attacks help` lists them.")
@click.option(
    "--run",
    "run_file",
    type=EXISTING_FILE,
    help="A run.toml to attack instead of the red team's own; --steps and --seed are then its own.",
)
@click.option(
    "--folder",
    type=FOLDER,
    default=Path("runs"),
    show_default=True,
    help="Where the run's folder is made, named by the time.",
)
@number_option("--tolerance", "Honest slots that may be rejected.", least=0, default=0)
@click.option("--headless", is_flag=True, help="A line for each step instead of the live view.")
@json_option("End with the result as one line of JSON on stdout.")
def redteam(
    *,
    hostile: float,
    steps: int,
    workers: int,
    seed: int,
    attacks: str | None,
    run_file: Path | None,
    folder: Path,
    tolerance: int,
    headless: bool,
    as_json: bool,
) -> None:
    """Attack a swarm on this machine with everything there is, and print who got how far.

    \b
    Example:
      swarmproof redteam --hostile 0.33 --steps 30

    Coordinator, verifier, trainer, relays, honest workers and attackers are processes that speak HTTP with each
    other. Ends with 1 if anything hostile got through, or an honest slot was rejected.
    """
    from coordinator.lab.redteam.attacks import ATTACKS
    from coordinator.lab.redteam.campaign import Campaign, CampaignSettings
    from coordinator.lab.redteam.view import render

    names = tuple(attacks.split(",")) if attacks else ()
    if names == ("help",):
        for name, attack in ATTACKS.items():
            click.echo(f"{name:20} {attack.about}")
        return
    if unknown := set(names) - set(ATTACKS):
        raise click.BadParameter(f"no attack is called {', '.join(sorted(unknown))}", param_hint="--attacks")
    settings = CampaignSettings(
        hostile=hostile,
        steps=steps,
        workers=workers,
        seed=seed,
        attacks=names,
        out=folder,
        run_toml=None if run_file is None else run_file.read_text(encoding="utf-8"),
        headless=headless,
        as_json=as_json,
    )
    campaign = Campaign(settings)
    try:
        result = campaign.run()
    except KeyboardInterrupt:
        click.echo("Stopped: every process of the swarm has ended.", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    campaign.console.print(render(result))
    campaign.console.print(f"Result: {campaign.folder / 'redteam.json'}", soft_wrap=True)
    if as_json:
        click.echo(json_line(result))
    if not result.is_sound or result.honest_rejected > tolerance:
        raise click.exceptions.Exit(EXIT_SOMETHING_PASSED)
