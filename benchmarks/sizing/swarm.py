"""A swarm of a real policy, started by the commands that an operator types, from its first publish to its audit.

    coordinator, trainer (with the origin), verifier  <-  relay  <-  worker

The worker draws a policy's slots, the trainer makes the next policy of them, the worker fetches that as a delta and
draws its first slot. Then it ends, and where vLLM is installed a worker with it does a slot of the third policy, as a
newcomer; on a GPU it starts beside the first one, and does a slot as soon as it can. At last an auditor derives
verdicts anew. Processes have all cores: with `max_async = 0` they take turns.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.report import say
from benchmarks.sizing.usage import RoleMeter, disk_bytes
from coordinator.lab.processes.errors import SwarmTooSlow
from coordinator.lab.processes.layout import HONEST, lay_out
from coordinator.lab.processes.run import read_audit
from coordinator.lab.processes.supervisor import Command, RestartPolicy, Supervisor, launched
from coordinator.lab.processes.watch import SwarmWatcher
from node.protocol.admission import Outcome

TORCH, VLLM, RELAY = f"{HONEST}-1", f"{HONEST}-2", "relay-root"
COORDINATOR, TRAINER, VERIFIER = OPERATOR = ("coordinator", "trainer", "verifier")
_NO_RESTARTS = RestartPolicy(attempts=1)
"""A process that dies here, for memory as like as not, ends the benchmark."""
_ENGINES: Final = {TORCH: "torch", VLLM: "vllm"}
_TICK_S = 0.2
GPU_TRAINER: Final = ("--autocast", "bfloat16", "--row-tokens", "4096")
_VLLM_OPTIONS: Final = {
    "cpu": ("--max-num-seqs", "8", "--kv-cache-gib", "0.25"),
    # vLLM starts only where its share of the GPU is free, which it has with the trainer and the verifier here.
    "cuda": ("--max-num-seqs", "64", "--kv-cache-gib", "4", "--gpu-memory-utilization", "0.15"),
}
_GRACE_S = 20.0
"""A worker takes ten seconds to hand back its slots, and vLLM some to end."""


@dataclass
class Observations:
    """What a swarm showed: records of each process's log, verdicts, what roles took, and moments in Unix seconds."""

    meter: RoleMeter
    logs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[tuple[str, int, Outcome]] = field(default_factory=list)
    arrivals: dict[int, float] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    audit_exit_code: int | None = None
    audit_message: str = ""
    audit_seconds: float = 0.0

    def events(self, worker: str, kind: str, *, policy: int | None = None) -> list[dict[str, Any]]:
        """Return a worker's events of one kind, of one policy if that is given."""
        return [
            each
            for each in self.logs[worker]
            if each.get("event") == kind and (policy is None or each.get("policy") == policy)
        ]

    @staticmethod
    def moment(record: dict[str, Any]) -> float:
        """Return a record's time in Unix seconds."""
        return datetime.fromisoformat(record["time"]).timestamp()

    def logged_at(self, role: str, message: str) -> float:
        """Return when a process first logged a line with `message` in it."""
        return self.moment(next(each for each in self.logs[role] if message in each.get("message", "")))


class RealSwarm:
    """A swarm of one policy in `folder` on one device; `run_toml` are its rules, `patience_s` bounds each wait."""

    def __init__(
        self, folder: Path, run_toml: str, *, device: str, threads: int, patience_s: float, policy_memory_gib: float
    ) -> None:
        self.swarm = lay_out(folder, run_toml, honest=len(_ENGINES), hostile=(), leaves=0)
        self.found = Observations(RoleMeter(device=device))
        self._device = device
        self._threads = threads
        self._policy_memory_gib = policy_memory_gib
        self._patience_s = patience_s
        self._watcher = SwarmWatcher(self.swarm)
        self._supervisors: list[Supervisor] = []

    def run(self, *, vllm: bool) -> Observations:
        """Go through everything; raises SwarmTooSlow, and KeepsDying for a process that ended."""
        with self._watched(), self._started(COORDINATOR):
            # It looks at the model before there is a run, for which the others wait a minute at most.
            self._until(lambda: self._watcher.snapshot.answering, "a coordinator that answers")
            with self._started(TRAINER, VERIFIER, RELAY):
                self._go_through(vllm=vllm)
        return self.found

    def _go_through(self, *, vllm: bool) -> None:
        self._until(lambda: 0 in self._watcher.arrivals, "the first policy at the relay")
        # vLLM compiles for longer than a GPU takes for a step: it is a newcomer in any case.
        at_once = (VLLM,) if vllm and self._device == "cuda" else ()
        with self._started(TORCH, *at_once):
            self._until(lambda: self._watcher.snapshot.finished_steps > 0, "the first step")
            self._until(lambda: self._admitted(TORCH, since=1), "a group of the second policy")
            if at_once:
                self._until(lambda: self._admitted(VLLM, since=1), "a group by vLLM")
        if vllm and not at_once:
            with self._started(VLLM):
                self._until(lambda: self._admitted(VLLM, since=2), "a group by vLLM")
        for worker in (TORCH, VLLM) if vllm else (TORCH,):
            self.found.disk[worker] = disk_bytes(self.swarm.folder / worker)
        self._audit()
        self._read()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self.found.meter.start()
        self._watcher.start()
        try:
            yield
        finally:
            self._watcher.end()
            self.found.meter.end()

    @contextlib.contextmanager
    def _started(self, *names: str) -> Iterator[None]:
        """Run these processes within the block."""
        commands = [self._command(command) for command in self.swarm.commands if command.name in names]
        with Supervisor(self.swarm.folder / "logs", restart=_NO_RESTARTS, grace_seconds=_GRACE_S) as supervisor:
            supervisor.start(commands)
            self._supervisors.append(supervisor)
            self.found.started |= dict.fromkeys(names, time.time())
            self.found.meter.follow(supervisor.pids)
            try:
                yield
            finally:
                self._supervisors.remove(supervisor)

    def _command(self, command: Command) -> Command:
        """Let a process have all threads, log for programs, and draw one slot at a time."""
        *module, name = command.arguments[:3]
        options: tuple[str, ...] = ()
        if command.name in (TRAINER, VERIFIER, *_ENGINES):
            options += "--threads", str(self._threads), "--device", self._device
        if command.name == TRAINER and self._device == "cuda":
            options += GPU_TRAINER
        if command.name in _ENGINES:
            options += "--engine", _ENGINES[command.name], "--slots", "1", "--json"
        if command.name == VERIFIER:
            options += "--policy-memory", f"{self._policy_memory_gib:.3f}"
        if command.name == VLLM:
            options += _VLLM_OPTIONS[self._device]
        arguments = (*module, "--log-format", "json", name, *command.arguments[3:], *options)
        return replace(command, arguments=arguments)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._patience_s
        while not condition():
            for supervisor in self._supervisors:
                supervisor.poll()
            if time.monotonic() > deadline:
                raise SwarmTooSlow(f"no {what} within {self._patience_s:.0f} s; logs end with\n{self._last_lines()}")
            time.sleep(_TICK_S)
        say(f"swarm: {what}")

    def _last_lines(self) -> str:
        return "\n".join(
            f"{name}: {supervisor.log_tail(name, lines=1)}"
            for supervisor in self._supervisors
            for name in supervisor.pids
        )

    def _admitted(self, worker: str, *, since: int) -> bool:
        """Return whether a group that `worker` drew under policy `since` or a later one was admitted."""
        (node,) = (place.node for place in self.swarm.workers if place.name == worker)
        return any(
            entry.node == node and entry.version >= since and entry.outcome is Outcome.ADMITTED
            for entry in list(self._watcher.ledger.verdicts.values())
        )

    def _audit(self) -> None:
        """Run `swarmproof audit`, as anybody may, and keep what it says."""
        output, errors = (self.swarm.folder / "logs" / f"audit.{name}" for name in ("json", "log"))
        asked = ("audit", self.swarm.coordinator_url, "--run-id", self.swarm.run_id, "--sample", "2", "--json")
        sources = ("--source", self.swarm.origin_url, "--state", str(self.swarm.folder / "auditor"))
        place = ("--device", self._device, "--threads", str(self._threads))
        started = time.monotonic()
        with launched(("-m", "node.cli", *asked, *sources, *place), output=output, errors=errors) as process:
            self.found.meter.follow({"auditor": process.pid})
            self._until(lambda: process.poll() is not None, "the audit")
        row = read_audit("audit", process.returncode, output, errors)
        self.found.audit_exit_code, self.found.audit_message = row.exit_code, row.message
        self.found.audit_seconds = time.monotonic() - started

    def _read(self) -> None:
        """Read what is left behind: logs, verdicts, steps, and the disk in steady state."""
        names = {place.node: place.name for place in self.swarm.workers}
        for role in (*OPERATOR, RELAY, *_ENGINES):
            self.found.logs[role] = _records(self.swarm.folder / "logs" / f"{role}.log")
        for role, folder in (("trainer", "trainer"), ("verifier", "verifier"), (RELAY, RELAY), ("auditor", "auditor")):
            self.found.disk[role] = disk_bytes(self.swarm.folder / folder)
        self.found.disk["coordinator"] = disk_bytes(self.swarm.folder / "data")
        self.found.outcomes = [
            (names[entry.node], entry.version, entry.outcome) for entry in self._watcher.ledger.verdicts.values()
        ]
        self.found.steps = self._watcher.snapshot.status["steps"]
        self.found.arrivals = {
            version: relays[RELAY] for version, relays in self._watcher.arrivals.items() if RELAY in relays
        }


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a process's log; other lines are those of libraries."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


def rules(run_toml: Path, initial: Path) -> str:
    """Return the run.toml of `run_toml` for the model in `initial`."""
    lines = run_toml.read_text().splitlines(keepends=True)
    (at,) = (number for number, line in enumerate(lines) if line.startswith("initial = "))
    lines[at] = f"initial = {json.dumps(str(initial))}\n"
    return "".join(lines)
