"""`swarmproof doctor`: checks of this machine before a worker or a relay starts.

Nothing is changed, and nothing that may be broken is imported (`node.doctor.packages`). Checks whose option was not
given are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import click
import psutil
from rich.console import Console

from node.doctor import machine, packages
from node.doctor.chat import check_chat
from node.doctor.coordinator import check_coordinator
from node.doctor.model import check_first_policy, check_folder, check_submission_size
from node.doctor.policy import Footprint, read_footprint
from node.doctor.report import Check, exit_code, problem, render_json, show
from node.doctor.sandbox import check_sandbox
from node.doctor.trial import Trial, check_trial
from node.errors import ConfigError
from node.policy.inspection import tiny_policy
from node.protocol.run import BatchSpec, RunSpec, parse_run_toml
from shardcast.files import read_bounded

MAX_RUN_BYTES: Final = 256 * 1024
USUAL_TOKENS: Final = 4096
"""Of one sequence, where no run.toml says."""

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """The machine's intended use; None means not checked, or estimated. `run_trial` may raise NoAnswer."""

    engine: Literal["torch", "vllm"] = "torch"
    state: Path
    key: Path | None = None
    coordinator: str | None = None
    run_file: Path | None = None
    policy: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    run_trial: Callable[[RunSpec | None], Trial] | None = None


def run_doctor(settings: DoctorSettings, *, as_json: bool) -> int:
    """Run and print all checks; return the exit code: 1 if there is a problem, else 0."""
    spec = None if settings.run_file is None else _read_run(settings.run_file)
    if as_json:
        checks = list(examine(settings, spec))
        click.echo(render_json(checks))
        return exit_code(checks)
    console = Console()
    checks = []
    with console.status("looking at Python and torch…") as status:
        for check in examine(settings, spec):
            checks.append(check)
            status.update(f"{len(checks)} looked at, last {check.name.replace('_', ' ')}…")
    show(checks, console, left_out=_left_out(settings))
    return exit_code(checks)


def _left_out(settings: DoctorSettings) -> list[str]:
    """List the checks whose options were not given."""
    wanted = {
        "the coordinator and the clock (--coordinator URL)": settings.coordinator,
        "whether a policy fits (--policy FILE or FOLDER)": settings.policy,
        "the key (--key FILE)": settings.key,
        "a relay's port (--port PORT)": settings.port,
        "whether its work would be admitted (--try)": settings.run_trial,
    }
    return [what for what, given in wanted.items() if given is None]


def examine(settings: DoctorSettings, spec: RunSpec | None) -> Iterator[Check]:
    """Run every check, in the order in which problems should be fixed."""
    footprint, complaint = _read_policy(settings.policy)
    if complaint is not None:
        yield complaint
    yield from _examine_model(settings, spec)
    installed = packages.list_installed()
    yield packages.check_python()
    torch, cuda = packages.check_torch(installed)
    yield torch
    yield packages.check_torchvision(installed)
    wanted = settings.engine == "vllm"
    yield packages.check_vllm(installed, wanted=wanted)
    on_gpu = False
    if wanted and "vllm" in installed.modules:
        on_gpu = yield from _examine_for_vllm(installed, cuda, footprint, spec)
    yield _memory(settings.engine, None if on_gpu else footprint, spec)
    yield machine.check_swap(psutil.swap_memory().used)
    yield _disk(settings.state, footprint, spec)
    yield machine.check_open_files()
    yield check_sandbox(() if spec is None else spec.environments)
    if settings.key is not None:
        yield machine.check_key(settings.key)
    if settings.port is not None:
        yield machine.check_port(settings.host, settings.port)
    if settings.coordinator is not None:
        yield from check_coordinator(settings.coordinator)
    if settings.run_trial is not None:
        yield check_trial(partial(settings.run_trial, spec))


def _examine_model(settings: DoctorSettings, spec: RunSpec | None) -> Iterator[Check]:
    """Check a model's folder, and run.toml against it; a policy file was checked by whoever published it."""
    if spec is not None:
        yield check_submission_size(spec)
    if settings.policy is not None:
        if settings.policy.is_dir():
            yield from check_folder(settings.policy, spec)
        return
    # The folder is on the operator's machines; whoever contributes fetches the policy, and has none.
    if spec is not None and (tiny_policy(spec.model.initial) is not None or Path(spec.model.initial).is_dir()):
        yield from check_first_policy(spec)
        yield from check_chat(spec)


def _examine_for_vllm(
    installed: packages.Installed, cuda: str | None, footprint: Footprint | None, spec: RunSpec | None
) -> Generator[Check, None, bool]:
    """Run the checks that only vLLM needs; return whether the weights go to a GPU."""
    gpus = packages.ProbeResult(answer=[]) if cuda is None else packages.find_gpus()
    yield packages.check_gpu(installed, cuda=cuda, gpus=gpus, driver=packages.has_nvidia_driver())
    yield packages.check_triton(installed)
    on_gpu = not installed.cpu_build and bool(gpus.answer)
    if on_gpu and footprint is not None:
        yield _gpu_memory(footprint, spec, free=max(gpu["free_bytes"] for gpu in gpus.answer))
    yield machine.check_shared_memory(
        machine.free_shared_memory(), need=machine.LEAST_SHARED_BYTES, certain=installed.cpu_build
    )
    return on_gpu


def _read_run(path: Path) -> RunSpec:
    try:
        return parse_run_toml(read_bounded(path, max_bytes=MAX_RUN_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; name the run's run.toml with --run.") from error


def _read_policy(path: Path | None) -> tuple[Footprint | None, Check | None]:
    if path is None:
        return None, None
    try:
        return read_footprint(path), None
    except ConfigError as error:
        return None, problem("policy", f"{error}.", advice="Name a policy of the run with --policy.")


def _sequence_tokens(spec: RunSpec | None) -> int:
    return USUAL_TOKENS if spec is None else spec.sampling.most_tokens


def _item_bytes(spec: RunSpec | None) -> int | None:
    return None if spec is None else _DTYPE_BYTES[spec.model.dtype]


def _memory(engine: str, footprint: Footprint | None, spec: RunSpec | None) -> Check:
    need = machine.memory_needed(engine, footprint, tokens=_sequence_tokens(spec), dtype_bytes=_item_bytes(spec))
    what = f"the {engine} engine" + (" with this policy" if footprint is not None else "")
    return machine.check_memory(need, free=machine.free_memory(), what=what)


def _gpu_memory(footprint: Footprint, spec: RunSpec | None, *, free: int) -> Check:
    item_bytes = _item_bytes(spec)
    need = footprint.weight_bytes(item_bytes) + footprint.sequence_bytes(_sequence_tokens(spec), item_bytes)
    return machine.check_gpu_memory(need, free=free)


def _disk(state: Path, footprint: Footprint | None, spec: RunSpec | None) -> Check:
    """Check room for the versions that a worker keeps where none has a delta, and the next one while it arrives."""
    if footprint is None:
        return machine.check_disk(state, need=machine.LEAST_DISK_BYTES, what="a run")
    versions = (BatchSpec() if spec is None else spec.batch).max_async + 2
    return machine.check_disk(
        state, need=versions * footprint.file_bytes, what=f"keeping {versions} versions of this policy"
    )
