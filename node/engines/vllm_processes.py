"""How vLLM's processes end: with the one that started them, by its will, and without leaving anything behind.

vLLM's engine process does not notice that the process which started it was killed, and would hold its GPU for ever:
so its worker process watches (`end_with_owner`). A terminal's Ctrl-C goes to every process, and would end vLLM under
the slots that may still be finished (`shielded`). A start cannot be taken back, but vLLM gives it up when its engine
process is gone (`Launch`). A queue in shared memory outlives most engines, until the process that started them
ends: 160 MB each, of which what was written counts (`remove_segments`). So do sockets and other temporary files
(`node.engines.vllm_temporary`).
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

OWNER = "VERISWARM_VLLM_OWNER"
"""The environment variable that tells vLLM's processes who started them: a process id."""

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0
SHUTDOWN_SECONDS = 2.0
KILL_SECONDS = 0.2
PATIENCE_SECONDS = 20.0

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


def engines() -> frozenset[int]:
    """Process ids of the engine processes of vLLM that this process started, and that run."""
    children = multiprocessing.active_children()
    return frozenset(child.pid for child in children if child.pid is not None and child.name.startswith("EngineCore"))


def kill(pids: Iterable[int]) -> None:
    """Kill engine processes and all that they started, so that none of them can say anything about another's end."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(pid)
            engine.suspend()  # or it would start others meanwhile, and miss those that end first
            segments = shared_segments([pid])
            for one in (engine, *engine.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            remove_segments(segments)


def shared_segments(engines: Iterable[int]) -> frozenset[str]:
    """Names of the shared memory that engine processes and all that they started hold."""
    found: set[str] = set()
    for pid in engines:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(pid)
            for one in (engine, *engine.children(recursive=True)):
                with contextlib.suppress(OSError):
                    found.update(_SEGMENT.findall(Path(f"/proc/{one.pid}/maps").read_text()))
    return frozenset(found)


def remove_segments(names: Iterable[str]) -> None:
    """Remove what is left of shared memory whose processes have ended."""
    for name in names:
        with contextlib.suppress(OSError):
            segment = SharedMemory(name=name)
            segment.close()
            # Tells the resource tracker, too, which would complain at this process's end.
            segment.unlink()


class Launch:
    """One AsyncLLM and its processes, from the thread that makes it, which nothing can cancel, to its end.

    A process makes one at a time: what else begins meanwhile under vLLM's name is taken for a part of it.
    """

    def __init__(self, factory: Callable[[Any], Any], wanted: Any) -> None:
        self._others = engines()
        self._segments: frozenset[str] = frozenset()
        self._temporary = TemporaryFolder()
        self._made = asyncio.get_running_loop().run_in_executor(None, self._make, factory, wanted)

    def _make(self, factory: Callable[[Any], Any], wanted: Any) -> Any:
        with shielded(), self._temporary.in_use():
            llm = factory(wanted)
        self._segments = shared_segments(_engines_of(llm))
        return llm

    async def llm(self) -> Any:
        """The AsyncLLM, once it is made; raises what vLLM raises."""
        return await asyncio.shield(self._made)

    async def end(self) -> None:
        """End it, made or not; on the event loop that it was used on."""
        while not self._made.done():
            # vLLM gives a start up once its engine process is gone.
            await asyncio.to_thread(lambda: kill(engines() - self._others))
            await asyncio.wait({self._made}, timeout=KILL_SECONDS)
        if self._made.exception() is None:
            await self._shut_down(self._made.result())
        await asyncio.to_thread(remove_segments, self._segments)
        await asyncio.to_thread(self._temporary.remove)

    async def _shut_down(self, llm: Any) -> None:
        try:
            await _silence(llm)
            shutting = asyncio.get_running_loop().run_in_executor(None, llm.shutdown, PATIENCE_SECONDS)
            await asyncio.wait({shutting}, timeout=SHUTDOWN_SECONDS)
            if not shutting.done():
                # vLLM would kill them one after the other, and the last would report the death of the first.
                await asyncio.to_thread(kill, _engines_of(llm))
            await shutting
        except Exception:
            log.exception("vLLM did not end in order")


def _engines_of(llm: Any) -> list[int]:
    return [process.pid for process in llm.engine_core.resources.engine_manager.processes]


async def _silence(llm: Any) -> None:
    """End vLLM's tasks on this loop, which would report an end that was asked for as the death of the engine.

    An engine that died by itself is reported first. Whoever still waits for tokens is told as vLLM would have.
    """
    handler, receiver = llm.output_handler, llm.engine_core.resources.output_queue_task
    if handler is not None and llm.errored:
        await asyncio.wait({handler}, timeout=SHUTDOWN_SECONDS)
    tasks = [task for task in (handler, receiver) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    llm.output_processor.propagate_error(llm.dead_error)
