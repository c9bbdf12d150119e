"""Experiment trackers besides the run's log: TensorBoard event files, and optionally Weights & Biases.

A tracker receives each finished step and never stops training: errors are logged once, and the next step is tried
again. A restarted trainer may report steps twice, but each is shown once: TensorBoard purges what follows a repeated
step, and W&B, whose steps only rise, ignores it (a repeated step has the same statistics).
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
from node.runtime.extras import install_hint

log = logging.getLogger(__name__)

MAX_ERROR = 300
"""Characters of an error that are logged."""


class Tracker(Protocol):
    """Receives each step's number (from 1, the version of the policy it made) and statistics."""

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Record a finished step; returns soon and raises nothing."""

    def close(self) -> None:
        """Close; no further steps follow."""


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """Trackers to use: `tensorboard` is a folder for event files, `wandb` a project."""

    tensorboard: Path | None = None
    wandb: str | None = None


class NullTracker:
    """Tracker that discards everything."""

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_tracker(settings: TrackerSettings, *, run_id: str, name: str, config: object, state: Path) -> Tracker:
    """Make the configured trackers; `config` is what W&B shows beside the curves, `state` the trainer's folder.

    Raises BadConfiguration for a missing package.
    """
    trackers: dict[str, Tracker] = {}
    if settings.tensorboard is not None:
        trackers["TensorBoard"] = TensorBoard(settings.tensorboard)
    if settings.wandb is not None:
        trackers["W&B"] = WeightsAndBiases(settings.wandb, run_id=run_id, name=name, config=config, folder=state)
    return GuardedTracker(trackers) if trackers else NullTracker()


def tracker_settings(
    *, state: Path, tensorboard: Path | None, no_tensorboard: bool, wandb: str | None
) -> TrackerSettings:
    """Derive the settings from command line options; a missing TensorBoard writer is tolerated unless requested."""
    if no_tensorboard:
        if tensorboard is not None:
            raise BadConfiguration("--tensorboard and --no-tensorboard contradict each other")
        return TrackerSettings(wandb=wandb)
    if tensorboard is None and find_spec("tensorboardX") is None:
        log.warning(
            "TensorBoard is off, its writer is not installed: %s, or pass --no-tensorboard", install_hint("operator")
        )
        return TrackerSettings(wandb=wandb)
    return TrackerSettings(tensorboard=tensorboard or state / "tensorboard", wandb=wandb)


class GuardedTracker:
    """Forwards to several trackers, isolating their errors."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = trackers
        self._failing: set[str] = set()

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Forward to each tracker."""
        for name, tracker in self._trackers.items():
            try:
                tracker.step(step, stats)
                self._failing.discard(name)
            except Exception as error:  # noqa: BLE001  (a tracker must not stop training)
                if name not in self._failing:
                    log.warning("%s tracker failed at step %d: %s; still trying", name, step, str(error)[:MAX_ERROR])
                self._failing.add(name)

    def close(self) -> None:
        """Close each tracker."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001  (as above)
                log.warning("%s tracker failed to close: %s", name, str(error)[:MAX_ERROR])


class TensorBoard:
    """Event files in `folder`, one per start, which TensorBoard reads as one run.

    Written in the trainer's own thread: tensorboardX's SummaryWriter uses another one, which a full disk ends silently,
    and the trainer would then wait for it forever.
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
        """Write the step durably; raises OSError."""
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
            # Nothing after half an event is read: the next step begins another file.
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
        """Open a new file, marking that earlier ones end before `step`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{time.time_ns()}"  # TensorBoard reads files in name order
        self._file = self._events.EventsWriter(str(self._folder / "events"), filename_suffix=suffix)
        (self._path,) = self._folder.glob(f"*{suffix}")
        self._first = step
        start = self._event_pb2.SessionLog(status=self._event_pb2.SessionLog.START)
        self._write(step, session_log=start)

    def _write(self, step: int, **what: object) -> None:
        self._file.write_event(self._event_pb2.Event(wall_time=time.time(), step=step, **what))


class WeightsAndBiases:
    """One W&B run per run, across restarts; `folder` holds what is not uploaded yet.

    W&B receives the statistics and `config`, such as the run's public specification, but neither the command line
    (which may hold a database password) nor code, packages, output or machine data. Its key is its own business
    (`wandb login` or WANDB_API_KEY); WANDB_MODE=offline needs none, nor a network.
    """

    def __init__(self, project: str, *, run_id: str, name: str, config: object, folder: Path) -> None:
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
                name=name,
                config=msgspec.to_builtins(config),
                dir=folder,
                resume=None if _is_offline() else "allow",
                settings=settings,
            )
        except wandb.Error as error:
            raise BadConfiguration(f"--wandb: {str(error)[:MAX_ERROR]}") from error

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        """Pass the step to W&B's own process, which uploads it."""
        self._run.log({_tag(name): number for name, number in stats.items() if math.isfinite(number)}, step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


def _is_offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"


def _tag(name: str) -> str:
    """Prefix a metric: times apart from training metrics."""
    return f"time/{name}" if name.endswith("_seconds") else f"train/{name}"


def _require(package: str, option: str, *, extra: str) -> None:
    if find_spec(package) is None:
        raise BadConfiguration(f"{option} needs {package}: {install_hint(extra)}")
