"""The command line of the demonstration. What it runs is imported when it runs: every other command loads this."""

from __future__ import annotations

from pathlib import Path

import click

from node.commands.engine_options import ENGINES
from node.commands.options import FOLDER, json_option, number_option
from node.errors import ConfigError
from node.policy.families import TINY_ATTENTION, TINY_FAMILIES, engines_of

EXIT_INTERRUPTED = 130


@click.command()
@number_option("--steps", "Training steps; 30 show the gain.", most=10_000, default=30)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("runs"),
    show_default=True,
    help="Where the run's folder is made, named by the time.",
)
@click.option("--headless", is_flag=True, help="A line for each step instead of the live view.")
@json_option("End with the summary as one line of JSON on stdout.")
@number_option("--seed", "Of the warm start.", least=0, most=2**31 - 1, default=2, metavar="NUMBER")
@click.option(
    "--engine",
    type=ENGINES,
    default="torch",
    show_default=True,
    help="Of the honest workers: three with torch, or one with vLLM.",
)
@click.option(
    "--model",
    type=click.Choice(TINY_FAMILIES),
    default="tiny",
    show_default=True,
    help="Family of the policy: a small Llama, one with windows or with experts, or a recurrent one.",
)
@click.option(
    "--keep", is_flag=True, help="Let the swarm go on until Ctrl-C, and keep its data: look around, audit it."
)
def demo(
    *, steps: int, out: Path, headless: bool, as_json: bool, seed: int, engine: str, model: str, keep: bool
) -> None:
    """Run a whole swarm on this machine, hostile workers included.

    \b
    Example:
      swarmproof demo

    It takes a few minutes on two cores, and leaves report.html and summary.json in a folder under runs/.
    Ctrl-C stops every process.
    """
    from coordinator.lab.demo.orchestration import Demonstration, DemoSettings
    from node.commands.engine_options import check_engine

    check_engine(engine)
    if engine not in engines_of(TINY_ATTENTION.get(model, model)):
        raise ConfigError(f"vLLM has no model for {model} policies.", code="wrong_engine")
    settings = DemoSettings(
        steps=steps, out=out, headless=headless, as_json=as_json, seed=seed, engine=engine, model=model, keep=keep
    )
    try:
        Demonstration(settings).run()
    except KeyboardInterrupt:
        click.echo("Stopped: every process of the swarm has ended.", err=True)
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
