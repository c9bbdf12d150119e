"""The bridge between asyncio and trio: libp2p has been seen to end its loop over one bad message.

A worker lives on the asyncio side. Whatever happens on the other one must neither end it nor leave it waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from waiting import eventually

trio = pytest.importorskip("trio")

from node.errors import NetworkDown  # noqa: E402
from node.p2p import thread as thread_module  # noqa: E402
from node.p2p.thread import TrioThread, describe, on_asyncio  # noqa: E402

SOON = 60.0
Main = Callable[[Callable[[], None]], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(thread_module, "MAX_PAUSE_SECONDS", 0.4)


async def steady(ready: Callable[[], None]) -> None:
    ready()
    await trio.sleep_forever()


@contextlib.asynccontextmanager
async def running(main: Main = steady) -> AsyncIterator[TrioThread]:
    bridge = TrioThread(main, name="test")
    bridge.start()
    try:
        yield bridge
    finally:
        await bridge.stop()
        await eventually(lambda: not bridge._thread.is_alive())


class Crashing:
    """A loop that ends whenever it is told to, and how often it began."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.failure: BaseException | None = None

    async def main(self, ready: Callable[[], None]) -> None:
        self.began.append(time.monotonic())
        self.failure = None
        ready()
        while self.failure is None:
            await trio.sleep(0.001)
        raise self.failure

    async def crash(self, bridge: TrioThread, failure: BaseException | None = None) -> None:
        """End it once, and wait until it has begun again."""
        await bridge.wait_up(SOON)
        count, self.failure = len(self.began), failure or OSError("the disk is gone")
        await eventually(lambda: len(self.began) > count and bridge.is_up)


async def now() -> float:
    return float(trio.current_time())


# -- calls


async def test_a_call_runs_on_the_other_loop_and_its_result_comes_back() -> None:
    async with running() as bridge:
        await bridge.wait_up(SOON)

        async def where() -> str:
            await trio.sleep(0)
            return threading.current_thread().name

        assert await bridge.call(where, timeout_seconds=SOON) == "test"


async def test_what_a_call_raises_is_raised_to_its_caller_and_ends_nothing() -> None:
    async with running() as bridge:
        await bridge.wait_up(SOON)

        async def fail() -> None:
            raise ValueError("no such peer")

        with pytest.raises(ValueError, match="no such peer"):
            await bridge.call(fail, timeout_seconds=SOON)
        assert await bridge.call(now, timeout_seconds=SOON) > 0
        assert bridge.restarts == 0


async def test_a_call_that_takes_too_long_is_given_up() -> None:
    async with running() as bridge:
        await bridge.wait_up(SOON)
        began = time.monotonic()
        with pytest.raises(NetworkDown) as caught:
            await bridge.call(trio.sleep_forever, timeout_seconds=0.1)
        assert caught.value.code == "timeout"
        assert time.monotonic() - began < SOON / 2


async def test_a_cancelled_call_is_cancelled_on_the_other_loop() -> None:
    """A worker that is stopped must not leave requests under way to peers."""
    async with running() as bridge:
        await bridge.wait_up(SOON)
        seen: list[str] = []

        async def wait() -> None:
            seen.append("began")
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                seen.append("cancelled")
                raise

        task = asyncio.create_task(bridge.call(wait, timeout_seconds=SOON))
        await eventually(lambda: seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: seen == ["began", "cancelled"])
        assert await bridge.call(now, timeout_seconds=SOON) > 0


async def test_many_calls_at_once_do_not_mix_up_their_results() -> None:
    async with running() as bridge:
        await bridge.wait_up(SOON)

        def asking(number: int) -> Callable[[], Awaitable[int]]:
            async def work() -> int:
                await trio.sleep(0.001 * (number % 5))
                return number

            return work

        calls = (bridge.call(asking(number), timeout_seconds=SOON) for number in range(200))
        assert await asyncio.gather(*calls) == list(range(200))


async def test_before_it_is_up_a_call_says_so_at_once() -> None:
    async with running(lambda _ready: trio.sleep_forever()) as bridge:
        with pytest.raises(TimeoutError):
            await bridge.wait_up(0.05)
        assert not bridge.is_up
        with pytest.raises(NetworkDown):
            await bridge.call(now, timeout_seconds=SOON)


# -- crashes


@pytest.mark.parametrize(
    "failure",
    [OSError("x"), trio.TrioInternalError("x"), ExceptionGroup("g", [ValueError("x")]), SystemExit(3), MemoryError()],
    ids=lambda failure: type(failure).__name__,
)
async def test_a_loop_that_crashes_begins_again(failure: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    crashing = Crashing()
    async with running(crashing.main) as bridge:
        await crashing.crash(bridge, failure)
        assert bridge.restarts == 1
        assert await bridge.call(now, timeout_seconds=SOON) > 0
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("peer-to-peer network failed (")
    assert "\n" not in said


async def test_a_loop_that_ends_by_itself_begins_again() -> None:
    began: list[int] = []

    async def main(ready: Callable[[], None]) -> None:
        began.append(1)
        ready()
        if len(began) > 1:
            await trio.sleep_forever()

    async with running(main) as bridge:
        await eventually(lambda: len(began) == 2 and bridge.is_up)


async def test_one_that_crashes_again_and_again_is_begun_less_and_less_often() -> None:
    crashing = Crashing()
    async with running(crashing.main) as bridge:
        for _ in range(5):
            await crashing.crash(bridge)
    pauses = [after - before for before, after in zip(crashing.began, crashing.began[1:], strict=False)]
    for pause, least in zip(pauses, (0.05, 0.1, 0.2, 0.4, 0.4), strict=True):
        assert least <= pause < least + 25.0


async def test_one_that_had_run_for_long_is_begun_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(thread_module, "MAX_PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(thread_module, "STEADY_SECONDS", 0.0)
    crashing = Crashing()
    began = time.monotonic()
    async with running(crashing.main) as bridge:
        for _ in range(12):
            await crashing.crash(bridge)
    assert time.monotonic() - began < 0.01 * 2**11


async def test_a_call_during_a_crash_is_told_so() -> None:
    crashing = Crashing()
    async with running(crashing.main) as bridge:
        await bridge.wait_up(SOON)
        waiting = asyncio.create_task(bridge.call(trio.sleep_forever, timeout_seconds=SOON))
        await asyncio.sleep(0.05)
        await crashing.crash(bridge)
        with pytest.raises(NetworkDown):
            await asyncio.wait_for(waiting, SOON)


async def test_calls_while_it_crashes_and_begins_again_all_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was handed over in the very moment in which the loop ended would keep a worker waiting for ever."""
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(thread_module, "MAX_PAUSE_SECONDS", 0.001)
    crashing, ended = Crashing(), [0, 0]
    over = asyncio.Event()

    async def ask(bridge: TrioThread) -> None:
        while not over.is_set():
            try:
                await asyncio.wait_for(bridge.call(now, timeout_seconds=1.0), SOON)
                ended[0] += 1
            except NetworkDown:
                ended[1] += 1
                await asyncio.sleep(0)

    async with running(crashing.main) as bridge:
        askers = [asyncio.create_task(ask(bridge)) for _ in range(8)]
        for _ in range(60):
            await crashing.crash(bridge)
        over.set()
        await asyncio.wait_for(asyncio.gather(*askers), 2 * SOON)
    assert min(ended) > 0


# -- the end


async def test_it_stops_at_once_whatever_runs() -> None:
    async with running() as bridge:
        await bridge.wait_up(SOON)
        waiting = asyncio.create_task(bridge.call(trio.sleep_forever, timeout_seconds=SOON))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await bridge.stop(seconds=SOON)
        assert time.monotonic() - began < SOON / 2
        with pytest.raises(NetworkDown):
            await asyncio.wait_for(waiting, SOON)
        with pytest.raises(NetworkDown):
            await bridge.call(now, timeout_seconds=SOON)


async def test_it_stops_at_once_while_it_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_module, "FIRST_PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(thread_module, "MAX_PAUSE_SECONDS", 60.0)

    async def crash(_ready: Callable[[], None]) -> None:
        raise OSError("the port is taken")

    async with running(crash) as bridge:
        await eventually(lambda: bridge.restarts == 1)
        assert not bridge.is_up
        with pytest.raises(NetworkDown):
            await bridge.call(now, timeout_seconds=SOON)
        began = time.monotonic()
        await bridge.stop(seconds=SOON)
        assert time.monotonic() - began < SOON / 2
    assert bridge.restarts == 1


async def test_a_stop_in_any_moment_of_the_start_is_one() -> None:
    for delay in (0.0, 0.001, 0.003, 0.01):
        async with running() as bridge:
            await asyncio.sleep(delay)
        assert not bridge.is_up


async def test_one_that_cannot_be_stopped_does_not_keep_its_node(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    async def stuck(ready: Callable[[], None]) -> None:
        ready()
        release.wait(SOON)

    bridge = TrioThread(stuck, name="stuck")
    bridge.start()
    await bridge.wait_up(SOON)
    began = time.monotonic()
    await bridge.stop(seconds=0.2)
    assert time.monotonic() - began < SOON / 2
    release.set()
    await eventually(lambda: not bridge._thread.is_alive())


async def test_what_is_said_while_nobody_is_there_is_dropped() -> None:
    crashing, said = Crashing(), []
    async with running(crashing.main) as bridge:
        await bridge.wait_up(SOON)
        bridge.soon(lambda: said.append(1))
        await eventually(lambda: said == [1])
    bridge.soon(lambda: said.append(2))
    await asyncio.sleep(0.05)
    assert said == [1]


# -- the way back


async def test_trio_can_ask_asyncio() -> None:
    loop = asyncio.get_running_loop()

    async def answer() -> str:
        assert asyncio.get_running_loop() is loop
        await asyncio.sleep(0.01)
        return "here"

    async def fail() -> None:
        raise KeyError("gone")

    async with running() as bridge:
        await bridge.wait_up(SOON)
        assert await bridge.call(lambda: on_asyncio(loop, answer), timeout_seconds=SOON) == "here"
        with pytest.raises(KeyError):
            await bridge.call(lambda: on_asyncio(loop, fail), timeout_seconds=SOON)


async def test_what_trio_gives_up_is_cancelled_on_asyncio() -> None:
    loop, seen = asyncio.get_running_loop(), []

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async with running() as bridge:
        await bridge.wait_up(SOON)
        with pytest.raises(NetworkDown):
            await bridge.call(lambda: on_asyncio(loop, wait), timeout_seconds=0.1)
        await eventually(lambda: seen == ["cancelled"])


def test_an_asyncio_loop_that_has_ended_is_an_error_and_no_hang() -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    async def never() -> None:
        raise AssertionError

    async def ask() -> None:
        with pytest.raises(RuntimeError):
            await on_asyncio(loop, never)

    trio.run(ask)
    gc.collect()


def test_a_failure_is_described_in_one_line() -> None:
    group = BaseExceptionGroup("g", [ExceptionGroup("h", [OSError("a\x1b[2J\nb")]), ValueError("c")])
    assert describe(group) == "OSError: a?[2J?b"
    assert describe(ValueError()) == "ValueError"
