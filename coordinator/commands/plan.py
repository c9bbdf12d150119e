"""`swarmproof plan`, with deferred imports: every command loads this module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from node.commands.options import EXISTING_FILE, FILE, json_option, number_option

_READABLE = click.Path(path_type=Path, exists=True)


@click.command()
@click.option(
    "--model",
    type=_READABLE,
    metavar="FOLDER|config.json",
    required=True,
    help="The model, of which only sizes are read.",
)
@click.option("--gpus", metavar="4x80GB", required=True, help="The operator's: how many, and the memory of each.")
@number_option(
    "--verifier-gpus",
    "How many of them a verifier has; with 0 it has a CPU.  [default: the fewest that hold it]",
    least=0,
    most=64,
)
@number_option("--workers", "How many machines generate.", most=100_000, default=4)
@click.option(
    "--worker-gpus",
    metavar="1x24GB",
    help="Those of one worker, over which it splits the model.  [default: one like the operator's]",
)
@number_option("--relays", "How many pass policies on to them.", most=10_000, default=2)
@click.option(
    "--uplink", metavar="1Gbit", default="1Gbit", show_default=True, help="Of the trainer and of each relay, a second."
)
@click.option("--downlink", metavar="1Gbit", default="1Gbit", show_default=True, help="Of each relay and worker.")
@number_option(
    "--context",
    "The longest prompt with its completion.  [default: 4096, or the model's positions]",
    least=2,
    most=2**24,
    metavar="TOKENS",
)
@number_option("--group-size", "Completions of each problem.  [default: 8]", least=2, most=1024)
@click.option("--run", "run_file", type=EXISTING_FILE, help="Plan for the rules of this run.toml.")
@click.option("--write", "written", type=FILE, help="Write the proposed run.toml here; no file may be there.")
@json_option()
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    *,
    model: Path,
    gpus: str,
    verifier_gpus: int | None,
    workers: int,
    worker_gpus: str | None,
    relays: int,
    uplink: str,
    downlink: str,
    context: int | None,
    group_size: int | None,
    run_file: Path | None,
    written: Path | None,
    as_json: bool,
) -> None:
    """Compute what a run of a model takes on given machines.

    \b
    Example:
      swarmproof plan --model Qwen3-4B/ --gpus 4x80GB --worker-gpus 1x24GB \\
        --write run.toml

    Nothing is loaded, trained or sent: memory, disk, time and run.toml's values follow from the model's config.json,
    and the assumptions are printed with them. Ends with 1 if something does not fit.
    """
    if run_file is not None and (written or context or group_size):
        raise click.UsageError("--run brings its own rules: it takes neither --write, --context nor --group-size.")
    if written is not None and written.exists():
        raise click.UsageError(f"{written} exists: name a new file with --write.")
    from coordinator.errors import UnfitModel
    from coordinator.planning.amounts import parse_cards, parse_rate
    from coordinator.planning.plan import Machines, make_plan
    from coordinator.planning.proposal import first_spec, render_run_toml
    from coordinator.planning.shape import read_shape
    from coordinator.planning.view import render_json, render_plan
    from coordinator.run.definition import read_run_file
    from coordinator.run.first_policy import require_fit
    from node.policy.inspection import FirstPolicy
    from node.protocol.run import TeacherSpec

    cards = parse_cards(gpus)
    machines = Machines(
        cards=cards,
        verifier_cards=verifier_gpus,
        workers=workers,
        worker_cards=parse_cards(worker_gpus) if worker_gpus else replace(cards, count=1),
        relays=relays,
        uplink=parse_rate(uplink),
        downlink=parse_rate(downlink),
    )
    if verifier_gpus is not None and verifier_gpus >= cards.count:
        raise click.UsageError(f"--verifier-gpus {verifier_gpus} leaves the trainer none of {cards.count} GPUs.")
    shape = read_shape(model)
    if run_file is None:
        folder = model if model.is_dir() else model.parent
        spec = first_spec(shape, initial=str(folder.absolute()), context=context, group_size=group_size)
    else:
        _, spec = read_run_file(run_file)
    if spec.training.lora and not shape.runs_here:
        raise UnfitModel(
            f"{shape.family} is planned on paper alone, and [training.lora] has no adapters for experts: leave it out"
        )
    policy = FirstPolicy(
        family=shape.family, hidden=shape.hidden, positions=shape.positions, projections=shape.projections
    )
    require_fit(policy, spec)
    taught_by = spec.training.teacher
    teacher = read_shape(Path(taught_by.folder)) if isinstance(taught_by, TeacherSpec) else None
    found = make_plan(shape, spec, machines, is_given=run_file is not None, teacher=teacher)
    if written is not None:
        if not shape.runs_here:
            raise click.UsageError(f"--write is for models that this release can run, and {shape.family} is none.")
        written.write_text(render_run_toml(found), encoding="utf-8")
    click.echo(render_json(found) if as_json else render_plan(found, machines))
    ctx.exit(0 if found.fits else 1)
