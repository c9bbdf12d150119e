"""The command line of a calibration. What it runs is imported when it runs: every other command loads this."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

import click

from coordinator.errors import BadConfiguration


@click.command()
@click.option(
    "--run",
    "run_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="The run.toml whose limits are sought.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A policy file to calibrate with.  [default: the run's first policy]",
)
@click.option(
    "--engine",
    "engines",
    type=click.Choice(["torch", "vllm"]),
    multiple=True,
    default=["torch"],
    show_default=True,
    help="An engine of honest workers; repeatable.",
)
@click.option(
    "--groups",
    type=click.IntRange(12, 1_000_000),
    metavar="COUNT",
    default=128,
    show_default=True,
    help="Honest groups of each engine and attention kernel; half of them check what the others say.",
)
@click.option(
    "--cheat-groups",
    type=click.IntRange(0, 1_000_000),
    metavar="COUNT",
    default=32,
    show_default=True,
    help="Groups of each cheat; 0 tries none.",
)
@click.option(
    "--false-rejections",
    type=click.FloatRange(1e-100, 0.1),
    metavar="PROBABILITY",
    help="How likely it may be that one sum of honest values is rejected.  [default: the run's]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write.  [default: beside --run, with .calibrated before .toml]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for calibration.json and calibration.png.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="COUNT",
    help="CPU threads, as for a worker.",
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of tables.")
def calibrate(
    *,
    run_file: Path,
    policy: Path | None,
    engines: tuple[str, ...],
    groups: int,
    cheat_groups: int,
    false_rejections: float | None,
    out: Path | None,
    report: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Find the limits that fit a run's model and machines, and see which cheats they catch.

    \b
    Example:
      veriswarm calibrate --run run.toml --engine torch --engine vllm --report calibration/

    It draws honest work on this machine, measures it as a verifier does, fits [limits] and the sketch's step, tries
    cheats against them, and writes a copy of run.toml that keeps your comments. Start the run with that copy: limits
    cannot change later.
    """
    _require("tomlkit", *(("matplotlib",) if report else ()))
    from rich.console import Console

    from coordinator.calibration.calibrate import Settings
    from coordinator.calibration.calibrate import calibrate as run
    from coordinator.calibration.run_file import calibrated_text
    from coordinator.calibration.view import WIDTH, show
    from coordinator.run_file import read_run_file
    from node.engine_options import check_engine

    for engine in engines:
        check_engine(engine)
    text, spec = read_run_file(run_file)
    calibrated_text(text, spec, remarks=())  # a file that takes no limits is refused now, not at the end
    out = out or run_file.with_name(f"{run_file.stem}.calibrated.toml")
    out.parent.mkdir(parents=True, exist_ok=True)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        engines=engines,
        policy=policy,
        groups=groups,
        cheat_groups=cheat_groups,
        false_rejections=false_rejections,
        threads=threads,
    )
    found = asyncio.run(run(spec, settings))
    written = [out]
    _write(out, calibrated_text(text, found.spec, remarks=found.remarks))
    line = found.render_json(out=str(out))
    if report is not None:
        from coordinator.calibration.chart import draw_chart

        written += [report / "calibration.json", report / "calibration.png"]
        _write(written[1], line + "\n")
        draw_chart(found, written[2])
    if as_json:
        click.echo(line)
    else:
        show(found, Console(width=None if os.isatty(1) else WIDTH), written=written)


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise BadConfiguration(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here: "
            'pip install -e ".[calibrate]"'
        )


def _write(path: Path, text: str) -> None:
    """At once or not at all: what stands there may be the operator's."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
