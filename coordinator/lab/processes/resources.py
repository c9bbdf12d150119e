"""What the swarm costs this machine: memory of all its processes together, and CPU time of each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

import psutil

INTERVAL_SECONDS = 1.0
GROWTH = 1.01
GIB = 2**30


class Meter(threading.Thread):
    """Samples this process and all that descend from it.

    Memory is the proportional set size (PSS): a page that several processes share, as they share torch's
    libraries, counts once in total. The kernel walks all page tables to tell it, which for a dozen processes
    takes a tenth of a second; so it is asked only when the resident sizes, which cost nothing, add up to more
    than when it was last asked. CPU time of a process is lost between its last sample and its end.
    """

    def __init__(self) -> None:
        super().__init__(name="meter", daemon=True)
        self.peak_bytes = 0
        self._resident = 0.0
        self._ending = threading.Event()
        self._pids: Mapping[str, int | None] = {}
        self._cpu: dict[tuple[str, int], float] = {}

    def follow(self, pids: Mapping[str, int | None]) -> None:
        """Measure these processes, id by name, from now on."""
        self._pids = dict(pids)

    def run(self) -> None:
        while not self._ending.wait(INTERVAL_SECONDS):
            self.sample()

    def end(self) -> None:
        """Stop sampling."""
        self._ending.set()
        if self.is_alive():
            self.join()

    def sample(self) -> None:
        """Read all processes once."""
        own = psutil.Process()
        swarm = [own, *own.children(recursive=True)]
        resident = sum(map(_rss, swarm))
        if resident > self._resident * GROWTH:
            self._resident = resident
            self.peak_bytes = max(self.peak_bytes, sum(map(_pss, swarm)))
        self._note_cpu("demo", own.pid)
        for name, pid in self._pids.items():
            if pid is not None:
                self._note_cpu(name, pid)

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each named process, its earlier lives included."""
        total: dict[str, float] = {}
        for (name, _), seconds in list(self._cpu.items()):
            total[name] = total.get(name, 0.0) + seconds
        return total

    def _note_cpu(self, name: str, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            reaped = times.children_user + times.children_system if name != "demo" else 0.0
            self._cpu[name, pid] = times.user + times.system + reaped


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):  # it has just ended, or this system knows no PSS
        return 0
