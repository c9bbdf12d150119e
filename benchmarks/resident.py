"""What this process holds in memory, and the most that it held since it was asked last."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(name: str) -> int:
    """Return this process's `VmRSS` or `VmHWM` in bytes."""
    (kib,) = (int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return kib * 1024


def settle() -> int:
    """Give freed memory back, begin a new peak (proc(5)), and return what is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    CLEAR_REFS.write_text("5")
    return resident("VmRSS")
