"""How many threads hash, encode and apply deltas."""

from __future__ import annotations

import os
from typing import Final

MAX_THREADS: Final = 32
"""Each holds some windows of 4 MiB; beyond, memory and disks are the limit."""


def threads_or_all(threads: int | None) -> int:
    """Return `threads`, or the cores that this process may use where None; at most MAX_THREADS."""
    return min(MAX_THREADS, threads or len(os.sched_getaffinity(0)))
