"""`swarmproof coordinator --check`: what a start would refuse, found without creating anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from coordinator.errors import BadConfiguration, OlderDatabase, OtherRelease, Uncalibrated
from coordinator.run.chat import changed_keys
from coordinator.run.definition import UNCALIBRATED, is_calibrated, read_run_file
from coordinator.run.home import Home, find_home
from coordinator.storage.faults import DatabaseAway
from coordinator.storage.open_blobs import open_blobs
from node.commands.hints import HINTS
from node.datasets.folder import DATASETS
from node.doctor.chat import check_chat
from node.doctor.machine import LEAST_DISK_BYTES, check_disk
from node.doctor.model import check_first_policy, check_submission_size
from node.doctor.report import Check, Level, fine, problem, show, warning
from node.doctor.sandbox import check_sandbox, runs_code
from node.errors import IdentityError, NodeError
from node.keys.identity import load_key
from node.protocol.run import RunSpec


def preflight_checks(
    run_file: Path,
    key_file: Path,
    data: Path,
    *,
    database_url: str | None,
    blobs_url: str | None,
    model_elsewhere: bool,
    uncalibrated: bool,
) -> list[Check]:
    """Check run.toml, the run's key, its data folder and what its first log entry fixes; an existing run keeps that."""
    spec, key, found = _read_files(run_file, key_file, data)
    try:
        home = find_home(data, database_url)
    except (BadConfiguration, DatabaseAway) as error:
        advice = "Give --data and --database-url as the run has them, and start its database."
        return [*found, problem("data", f"{error}.", advice=advice)]
    except OlderDatabase as error:
        advice = "Stop all others, back up with the earlier release, then start the coordinator, which migrates it."
        return [*found, warning("data", f"{error}.", advice=advice)]
    except OtherRelease as error:
        advice = "Install that release: an older one cannot use it. Or give another --data and a new key."
        return [*found, problem("data", f"{error}.", advice=advice)]
    if home is not None:
        with closing(home.database):
            return [*found, _check_existing(home, spec, key)]
    found += [check_disk(data, need=LEAST_DISK_BYTES, what="a run"), *_check_blobs(blobs_url, data)]
    if spec is not None:
        found += _check_rules(spec, model_elsewhere=model_elsewhere, uncalibrated=uncalibrated)
    return found


def show_checks(checks: list[Check]) -> int:
    """Print `checks`; return the exit code: 2 if there is a problem, else 0."""
    show(checks, Console())
    return 2 if any(check.level is Level.PROBLEM for check in checks) else 0


def _read_files(
    run_file: Path, key_file: Path, data: Path
) -> tuple[RunSpec | None, Ed25519PrivateKey | None, list[Check]]:
    """Return the rules and the run's key, None for what cannot be read, and what was found of both."""
    spec, key, found = None, None, list[Check]()
    try:
        _, spec = read_run_file(run_file, datasets=data / DATASETS)
        found.append(fine("run_file", f"{run_file} defines the run {spec.name!r}."))
    except (BadConfiguration, NodeError) as error:
        found.append(problem("run_file", f"{error}.", advice="Correct the file."))
    try:
        key = load_key(key_file)
        found.append(fine("key", f"{key_file} is a key that its owner alone can read."))
    except IdentityError as error:
        advice = "Name the run's key with --key; `swarmproof keys new` makes one."
        found.append(problem("key", f"{error}.", advice=advice))
    return spec, key, found


def _check_rules(spec: RunSpec, *, model_elsewhere: bool, uncalibrated: bool) -> Iterator[Check]:
    """Check the rules of a run that is to begin, which then cannot change."""
    if not is_calibrated(spec):
        if uncalibrated:
            yield warning("limits", f"{UNCALIBRATED}.", advice="Calibrate before strangers join.")
        else:
            yield problem("limits", f"{UNCALIBRATED}.", advice=HINTS[Uncalibrated.code])
    yield check_submission_size(spec)
    if runs_code(spec.environments) and (check := check_sandbox(spec.environments)).level is not Level.OK:
        # A coordinator alone runs no code.
        yield warning("sandbox", check.sentence, advice="Mend it where this run is worked for, verified and audited.")
    if model_elsewhere:
        said = "The folder of model.initial was not looked at (--model-elsewhere)."
        yield warning("model", said, advice="Run this on the trainer's machine, without that option.")
    else:
        yield from check_first_policy(spec)
    yield from check_chat(spec)


def _check_blobs(url: str | None, data: Path) -> Iterator[Check]:
    """Check that the store that --blobs names can be opened here; nothing is asked of it."""
    if url is None:
        return
    try:
        open_blobs(url, data)
    except BadConfiguration as error:
        yield problem("blobs", f"{error}.", advice="Where blobs lie is fixed by the first start.")


def _check_existing(home: Home, spec: RunSpec | None, key: Ed25519PrivateKey | None) -> Check:
    """Check that the run in the data folder is the one of this file and this key."""
    if key is not None and key.public_key().public_bytes_raw() != home.public_key:
        return problem(
            "data", f"{home.folder} holds the run of another key.", advice="Give another --data, or that key."
        )
    if spec is not None and (changed := changed_keys(spec, home.spec)):
        said = f"{home.folder} holds a run that was started with another run.toml: {'; '.join(changed)}."
        return problem("data", said, advice="Give the old file, or another --data and a new key for a new run.")
    return fine("data", f"{home.folder} holds this run, whose rules and first policy are fixed.")
