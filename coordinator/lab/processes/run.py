"""A swarm from its start to its audit, watched and shown: what the demonstration and the red team have in common."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from coordinator.lab.processes.errors import SwarmTooSlow
from coordinator.lab.processes.layout import Swarm
from coordinator.lab.processes.resources import Meter
from coordinator.lab.processes.summary import AuditRow, Observed
from coordinator.lab.processes.supervisor import Supervisor, interrupted_by_signals, launched
from coordinator.lab.processes.view import LiveView, PlainView, SwarmPicture
from coordinator.lab.processes.watch import SwarmSnapshot, SwarmWatcher
from node.runtime.terminal import supports_live_display

FRAME_SECONDS = 0.25
STALLED_SECONDS = 240.0
AUDIT_SAMPLE = 20
AUDIT_SECONDS = 180.0
STOPPING = "Stopping every process, which takes some seconds; Ctrl-C again kills them."


class SwarmRun:
    """One swarm, shown on `console`: live on a terminal, unless `headless`."""

    def __init__(self, swarm: Swarm, console: Console, *, title: str, headless: bool) -> None:
        self.swarm = swarm
        self.console = console
        self.watcher = SwarmWatcher(swarm)
        self._title = title
        self._started_at = time.time()
        self._meter = Meter()
        live = not headless and supports_live_display(console.file)
        self._view: LiveView | PlainView = LiveView(console.file) if live else PlainView(console.file)
        self._moved_at = time.monotonic()
        self._moved: object = None

    @contextlib.contextmanager
    def started(self) -> Iterator[Supervisor]:
        """Context manager around the swarm's processes; every one has ended when it is left."""
        with (
            interrupted_by_signals(),
            self._logged(),
            Supervisor(self.swarm.folder / "logs") as supervisor,
        ):
            yield supervisor

    @contextlib.contextmanager
    def watched(self, supervisor: Supervisor) -> Iterator[None]:
        """Start the processes, watch them, and show them."""
        self._meter.start()
        self.watcher.start()
        try:
            with self._view:
                supervisor.start(self.swarm.commands)
                yield
        except KeyboardInterrupt:
            self.console.print(STOPPING)
            raise
        finally:
            self.watcher.end()
            self._meter.end()

    def until_trained(self, supervisor: Supervisor) -> None:
        """Wait for the last step; raises SwarmTooSlow when nothing moves, KeepsDying."""
        while not self.watcher.snapshot.finished:
            self.turn(supervisor)
            self._check_progress()

    def turn(self, supervisor: Supervisor, *, note: str = "") -> None:
        """Restart dead processes and draw one frame."""
        supervisor.poll()
        self._meter.follow(supervisor.pids)
        self._view.show(
            SwarmPicture(
                snapshot=self.watcher.snapshot,
                run_id=self.swarm.run_id,
                total_steps=self.swarm.spec.training.steps,
                elapsed_seconds=time.time() - self._started_at,
                restarts=supervisor.restarts,
                title=self._title,
                note=note,
            )
        )
        time.sleep(FRAME_SECONDS)

    def audit(self, supervisor: Supervisor, *, url: str | None = None, sample: int = AUDIT_SAMPLE) -> AuditRow:
        """Run `swarmproof audit` on the run as the coordinator at `url` serves it."""
        output, errors = (self.swarm.folder / "logs" / f"audit.{name}" for name in ("json", "log"))
        output.unlink(missing_ok=True)
        shown = self.swarm.coordinator_url if url is None else url
        # Relays keep the newest versions alone; the origin, which goes on serving, has them all.
        where = ("audit", shown, "--run-id", self.swarm.run_id, "--source", self.swarm.origin_url)
        public = (*where, "--sample", str(sample))
        own = ("--state", str(self.swarm.folder / "auditor"), "--json")
        with launched(("-m", "node.cli", *public, *own), output=output, errors=errors) as process:
            deadline = time.monotonic() + AUDIT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                self.turn(supervisor, note="auditing: checking the log, and deriving a sample of verdicts again")
        return read_audit(" ".join(("swarmproof", *public)), process.returncode, output, errors)

    def observed(self, supervisor: Supervisor) -> Observed:
        """Return what was measured from outside, up to now."""
        self._meter.sample()
        return Observed(
            started_at=self._started_at,
            ended_at=time.time(),
            warm_start_at=self.watcher.warm_start_at,
            peak_bytes=self._meter.peak_bytes,
            cpu_seconds=self._meter.cpu_seconds,
            restarts=supervisor.restarts,
            arrivals=self.watcher.arrivals,
            fetched=self.watcher.fetched,
        )

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """Log to a file while the block is active: lines would scroll the display away."""
        (self.swarm.folder / "logs").mkdir()
        handler = logging.FileHandler(self.swarm.folder / "logs" / "demo.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        package = logging.getLogger("coordinator.lab.demo")
        package.addHandler(handler)
        package.propagate = False
        try:
            yield
        finally:
            package.removeHandler(handler)
            package.propagate = True
            handler.close()

    def _check_progress(self) -> None:
        """Raise SwarmTooSlow when nothing has changed for STALLED_SECONDS."""
        mark = _mark(self.watcher.snapshot)
        if mark != self._moved:
            self._moved, self._moved_at = mark, time.monotonic()
        elif time.monotonic() - self._moved_at > STALLED_SECONDS:
            logs = self.swarm.folder / "logs"
            raise SwarmTooSlow(f"nothing has happened for {STALLED_SECONDS:.0f} s; see the logs in {logs}")


def read_audit(command: str, code: int | None, output: Path, errors: Path) -> AuditRow:
    """Read what an audit that exited with `code` wrote; a negative code or None: it was stopped."""
    lines = output.read_text(errors="replace").splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    lines = errors.read_text(errors="replace").strip().splitlines()
    said = [line for line in lines if not line.startswith("hint: ")]
    message = said[-1] if said and code != 0 else ""
    return AuditRow(
        command=command, exit_code=code, result=result if isinstance(result, dict) else None, message=message
    )


def new_folder(out: Path) -> Path:
    """Return the path of a folder that does not exist yet, named by the time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    candidates = (out / (f"{name}-{count}" if count else name) for count in range(1000))
    return next(path.resolve() for path in candidates if not path.exists())


def discard_state(folder: Path, *, kept: frozenset[str]) -> None:
    """Delete what the processes kept for themselves: policies, databases and keys."""
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _mark(snapshot: SwarmSnapshot) -> object:
    """Return a value that changes whenever the run makes progress."""
    return snapshot.progress.get("done"), snapshot.head_version, snapshot.status.get("log_size")
