"""The demonstration from beginning to end: start, watch, audit, report, stop."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from coordinator.demo.errors import TooSlow
from coordinator.demo.layout import Swarm, demo_run_toml, lay_out
from coordinator.demo.report import render_report
from coordinator.demo.resources import Meter
from coordinator.demo.summary import AuditRow, Observed, Summary, summarise
from coordinator.demo.supervisor import Supervisor, interrupted_by_signals, launched
from coordinator.demo.view import Frame, LiveView, PlainView, closing
from coordinator.demo.watch import Snapshot, Watcher

log = logging.getLogger(__name__)

FRAME_SECONDS = 0.25
STALLED_SECONDS = 240.0
AUDIT_SAMPLE = 20
AUDIT_SECONDS = 180.0
STOPPING = "Stopping every process, which takes some seconds; Ctrl-C again kills them."
KEPT = frozenset({"logs", "report.html", "summary.json", "run.toml"})


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line says; `keep` leaves the swarm running at the end, and its data.

    `engine` is the honest workers': one process with vLLM takes the memory of three with torch.
    """

    steps: int = 30
    out: Path = Path("runs")
    headless: bool = False
    as_json: bool = False
    seed: int = 0
    engine: str = "torch"
    keep: bool = False


class Demonstration:
    """One run of the demonstration, by its own run.toml unless another is given."""

    def __init__(self, settings: DemoSettings, *, run_toml: str | None = None) -> None:
        self._settings = settings
        self._started_at = time.time()
        rules = run_toml or demo_run_toml(steps=settings.steps, seed=settings.seed)
        self._swarm = lay_out(
            _new_folder(settings.out), rules, honest=1 if settings.engine == "vllm" else 3, engine=settings.engine
        )
        self._watcher = Watcher(self._swarm)
        self._meter = Meter()
        # With --json, standard output carries nothing else.
        self._console = Console(stderr=settings.as_json)
        self._view: LiveView | PlainView = LiveView(self._console)
        if settings.headless or not self._console.is_terminal:
            self._view = PlainView(self._console.file)
        self._moved_at = time.monotonic()
        self._moved: object = None

    def run(self) -> Summary:
        """Do all of it; raises DemoError, and KeyboardInterrupt for a signal, when every process has ended."""
        folder = self._swarm.folder
        try:
            with interrupted_by_signals(), self._logged(), Supervisor(folder / "logs") as supervisor:
                with self._watched(), self._view:
                    supervisor.start(self._swarm.commands)
                    self._until_trained(supervisor)
                    audit = self._audit(supervisor)
                    summary = self._summarise(supervisor, audit)
                    write_results(folder, summary, self._swarm)
                self._console.print(closing(summary, folder))
                self._stay(supervisor)
        finally:
            if not self._settings.keep:
                discard_state(folder)
        if self._settings.as_json:
            sys.stdout.write(json.dumps(msgspec.to_builtins(summary)) + "\n")
        return summary

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._meter.start()
        self._watcher.start()
        try:
            yield
        except KeyboardInterrupt:
            self._console.print(STOPPING)
            raise
        finally:
            self._watcher.end()
            self._meter.end()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """The demonstration's own log lines go to a file, not into the picture."""
        (self._swarm.folder / "logs").mkdir()
        handler = logging.FileHandler(self._swarm.folder / "logs" / "demo.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        package = logging.getLogger("coordinator.demo")
        package.addHandler(handler)
        package.propagate = False
        try:
            yield
        finally:
            package.removeHandler(handler)
            package.propagate = True
            handler.close()

    def _until_trained(self, supervisor: Supervisor) -> None:
        while not self._watcher.snapshot.finished:
            self._turn(supervisor)
            self._check_progress()

    def _turn(self, supervisor: Supervisor, *, note: str = "") -> None:
        supervisor.poll()
        self._meter.follow(supervisor.pids)
        self._view.show(
            Frame(
                snapshot=self._watcher.snapshot,
                run_id=self._swarm.run_id,
                total_steps=self._swarm.spec.training.steps,
                elapsed_seconds=time.time() - self._started_at,
                restarts=supervisor.restarts,
                note=note,
            )
        )
        time.sleep(FRAME_SECONDS)

    def _check_progress(self) -> None:
        """Raise TooSlow when nothing has moved for a long time: somebody may be watching in vain."""
        mark = _mark(self._watcher.snapshot)
        if mark != self._moved:
            self._moved, self._moved_at = mark, time.monotonic()
        elif time.monotonic() - self._moved_at > STALLED_SECONDS:
            raise TooSlow(
                f"nothing has happened for {STALLED_SECONDS:.0f} s; see the logs in {self._swarm.folder / 'logs'}"
            )

    def _audit(self, supervisor: Supervisor) -> AuditRow:
        """What `veriswarm audit` says about the run that has just ended."""
        output, errors = (self._swarm.folder / "logs" / f"audit.{name}" for name in ("json", "log"))
        public = ("audit", self._swarm.coordinator_url, "--run-id", self._swarm.run_id, "--sample", str(AUDIT_SAMPLE))
        own = ("--state", str(self._swarm.folder / "auditor"), "--json")
        with launched(("-m", "node.cli", *public, *own), output=output, errors=errors) as process:
            deadline = time.monotonic() + AUDIT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                self._turn(supervisor, note="auditing: checking the log, and deriving a sample of verdicts again")
        return read_audit(" ".join(("veriswarm", *public)), process.returncode, output, errors)

    def _summarise(self, supervisor: Supervisor, audit: AuditRow) -> Summary:
        self._meter.sample()
        observed = Observed(
            started_at=self._started_at,
            ended_at=time.time(),
            warm_start_at=self._watcher.warm_start_at,
            peak_bytes=self._meter.peak_bytes,
            cpu_seconds=self._meter.cpu_seconds,
            restarts=supervisor.restarts,
            arrivals=self._watcher.arrivals,
            fetched=self._watcher.fetched,
        )
        return summarise(self._swarm, self._watcher.snapshot.status, self._watcher.ledger, observed, audit=audit)

    def _stay(self, supervisor: Supervisor) -> None:
        if not self._settings.keep:
            return
        swarm = self._swarm
        audit = f"veriswarm audit {swarm.coordinator_url} --run-id {swarm.run_id} --source {swarm.origin_url}"
        # As one line each, however narrow the terminal: it is there to be copied.
        self._console.print(f"The swarm goes on until Ctrl-C. To audit it:\n  {audit}", soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                supervisor.poll()
                time.sleep(FRAME_SECONDS)
        self._console.print(STOPPING)


def write_results(folder: Path, summary: Summary, swarm: Swarm) -> None:
    """summary.json and report.html."""
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    (folder / "report.html").write_text(render_report(summary, swarm.spec), encoding="utf-8")


def discard_state(folder: Path) -> None:
    """Delete what the processes kept for themselves: policies, databases and keys."""
    for path in folder.iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_audit(command: str, code: int | None, output: Path, errors: Path) -> AuditRow:
    """What an audit that ended with `code` has written; a negative code or None means that it was stopped."""
    lines = output.read_text(errors="replace").splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except ValueError:
        result = None
    said = errors.read_text(errors="replace").strip().splitlines()
    message = said[-1] if said and code != 0 else ""
    return AuditRow(
        command=command, exit_code=code, result=result if isinstance(result, dict) else None, message=message
    )


def _new_folder(out: Path) -> Path:
    """A folder that does not exist yet, named by the time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    candidates = (out / (f"{name}-{count}" if count else name) for count in range(1000))
    return next(path.resolve() for path in candidates if not path.exists())


def _mark(snapshot: Snapshot) -> object:
    """Something that changes whenever the run moves."""
    return snapshot.progress.get("done"), snapshot.head_version, snapshot.status.get("log_size")
