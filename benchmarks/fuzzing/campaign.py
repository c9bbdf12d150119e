"""Running targets in processes of their own, which may crash, and are ended when they hang."""

from __future__ import annotations

import base64
import json
import mmap
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from blake3 import blake3

from benchmarks.fuzzing.target import Target
from benchmarks.fuzzing.worker import BEAT_BYTES, HEADER

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.2
PREPARE_SECONDS = 300.0
WALL_OVER_CPU = 20.0
MAX_DEATHS = 20
MAX_SAVED = 50
_TAIL_LINES = 30


@dataclass(frozen=True, slots=True)
class Found:
    """An input that should not have done what it did: `kind` is crash, hang or over_budget."""

    kind: str
    detail: str
    data: bytes


@dataclass
class TargetResult:
    """Result of one target."""

    target: str
    inputs: int = 0
    accepted: int = 0
    ways: int = 0
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    slowest_ms: float = 0.0
    peak_mib: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)
    deaths: int = 0

    def count(self, kind: str) -> int:
        return sum(found.kind == kind for found in self.found)

    def add(self, tally: dict[str, Any]) -> None:
        self.inputs += tally["inputs"]
        self.accepted += tally["accepted"]
        self.ways += tally["ways"]
        self.cpu_seconds += tally["cpu_seconds"]
        self.slowest_ms = max(self.slowest_ms, tally["slowest_ms"])
        self.peak_mib = max(self.peak_mib, tally["peak_mib"])
        self.refused.update(tally["refused"])


def run_all(
    plan: Sequence[tuple[Target, int]], *, seed: str, jobs: int, save: Path | None, done: Callable[[TargetResult], None]
) -> list[TargetResult]:
    """Feed each target so many inputs, `jobs` targets at a time; `done` is called with each result as it comes."""

    def one(step: tuple[Target, int]) -> TargetResult:
        result = run_target(step[0], step[1], seed=seed)
        if save is not None:
            save_found(result, save)
        done(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, plan))


def run_target(target: Target, count: int, *, seed: str) -> TargetResult:
    """Feed `count` inputs; a process that dies or hangs is replaced, and goes on after the input that did it."""
    result = TargetResult(target.name)
    began, first = time.monotonic(), 0
    with tempfile.NamedTemporaryFile(prefix="beat-") as file:
        file.truncate(BEAT_BYTES)
        with mmap.mmap(file.fileno(), BEAT_BYTES) as beat:
            while first < count and result.deaths < MAX_DEATHS:
                beat[: HEADER.size] = bytes(HEADER.size)
                process = _Process(target, seed=seed, first=first, count=count - first, beat=beat, path=file.name)
                first = process.follow(result)
    result.inputs = max(result.inputs, first)
    result.seconds = time.monotonic() - began
    return result


def save_found(result: TargetResult, folder: Path) -> None:
    """Keep the inputs that were found, each under its digest."""
    for found in result.found[:MAX_SAVED]:
        place = folder / result.target
        place.mkdir(parents=True, exist_ok=True)
        name = f"{found.kind}-{blake3(found.data).hexdigest()[:16]}"
        (place / name).write_bytes(found.data)
        (place / f"{name}.txt").write_text(found.detail + "\n")


class _Process:
    """One worker, watched until its end."""

    def __init__(self, target: Target, *, seed: str, first: int, count: int, beat: mmap.mmap, path: str) -> None:
        self._target, self._first, self._count, self._beat = target, first, count, beat
        arguments = [target.name, seed, str(first), str(count), path]
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "benchmarks.fuzzing.worker", *arguments],
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._said: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._readers = [
            threading.Thread(target=_drain, args=(self._process.stdout, self._lines.put), daemon=True),
            threading.Thread(target=_drain, args=(self._process.stderr, self._said.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def follow(self, result: TargetResult) -> int:
        """Take everything it reports; the number of the input to go on with. Raises RuntimeError if it never began."""
        stuck = False
        watch = _Watch(self._target, psutil.Process(self._process.pid))
        while (line := self._next_line()) is not None:
            if line:
                self._take(json.loads(line), result)
            stuck = stuck or watch.is_stuck(self._at())
            if stuck:
                self._process.kill()
        status = self._process.wait()
        for reader in self._readers:
            reader.join()
        at = self._at()
        if status == 0 and at == self._first + self._count + 1:
            return self._first + self._count
        self._end_early(result, at, status, stuck=stuck)
        return at

    def _end_early(self, result: TargetResult, at: int, status: int, *, stuck: bool) -> None:
        said = b"".join(line for line in self._said if line is not None).decode(errors="replace")
        if at == 0:
            raise RuntimeError(f"{self._target.name} could not be prepared (exit status {status}):\n{said}")
        _, size = HEADER.unpack(self._beat[: HEADER.size])
        data = self._beat[HEADER.size : HEADER.size + size]
        kind, detail = (
            ("hang", "did not end") if stuck else ("crash", f"the process ended: {_status_name(status)}\n{said}")
        )
        result.found.append(Found(kind, detail, data))
        result.deaths += 1

    def _next_line(self) -> bytes | None:
        """Return a line of its report, b"" where there is none for a while, None at the end."""
        try:
            return self._lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return b""

    def _take(self, report: dict[str, Any], result: TargetResult) -> None:
        if "tally" in report:
            result.add(report["tally"])
        else:
            data = base64.b64decode(report["data"])
            result.found.append(Found(report["finding"], report["detail"], data))

    def _at(self) -> int:
        """Return the number of the input under way, from 1; 0 before the first."""
        number: int = HEADER.unpack(self._beat[: HEADER.size])[0]
        return number


class _Watch:
    """Watchdog of the time that a process spends on one input."""

    def __init__(self, target: Target, process: psutil.Process) -> None:
        self._target, self._process = target, process
        self._at = -1
        self._since = self._cpu_since = 0.0

    def is_stuck(self, at: int) -> bool:
        try:
            times = self._process.cpu_times()
        except psutil.Error:
            return False
        cpu, now = times.user + times.system, time.monotonic()
        if at != self._at:
            self._at, self._since, self._cpu_since = at, now, cpu
            return False
        if at == 0:
            return now - self._since > PREPARE_SECONDS
        limit = self._target.hang_seconds
        # A generous second for what the clock of processor time cannot resolve, and for the input's repetition.
        return cpu - self._cpu_since > 5 * limit + 1 or now - self._since > WALL_OVER_CPU * limit + 1


def _drain(stream: IO[bytes], take: Callable[[bytes | None], object]) -> None:
    with stream:
        for line in stream:
            take(line)
    take(None)


def _status_name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _environment() -> dict[str, str]:
    """Return an environment with one thread each, and nothing from the network."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "RUST_BACKTRACE": "0"}
    return os.environ | threads | quiet | {"ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONPATH": str(ROOT)}
