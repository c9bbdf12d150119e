"""The demonstration from beginning to end: start, watch, audit, report, stop."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from coordinator.lab.demo.report import render_report
from coordinator.lab.processes.layout import family_run_toml, lay_out
from coordinator.lab.processes.run import FRAME_SECONDS, STOPPING, SwarmRun, discard_state, new_folder
from coordinator.lab.processes.summary import Summary, summarise
from coordinator.lab.processes.supervisor import Supervisor
from coordinator.lab.processes.view import closing
from coordinator.run.home import Home, open_home
from coordinator.run.service import Coordinator
from node.keys.identity import load_key

KEPT = frozenset({"logs", "report.html", "summary.json", "run.toml"})


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line says; `keep` leaves the swarm running at the end, and its data.

    `engine` is the honest workers': one process with vLLM takes the memory of three with torch. `model` is the policy's
    family.
    """

    steps: int = 30
    out: Path = Path("runs")
    headless: bool = False
    as_json: bool = False
    seed: int = 0
    engine: str = "torch"
    model: str = "tiny"
    keep: bool = False


class Demonstration:
    """One run of the demonstration, by its own run.toml unless another is given."""

    def __init__(self, settings: DemoSettings, *, run_toml: str | None = None) -> None:
        self._settings = settings
        rules = run_toml or family_run_toml(settings.model, steps=settings.steps, seed=settings.seed)
        self._swarm = lay_out(
            new_folder(settings.out), rules, honest=1 if settings.engine == "vllm" else 3, engine=settings.engine
        )
        # With --json, standard output carries nothing else.
        self._console = Console(stderr=settings.as_json)
        self._run = SwarmRun(self._swarm, self._console, title="swarmproof demo", headless=settings.headless)

    def run(self) -> Summary:
        """Do all of it; raises DemoError, and KeyboardInterrupt for a signal, when every process has ended."""
        folder, run = self._swarm.folder, self._run
        try:
            with run.started() as supervisor:
                with run.watched(supervisor):
                    run.until_trained(supervisor)
                    audit = run.audit(supervisor)
                    observed = run.observed(supervisor)
                    watcher = run.watcher
                    summary = summarise(self._swarm, watcher.snapshot.status, watcher.ledger, observed, audit=audit)
                    home = open_home(folder / "data")
                    with contextlib.closing(home.database):
                        write_results(folder, summary, home)
                self._console.print(closing(summary, folder))
                self._stay(supervisor)
        finally:
            if not self._settings.keep:
                discard_state(folder, kept=KEPT)
        if self._settings.as_json:
            sys.stdout.write(json.dumps(msgspec.to_builtins(summary)) + "\n")
        return summary

    def _stay(self, supervisor: Supervisor) -> None:
        if not self._settings.keep:
            return
        swarm = self._swarm
        audit = f"swarmproof audit {swarm.coordinator_url} --run-id {swarm.run_id} --source {swarm.origin_url}"
        # As one line each, however narrow the terminal: it is there to be copied.
        page = f"The swarm goes on until Ctrl-C. Its page:\n  {swarm.coordinator_url}/\nTo audit it:\n  {audit}"
        self._console.print(page, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                supervisor.poll()
                time.sleep(FRAME_SECONDS)
        self._console.print(STOPPING)


def write_results(folder: Path, summary: Summary, home: Home) -> None:
    """Write summary.json and report.html; the swarm of `home` may still be running."""
    coordinator = Coordinator(home, key=load_key(folder / "run.key"))
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    (folder / "report.html").write_text(render_report(summary, coordinator), encoding="utf-8")
