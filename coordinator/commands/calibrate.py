"""`swarmproof calibrate`: the limits that fit a run (`coordinator.calibration`)."""

from __future__ import annotations

import asyncio
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from coordinator.commands.evaluate import check_is_policy
from coordinator.commands.options import run_file_option
from coordinator.errors import BadConfiguration
from node.commands.dataset_options import datasets_folder, datasets_option
from node.commands.engine_options import ENGINES, check_engine, compute_options, import_models, refuse_vllm_options
from node.commands.options import EXISTING_FILE, FILE, FOLDER, json_option, key_option, number_option
from node.runtime.extras import install_hint

if TYPE_CHECKING:  # imports torch, too slow for --help
    from coordinator.calibration.procedure import CalibrationSettings
    from coordinator.calibration.recording import ReadRecording
    from coordinator.calibration.result import CalibrationResult
    from node.protocol.run import RunSpec


@click.command()
@run_file_option("The run.toml whose limits are sought.")
@click.option(
    "--policy",
    type=EXISTING_FILE,
    help="A policy file to calibrate with.  [default: the run's first policy]",
)
@click.option(
    "--engine",
    "engines",
    type=ENGINES,
    multiple=True,
    default=["torch"],
    show_default=True,
    help="An engine of honest workers; repeatable.",
)
@click.option(
    "--verifier",
    type=ENGINES,
    default="torch",
    show_default=True,
    help="The --engine of the run's verifiers, which the limits are fitted to.",
)
@number_option(
    "--groups",
    "Honest groups of each engine and attention kernel; half of them check what the others say.",
    least=12,
    most=1_000_000,
    default=128,
)
@number_option("--cheat-groups", "Groups of each cheat; 0 tries none.", least=0, most=1_000_000, default=32)
@click.option(
    "--false-rejections",
    type=click.FloatRange(1e-100, 0.1),
    metavar="PROBABILITY",
    help="How likely it may be that one sum of honest values is rejected.  [default: the run's]",
)
@click.option(
    "--out",
    type=FILE,
    help="The file to write.  [default: beside --run, with .calibrated before .toml]",
)
@click.option(
    "--report",
    type=FOLDER,
    help="A folder for calibration.json and calibration.png.",
)
@click.option(
    "--record",
    type=FILE,
    help="Only write how far this machine's honest work deviates, for the run's operator; fit nothing.",
)
@key_option("With --record: the key that signs, made if missing; a node's own is in its state folder.")
@click.option(
    "--from",
    "recorded",
    type=EXISTING_FILE,
    multiple=True,
    help="A recording of another machine: fit limits to it as well, if they would admit it; repeatable.",
)
@click.option(
    "--accept",
    "accepted",
    type=EXISTING_FILE,
    multiple=True,
    help="A recording of a machine that you trust: fit limits to it, however wide they become; repeatable.",
)
@datasets_option
@compute_options
@json_option("One line of JSON instead of tables.")
def calibrate(
    *,
    run_file: Path,
    policy: Path | None,
    engines: tuple[str, ...],
    verifier: str,
    groups: int,
    cheat_groups: int,
    false_rejections: float | None,
    out: Path | None,
    report: Path | None,
    record: Path | None,
    key: Path | None,
    recorded: tuple[Path, ...],
    accepted: tuple[Path, ...],
    datasets: Path | None,
    device: str,
    threads: int | None,
    as_json: bool,
    **vllm: Any,
) -> None:
    """Find the limits that fit a run's model and machines, and see which cheats they catch.

    \b
    Example:
      swarmproof calibrate --run run.toml --engine torch --engine vllm --verifier vllm --report calibration/
      swarmproof calibrate --run run.calibrated.toml --record this-machine.recording --key node.key
      swarmproof calibrate --run run.calibrated.toml --from one.recording --from another.recording

    It draws honest work on this machine, measures it as the run's verifiers will, fits [limits] and the sketch's step,
    tries cheats against them, and writes a copy of run.toml that keeps your comments. Start the run with that copy:
    limits cannot change later. --record writes what was measured for somebody else's --from, and no tokens.
    """
    if record is not None and (key is None or out or report or recorded or accepted):
        raise click.UsageError("--record needs --key, and takes none of --out, --report, --from and --accept.")
    _require(*(("tomlkit",) if record is None else ()), *(("matplotlib",) if report else ()))
    if policy is not None:
        check_is_policy(policy)
    refuse_vllm_options(*engines, verifier)
    for engine in (*engines, verifier):
        check_engine(engine, device)
    import_models()

    from coordinator.calibration.procedure import CalibrationSettings
    from coordinator.run.chat import resolve_chat
    from coordinator.run.definition import read_run_file
    from node.datasets.folder import find_datasets

    folder = datasets_folder(run_file, datasets)
    text, spec = read_run_file(run_file, datasets=folder)
    resolved = resolve_chat(spec)
    settings = CalibrationSettings(
        engines=engines,
        verifier=verifier,
        device=device,
        threads=threads,
        vllm=vllm,
        policy=policy,
        groups=groups,
        cheat_groups=0 if record else cheat_groups,
        false_rejections=false_rejections,
        datasets=find_datasets(folder, spec.dataset_files),
        recordings=[_read_recording(path, resolved, verifier) for path in recorded],
        accepted=[_read_recording(path, resolved, verifier) for path in accepted],
    )
    if record is not None and key is not None:
        _record(resolved, settings, record, key, as_json=as_json)
    else:
        out = out or run_file.with_name(f"{run_file.stem}.calibrated.toml")
        _fit(text, spec, resolved, settings, out=out, report=report, as_json=as_json)


def _fit(
    text: str,
    spec: RunSpec,
    resolved: RunSpec,
    settings: CalibrationSettings,
    *,
    out: Path,
    report: Path | None,
    as_json: bool,
) -> None:
    """Calibrate the run of the run.toml `text`, write the files, and say what was found.

    `spec` is what that says, `resolved` the same with its chat template as data.
    """
    from rich.console import Console

    from coordinator.calibration.procedure import calibrate as run
    from coordinator.calibration.view import WIDTH, show
    from coordinator.calibration.write_limits import calibrated_text

    calibrated_text(text, spec, remarks=())  # fail early for a file that cannot take limits
    out.parent.mkdir(parents=True, exist_ok=True)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(run(resolved, settings))
    result = msgspec.structs.replace(found.spec, sampling=spec.sampling)  # a chat template stays a name in the file
    _write(out, calibrated_text(text, result, remarks=found.remarks).encode())
    line = found.render_json(out=str(out))
    written = [out, *(() if report is None else _write_report(report, found, line))]
    if as_json:
        click.echo(line)
    else:
        show(found, Console(width=None if os.isatty(1) else WIDTH), written=written)


def _record(spec: RunSpec, settings: CalibrationSettings, path: Path, key: Path, *, as_json: bool) -> None:
    """Write the recording of this machine, signed by the key in `key`."""
    from coordinator.calibration.procedure import record
    from coordinator.calibration.recording import seal_recording
    from node.keys.identity import load_or_create_key, node_id

    signer = load_or_create_key(key)
    found = asyncio.run(record(spec, settings))
    _write(path, seal_recording(found, signer))
    machine = found.machine
    if as_json:
        told = {"recording": str(path), "node": node_id(signer), "machine": msgspec.to_builtins(machine)}
        click.echo(json.dumps(told))
    else:
        workers = ", ".join(one.name for one in found.workers)
        click.echo(f"{workers} on {machine.device} ({machine.instructions}), signed by {node_id(signer)}: {path}")


def _read_recording(path: Path, spec: RunSpec, verifier: str) -> ReadRecording:
    from coordinator.calibration.recording import open_recording, read_file
    from shardcast.errors import PeerFault

    try:
        return open_recording(read_file(path), spec=spec, verifier=verifier)
    except PeerFault as error:
        raise type(error)(f"{path} is no recording for this run: {error}.", code=error.code) from error


def _write_report(folder: Path, found: CalibrationResult, line: str) -> tuple[Path, Path]:
    from coordinator.calibration.chart import draw_chart

    numbers, chart = folder / "calibration.json", folder / "calibration.png"
    _write(numbers, line.encode() + b"\n")
    draw_chart(found, chart)
    return numbers, chart


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise BadConfiguration(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here: "
            f"{install_hint('operator')}"
        )


def _write(path: Path, data: bytes) -> None:
    """Write `path` atomically: an operator's file may be there already."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
