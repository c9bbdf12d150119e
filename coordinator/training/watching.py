"""Where a run's statistics go besides its log: TensorBoard's event files, and Weights & Biases if the operator says so.

A watcher is told each finished step. It never stops training: what goes wrong in one is said once, and the next step is
tried again. A trainer that was killed tells some steps twice; each is shown once, because a watcher that is told a step
which it may have been told before hides what it has from there on (TensorBoard), or leaves it as it is (W&B, whose
steps only rise; what a step that is done again says is the same).
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from coordinator.errors import BadConfiguration
from node.protocol.run import RunSpec

log = logging.getLogger(__name__)

MAX_ERROR = 300
"""Characters of an error that are logged."""


class Watcher(Protocol):
    """Whoever is told of each step: its number from 1, as the policy that it made, and its statistics by name."""

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Step `step` is finished; returns soon, and raises nothing."""

    def close(self) -> None:
        """Nothing comes any more."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Who watches: `tensorboard` is a folder for event files, `wandb` a project."""

    tensorboard: Path | None = None
    wandb: str | None = None


class Nobody:
    """Watches nothing."""

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def make_watcher(settings: WatchSettings, *, run_id: str, spec: RunSpec, state: Path) -> Watcher:
    """Those that `settings` ask for; `state` is the trainer's folder. Raises BadConfiguration for a missing package."""
    watchers: dict[str, Watcher] = {}
    if settings.tensorboard is not None:
        watchers["TensorBoard"] = TensorBoard(settings.tensorboard)
    if settings.wandb is not None:
        watchers["W&B"] = WeightsAndBiases(settings.wandb, run_id=run_id, spec=spec, folder=state)
    return Guarded(watchers) if watchers else Nobody()


def chosen_watchers(*, state: Path, tensorboard: Path | None, no_tensorboard: bool, wandb: str | None) -> WatchSettings:
    """What the command line's options come to; TensorBoard's writer may be missing, unless it was asked for."""
    if no_tensorboard:
        if tensorboard is not None:
            raise BadConfiguration("--tensorboard and --no-tensorboard contradict each other")
        return WatchSettings(wandb=wandb)
    if tensorboard is None and find_spec("tensorboardX") is None:
        log.warning("no curves for TensorBoard: pip install 'veriswarm[train]', or say --no-tensorboard")
        return WatchSettings(wandb=wandb)
    return WatchSettings(tensorboard=tensorboard or state / "tensorboard", wandb=wandb)


class Guarded:
    """Several watchers, of which none can stop training or the others."""

    def __init__(self, watchers: Mapping[str, Watcher]) -> None:
        self._watchers = watchers
        self._failing: set[str] = set()

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Tell each of them."""
        for name, watcher in self._watchers.items():
            try:
                watcher.step(step, stats)
                self._failing.discard(name)
            except Exception as error:  # noqa: BLE001  (a step must not be lost for its curve)
                if name not in self._failing:
                    log.warning("%s misses steps from %d on: %s", name, step, str(error)[:MAX_ERROR])
                self._failing.add(name)

    def close(self) -> None:
        """Close each of them."""
        for name, watcher in self._watchers.items():
            try:
                watcher.close()
            except Exception as error:  # noqa: BLE001  (as above)
                log.warning("%s was not closed: %s", name, str(error)[:MAX_ERROR])


class TensorBoard:
    """Event files in `folder`, one for each start, which TensorBoard reads as one run.

    Written in the trainer's own thread: tensorboardX's SummaryWriter has another one write, which a full disk ends
    without a word, and the trainer would then wait for it for ever.
    """

    def __init__(self, folder: Path) -> None:
        _require("tensorboardX", "--tensorboard", extra="train")
        self._folder = folder
        self._events: Any = importlib.import_module("tensorboardX.event_file_writer")
        self._event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        self._summary_pb2: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._file: Any = None
        self._path = folder
        self._first = self._last = 0

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Write the step and have it on disk; raises OSError."""
        if step <= self._last:
            self.close()
        value = self._summary_pb2.Summary.Value
        values = [value(tag=_tag(name), simple_value=number) for name, number in stats.items()]
        try:
            if self._file is None:
                self._open(step)
            self._write(step, summary=self._summary_pb2.Summary(value=values))
            self._file.flush()
        except OSError:
            # What follows half an event is not read: the next step begins another file.
            self._file = None
            if step == self._first:
                self._path.unlink(missing_ok=True)
            raise
        self._last = step

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, step: int) -> None:
        """A new file, which says that earlier ones end before `step`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # TensorBoard reads files by the order of their names
        self._file = self._events.EventsWriter(str(self._folder / "events"), filename_suffix=suffix)
        (self._path,) = self._folder.glob(f"*{suffix}")
        self._first = step
        start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._write(step, session_log=start)

    def _write(self, step: int, **what: object) -> None:
        self._file.write_event(self._event_pb2.Event(wall_time=time.time(), step=step, **what))


class WeightsAndBiases:
    """One W&B run for one run, however often the trainer starts; `folder` has what is not uploaded yet.

    W&B is told the statistics and the run's public specification. It collects neither the command line, which may name
    a database with its password, nor code, packages, output or the machine. Its key is its own business
    (`wandb login` or WANDB_API_KEY); WANDB_MODE=offline needs none, nor a network.
    """

    def __init__(self, project: str, *, run_id: str, spec: RunSpec, folder: Path) -> None:
        _require("wandb", "--wandb", extra="wandb")
        wandb: Any = importlib.import_module("wandb")
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=project,
                id=run_id[:32],
                name=spec.name,
                config=msgspec.to_builtins(spec),
                dir=folder,
                resume=None if _is_offline() else "allow",
                settings=settings,
            )
        except wandb.Error as error:
            raise BadConfiguration(f"--wandb: {str(error)[:MAX_ERROR]}") from error

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Hand the step to W&B's own process, which uploads it."""
        self._run.log({_tag(name): number for name, number in stats.items() if math.isfinite(number)}, step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def _is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"


def _tag(name: str) -> str:
    """Times apart from what was learned."""
    return f"time/{name}" if name.endswith("_seconds") else f"train/{name}"


def _require(package: str, option: str, *, extra: str) -> None:
    if find_spec(package) is None:
        raise BadConfiguration(f"{option} needs {package}: pip install 'veriswarm[{extra}]'")
