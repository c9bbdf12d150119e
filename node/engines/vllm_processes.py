"""How vLLM's processes end: with the one that started them, by its will, and without leaving anything behind.

vLLM's engine process does not notice that the process which started it was killed, and would hold its GPU for ever:
so its worker process watches (`end_with_owner`). A terminal's Ctrl-C goes to every process, and would end vLLM under
the slots that may still be finished (`shielded`). And a queue in shared memory outlives most engines, until the
process that started them ends: 160 MB each, of which what was written counts (`remove_segments`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil

OWNER = "VERISWARM_VLLM_OWNER"
"""The environment variable that tells vLLM's processes who started them: a process id."""

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0

_SEGMENT = re.compile(r"/shm/(psm_[0-9a-f]+)")


def own() -> None:
    """Make this process the owner of those that it starts from now on."""
    os.environ[OWNER] = str(os.getpid())


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """What this thread starts meanwhile never sees SIGINT; it is ended by SIGTERM."""
    # Python starts it with the first process, and would lift the shield.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_owner() -> None:
    """From now on, end this process and the one that started it as soon as the owner is gone. Call it in a worker."""
    said = os.environ.get(OWNER)
    if said is None or int(said) == os.getpid():
        return
    # Where the worker has a process of its own, its parent is vLLM's engine process; else it is the owner.
    parent = os.getppid()
    engine = parent if parent != int(said) else None
    threading.Thread(target=_watch, args=(int(said), engine), name="owner", daemon=True).start()


def _watch(owner: int, engine: int | None) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(owner)
        # A zombie is gone as well: whoever should have buried it does not matter here.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(LOOK_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if engine is not None and os.getppid() == engine:
            os.kill(engine, number)
        elif engine is None:
            os.kill(os.getpid(), number)
        time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def shared_segments() -> frozenset[str]:
    """Names of the shared memory that this process's descendants hold."""
    found: set[str] = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            found.update(_SEGMENT.findall(Path(f"/proc/{child.pid}/maps").read_text()))
    return frozenset(found)


def remove_segments(names: Iterable[str]) -> None:
    """Remove what is left of shared memory whose processes have ended."""
    for name in names:
        with contextlib.suppress(OSError):
            segment = SharedMemory(name=name)
            segment.close()
            # Tells the resource tracker, too, which would complain at this process's end.
            segment.unlink()
