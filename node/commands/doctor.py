"""`swarmproof doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from node.commands.click_ext import CouldNotRun, reported
from node.commands.options import FILE, json_option, key_option, state_option


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="What the policy shall run on.",
)
@click.option("--coordinator", metavar="URL", help="Ask this coordinator, and compare clocks.")
@click.option(
    "--run",
    "run_file",
    type=FILE,
    help="The run's run.toml: how long sequences are, how many policies are kept, and for its operator "
    "whether it can begin.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="A policy file or a model's folder, to see whether it fits; with --run, whether the run can begin with it.",
)
@key_option("The key file to check.  [default: key in --state]")
@state_option("The folder whose disk to look at.  [default: ~/.swarmproof]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where a relay would listen, with --port.")
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help="See whether a relay could listen here.")
@json_option("One JSON object instead of a table.")
@click.pass_context
def doctor(
    ctx: click.Context,
    *,
    engine: Literal["torch", "vllm"],
    coordinator: str | None,
    run_file: Path | None,
    policy: Path | None,
    key: Path | None,
    state: Path | None,
    host: str,
    port: int | None,
    as_json: bool,
) -> None:
    """Check this machine before a worker or a relay starts.

    \b
    Example:
      swarmproof doctor --engine vllm --coordinator http://192.0.2.1:8700

    It says what to do about each problem, and changes nothing. Exit code 0: no problem. 1: there is one.
    2: the doctor could not run.
    """
    with reported(CouldNotRun):
        from node.doctor.checks import DoctorSettings, run_doctor

        settings = DoctorSettings(
            engine=engine,
            state=state or Path.home() / ".swarmproof",
            key=key or (state / "key" if state else None),
            coordinator=coordinator,
            run_file=run_file,
            policy=policy,
            host=host,
            port=port,
        )
        code = run_doctor(settings, as_json=as_json)
    ctx.exit(code)
