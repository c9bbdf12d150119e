"""Lifetime of vLLM's processes: they end with their owner, on request, and leave nothing behind.

vLLM's engine process does not notice when its owner is killed, and would hold its GPU forever: its worker process
watches (`end_with_owner`). A terminal's Ctrl-C reaches every process, and would end vLLM under slots that may still
finish (`sigint_blocked`). A start cannot be cancelled, but vLLM abandons it once its engine process is gone (`Launch`).
A shared memory queue outlives most engines until their owner ends, 160 MB each (`remove_segments`). So do sockets and
other temporary files (`node.engines.vllm_temporary`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil

from node.engines.vllm_temporary import TemporaryFolder

log = logging.getLogger(__name__)

OWNER = "SWARMPROOF_VLLM_OWNER"
"""Environment variable naming the owner's process id to vLLM's processes."""

OWNER_CHECK_SECONDS = 1.0
GRACE_SECONDS = 5.0
SHUTDOWN_SECONDS = 2.0
KILL_SECONDS = 0.2
SHUTDOWN_LIMIT_SECONDS = 20.0

_SEGMENT = re.compile(r"/shm/(psm_[0-9a-f]+)")


def set_owner() -> None:
    """Make this process the owner of vLLM processes started from now on."""
    os.environ[OWNER] = str(os.getpid())


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT in processes started by this thread inside the context; SIGTERM ends them."""
    # Python starts it with the first process, and would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_owner() -> None:
    """End this process and its engine process once the owner is gone; call it in a worker."""
    owner_pid = os.environ.get(OWNER)
    if owner_pid is None or int(owner_pid) == os.getpid():
        return
    # A worker process's parent is vLLM's engine process; a worker in the owner's process has none.
    parent = os.getppid()
    engine = parent if parent != int(owner_pid) else None
    threading.Thread(target=_watch, args=(int(owner_pid), engine), name="owner", daemon=True).start()


def _watch(owner: int, engine: int | None) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(owner)
        # A zombie counts as gone.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(OWNER_CHECK_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if engine is not None and os.getppid() == engine:
            os.kill(engine, number)
        elif engine is None:
            os.kill(os.getpid(), number)
        time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def engine_pids() -> frozenset[int]:
    """Return the process ids of running vLLM engine processes started by this process."""
    children = multiprocessing.active_children()
    return frozenset(child.pid for child in children if child.pid is not None and child.name.startswith("EngineCore"))


def kill(pids: Iterable[int]) -> None:
    """Kill engine processes with all descendants, so that none reports another's death."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(pid)
            engine.suspend()  # it must neither start others nor see them die
            segments = shared_segments([pid])
            for one in (engine, *engine.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            remove_segments(segments)


def shared_segments(pids: Iterable[int]) -> frozenset[str]:
    """Return the names of shared memory held by engine processes and their descendants."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(pid)
            for one in (engine, *engine.children(recursive=True)):
                with contextlib.suppress(OSError):
                    found.update(_SEGMENT.findall(Path(f"/proc/{one.pid}/maps").read_text()))
    return frozenset(found)


def remove_segments(names: Iterable[str]) -> None:
    """Remove shared memory whose processes have ended."""
    for name in names:
        with contextlib.suppress(OSError):
            segment = SharedMemory(name=name)
            segment.close()
            # Also unregisters it at the resource tracker, which would complain at exit.
            segment.unlink()


class Launch:
    """One AsyncLLM and its processes, from its uncancellable construction in a thread to its end.

    Only one may be constructed at a time in a process: vLLM processes that appear meanwhile are taken for its own.
    """

    def __init__(self, factory: Callable[[Any], Any], wanted: Any) -> None:
        self._others = engine_pids()
        self._segments: frozenset[str] = frozenset()
        self._temporary = TemporaryFolder()
        self._made = asyncio.get_running_loop().run_in_executor(None, self._make, factory, wanted)

    def _make(self, factory: Callable[[Any], Any], wanted: Any) -> Any:
        with sigint_blocked(), self._temporary.in_use():
            llm = factory(wanted)
        self._segments = shared_segments(_engines_of(llm))
        return llm

    async def llm(self) -> Any:
        """Return the AsyncLLM once constructed; raises what vLLM raises."""
        return await asyncio.shield(self._made)

    async def end(self) -> None:
        """End it, constructed or not, on the event loop it was used on."""
        while not self._made.done():
            # vLLM abandons a start once its engine process is gone.
            await asyncio.to_thread(lambda: kill(engine_pids() - self._others))
            await asyncio.wait({self._made}, timeout=KILL_SECONDS)
        if self._made.exception() is None:
            await self._shut_down(self._made.result())
        await asyncio.to_thread(remove_segments, self._segments)
        await asyncio.to_thread(self._temporary.remove)

    async def _shut_down(self, llm: Any) -> None:
        try:
            await _silence(llm)
            shutting = asyncio.get_running_loop().run_in_executor(None, llm.shutdown, SHUTDOWN_LIMIT_SECONDS)
            await asyncio.wait({shutting}, timeout=SHUTDOWN_SECONDS)
            if not shutting.done():
                # vLLM would kill them one by one, and the last would report the first's death.
                await asyncio.to_thread(kill, _engines_of(llm))
            await shutting
        except Exception:
            log.exception("vLLM did not shut down cleanly")


def _engines_of(llm: Any) -> list[int]:
    return [process.pid for process in llm.engine_core.resources.engine_manager.processes]


async def _silence(llm: Any) -> None:
    """Cancel vLLM's tasks on this loop, which would report a requested end as an engine failure.

    An engine that died by itself is reported first. Whoever waits for tokens is told as vLLM would.
    """
    handler, receiver = llm.output_handler, llm.engine_core.resources.output_queue_task
    if handler is not None and llm.errored:
        await asyncio.wait({handler}, timeout=SHUTDOWN_SECONDS)
    tasks = [task for task in (handler, receiver) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    llm.output_processor.propagate_error(llm.dead_error)
