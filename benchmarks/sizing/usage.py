"""What a role of the swarm takes: resident memory at its peak, processor time and disk, by Linux's own counters.

And of a GPU's memory, as its driver counts it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil

INTERVAL_SECONDS = 0.25
_BLOCK_BYTES = 512
_QUERY = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 60.0


class RoleMeter(threading.Thread):
    """Samples processes by role, children included: the kernel keeps each one's peak, so only ends can be missed."""

    def __init__(self, *, device: str = "cpu") -> None:
        super().__init__(name="role meter", daemon=True)
        self.device = device
        self._roots: dict[str, int] = {}
        self._peaks: dict[str, dict[int, int]] = {}
        self._cpu: dict[str, dict[int, float]] = {}
        self._device_peaks: dict[str, int] = {}
        self._ending = threading.Event()

    def follow(self, pids: Mapping[str, int | None]) -> None:
        """Measure these processes, id by role, from now on."""
        self._roots |= {role: pid for role, pid in pids.items() if pid is not None}

    def run(self) -> None:
        while not self._ending.wait(INTERVAL_SECONDS):
            self.sample()

    def end(self) -> None:
        """Stop sampling."""
        self._ending.set()
        self.join()

    def sample(self) -> None:
        """Read all processes once."""
        on_device = device_bytes() if self.device == "cuda" else {}
        for role, root in list(self._roots.items()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(root)
                family = (process, *process.children(recursive=True))
                for each in family:
                    self._note(role, each)
                taken = sum(on_device.get(each.pid, 0) for each in family)
                self._device_peaks[role] = max(taken, self._device_peaks.get(role, 0))

    def peak_bytes(self, role: str) -> int:
        """Return the sum of the peaks of a role's processes, which may have been at different times."""
        return sum(self._peaks.get(role, {}).values())

    def device_peak_bytes(self, role: str) -> int:
        """Return the most that a role's processes held of a GPU's memory at once, their CUDA contexts included."""
        return self._device_peaks.get(role, 0)

    def cpu_seconds(self, role: str) -> float:
        """Return user and system time of a role's processes."""
        return sum(self._cpu.get(role, {}).values())

    def _note(self, role: str, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error, OSError):
            times, peak = process.cpu_times(), peak_bytes(process.pid)
            self._cpu.setdefault(role, {})[process.pid] = times.user + times.system
            peaks = self._peaks.setdefault(role, {})
            peaks[process.pid] = max(peak, peaks.get(process.pid, 0))


def peak_bytes(pid: int) -> int:
    """Return a process's largest resident size so far (VmHWM); raises OSError, and gives 0 for a zombie."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def device_bytes() -> dict[int, int]:
    """Return what each process holds of all GPUs' memory, by process id; {} where the driver does not say."""
    try:
        asked = subprocess.run(_QUERY, capture_output=True, text=True, check=False, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: Counter[int] = Counter()
    for line in asked.stdout.splitlines():
        pid, _, mib = line.partition(", ")
        if mib.isdigit():
            found[int(pid)] += int(mib) * 2**20
    return found


def disk_bytes(folder: Path) -> int:
    """Return what `folder` takes of the disk; a file with several names counts once."""
    blocks: dict[tuple[int, int], int] = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = (Path(at) / name).lstat()
                blocks[found.st_dev, found.st_ino] = found.st_blocks
    return sum(blocks.values()) * _BLOCK_BYTES
