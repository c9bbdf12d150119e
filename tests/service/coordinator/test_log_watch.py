"""Waiting for a verdict: a missed wake-up costs a worker its patience, and one too many the coordinator a query."""

from __future__ import annotations

import asyncio

from waiting import eventually

from coordinator.http.log_watch import POLL_SECONDS, LogWatch

MINE, OTHERS = "ab" * 32, "cd" * 32


class Log:
    """Leaves as the database has them."""

    def __init__(self) -> None:
        self.leaves = [b'{"type":"run","run_id":"x","spec_digest":"y"}']
        self.reads = 0

    def size(self) -> int:
        self.reads += 1
        return len(self.leaves)

    def entries(self, start: int, end: int) -> list[bytes]:
        return self.leaves[start:end]

    def judge(self, submission: str) -> None:
        self.leaves.append(f'{{"type":"verdict","submission":"{submission}","node":"x"}}'.encode())


def watch(log: Log) -> LogWatch:
    return LogWatch(log.size, log.entries)


async def test_only_who_waits_for_it_is_woken_by_a_verdict() -> None:
    """A thousand workers that each look again at each verdict of the others keep a coordinator busy with nothing."""
    log = Log()
    watching = watch(log)
    async with watching.subscribe(MINE) as mine, watching.subscribe(OTHERS) as others:
        log.judge(OTHERS)
        await asyncio.wait_for(others.wait(), 60)
        assert not mine.is_set()
        log.judge(MINE)
        await asyncio.wait_for(mine.wait(), 60)


async def test_a_verdict_between_the_ticket_and_the_wait_is_not_missed() -> None:
    log = Log()
    watching = watch(log)
    async with watching.subscribe(MINE) as mine:
        log.judge(MINE)
        await eventually(mine.is_set)


async def test_a_second_wait_after_a_pause_starts_the_reader_anew() -> None:
    log = Log()
    watching = watch(log)
    for _ in range(2):
        async with watching.subscribe(MINE) as mine:
            log.judge(MINE)
            await asyncio.wait_for(mine.wait(), 60)
        await asyncio.sleep(3 * POLL_SECONDS)


async def test_nothing_is_read_while_nobody_waits() -> None:
    log = Log()
    async with watch(log).subscribe(MINE):
        pass
    await asyncio.sleep(3 * POLL_SECONDS)
    reads = log.reads
    await asyncio.sleep(5 * POLL_SECONDS)
    assert log.reads == reads
