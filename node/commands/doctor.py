"""`swarmproof doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from node.commands.click_ext import CouldNotRun, reported
from node.commands.engine_options import ENGINES, check_engine, compute_options, refuse_vllm_options
from node.commands.options import FILE, json_option, key_option, number_option, state_option

if TYPE_CHECKING:
    from node.doctor.trial import Trial
    from node.protocol.run import RunSpec


@click.command()
@click.option(
    "--engine",
    type=ENGINES,
    default="torch",
    show_default=True,
    help="What the policy shall run on.",
)
@compute_options
@click.option(
    "--try",
    "tries",
    is_flag=True,
    help="Draw a group with the engine and have the reference verify it: with the --policy, or a tiny one, and by the "
    "limits of the --run. Minutes where the engine compiles.",
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
@number_option("--port", "See whether a relay could listen here.", most=65535, metavar="PORT")
@json_option("One JSON object instead of a table.")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    *,
    engine: Literal["torch", "vllm"],
    device: str,
    threads: int | None,
    tries: bool,
    coordinator: str | None,
    run_file: Path | None,
    policy: Path | None,
    key: Path | None,
    state: Path | None,
    host: str,
    port: int | None,
    as_json: bool,
    **compute: Any,
) -> None:
    """Check this machine before a worker or a relay starts.

    \b
    Example:
      swarmproof doctor --engine vllm --coordinator http://192.0.2.1:8700
      swarmproof doctor --engine vllm --try --policy ./Qwen3-4B --run run.toml

    It says what to do about each problem, and changes nothing. Exit code 0: no problem. 1: there is one.
    2: the doctor could not run.
    """
    with reported(CouldNotRun):
        from node.doctor.checks import DoctorSettings, run_doctor

        refuse_vllm_options(engine)
        if tries:
            check_engine(engine, device)

        def run_trial(spec: RunSpec | None) -> Trial:
            return _try(spec, policy, engine=engine, device=device, threads=threads, settings=compute)

        settings = DoctorSettings(
            engine=engine,
            state=state or Path.home() / ".swarmproof",
            key=key or (state / "key" if state else None),
            coordinator=coordinator,
            run_file=run_file,
            policy=policy,
            host=host,
            port=port,
            run_trial=run_trial if tries else None,
        )
        code = run_doctor(settings, as_json=as_json)
    ctx.exit(code)


def _try(spec: RunSpec | None, policy: Path | None, **engine: Any) -> Trial:
    """Run a trial in a process of its own; raises NoAnswer."""
    import msgspec

    from node.doctor.trial import SECONDS, Trial
    from node.policy.child import ask_child

    wanted = engine | {"spec": spec, "policy": None if policy is None else str(policy.absolute())}
    text = msgspec.json.encode(wanted).decode()
    return ask_child("node.commands.trial_process", text, answer=Trial, seconds=SECONDS)
