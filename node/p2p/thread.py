"""A trio loop on its own thread beside asyncio: libp2p needs trio, everything else uses asyncio.

Whatever ends the loop other than `stop` is logged, and the loop restarts with exponential backoff.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import trio

from node.client.http import printable
from node.errors import NetworkDown

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""A loop that ran this long resets the backoff."""

_RESTARTING = "The peer-to-peer network is being restarted."

T = TypeVar("T")


class TrioThread:
    """Runs `main` on a trio loop, restarting it until `stop`; `main` calls its argument when ready."""

    def __init__(self, main: Callable[[Callable[[], None]], Awaitable[None]], *, name: str) -> None:
        self.restarts = 0
        self._main, self._name = main, name
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._done: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope: trio.CancelScope | None = None
        self._nursery: trio.Nursery | None = None
        self._waiting: set[_Call[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and return at once."""
        self._thread.start()

    @property
    def is_up(self) -> bool:
        """Whether the loop is running and ready."""
        return self._ready.is_set()

    async def wait_up(self, timeout_seconds: float) -> None:
        """Wait until the loop is ready; raises TimeoutError."""
        if not await asyncio.to_thread(self._ready.wait, timeout_seconds):
            raise TimeoutError

    async def stop(self, *, seconds: float = 5.0) -> None:
        """End the loop, waiting at most `seconds`; raises nothing."""
        self._stopping.set()
        token = self._token
        if token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._cancel)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._done)), seconds)

    def soon(self, work: Callable[[], object]) -> None:
        """Schedule `work` on the trio loop, from any thread; a no-op while the loop is down."""
        token = self._token
        if token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(work)

    async def call(self, work: Callable[[], Awaitable[T]], *, timeout_seconds: float) -> T:
        """Run `work` on the trio loop and return its result; raises NetworkDown if the loop is down."""
        nursery, token = self._nursery, self._token
        if nursery is None or token is None or not self.is_up:
            raise NetworkDown("The peer-to-peer network is not up yet; retry.")
        call = _Call(work, timeout_seconds)
        # A call handed over while the loop ends may never begin: the thread then fails it.
        self._waiting.add(call)
        try:
            token.run_sync_soon(call.begin, nursery)
            return await call.result
        except trio.RunFinishedError:
            raise NetworkDown(_RESTARTING) from None
        except asyncio.CancelledError:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(call.scope.cancel)
            raise
        finally:
            self._waiting.discard(call)

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                trio.run(self._once, restrict_keyboard_interrupt_to_checkpoints=True)
            except BaseException as error:
                log.warning(
                    "peer-to-peer network failed (%s); restarting", describe(error), exc_info=log.isEnabledFor(10)
                )
            finally:
                self._ready.clear()
                self._nursery = self._token = self._scope = None
                for call in list(self._waiting):
                    call.give_up()
            if self._stopping.is_set():
                break
            failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            self.restarts += 1
            self._stopping.wait(min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16)))
        self._done.set_result(None)

    async def _once(self) -> None:
        with trio.CancelScope() as self._scope:
            self._token = trio.lowlevel.current_trio_token()
            if self._stopping.is_set():
                return
            async with trio.open_nursery() as self._nursery:
                await self._main(self._ready.set)
                self._nursery.cancel_scope.cancel()


class _Call(Generic[T]):
    """A call from asyncio to the trio loop. `result` belongs to the asyncio loop, `scope` to trio's."""

    def __init__(self, work: Callable[[], Awaitable[T]], timeout_seconds: float) -> None:
        self._work, self._timeout_seconds = work, timeout_seconds
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = self._loop.create_future()
        self.scope = trio.CancelScope()

    def begin(self, nursery: trio.Nursery) -> None:
        """Start on the trio loop."""
        try:
            nursery.start_soon(self._run)
        except RuntimeError:  # the nursery is closing
            self.give_up()

    def give_up(self) -> None:
        """Fail the call; thread-safe."""
        self._tell(lambda: self.result.set_exception(NetworkDown(_RESTARTING)))

    async def _run(self) -> None:
        try:
            with self.scope:
                self.scope.deadline = trio.current_time() + self._timeout_seconds
                value = await self._work()
                self._tell(lambda: self.result.set_result(value))
            if self.scope.cancelled_caught:
                late = NetworkDown(f"No response within {self._timeout_seconds:.0f} s.", code="timeout")
                self._tell(lambda: self.result.set_exception(late))
        except trio.Cancelled:
            self.give_up()
            raise
        except Exception as error:  # noqa: BLE001  (forwarded to the caller)
            failure = error
            self._tell(lambda: self.result.set_exception(failure))

    def _tell(self, settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the asyncio loop has ended
            self._loop.call_soon_threadsafe(lambda: None if self.result.done() else settle())


async def on_asyncio(loop: asyncio.AbstractEventLoop, work: Callable[[], Any]) -> Any:
    """Run the coroutine made by `work` on the asyncio `loop`, from trio; return its result."""
    token, finished = trio.lowlevel.current_trio_token(), trio.Event()
    coroutine = work()
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:
        coroutine.close()
        raise

    def wake(_future: object) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(finished.set)

    future.add_done_callback(wake)
    try:
        await finished.wait()
    except trio.Cancelled:
        future.cancel()
        raise
    return future.result()


def describe(error: BaseException) -> str:
    """Describe the first leaf of a possible exception group in one printable line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
