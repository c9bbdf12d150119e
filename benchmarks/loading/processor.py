"""Processor time of a coordinator for one lease, one upload and one receipt, each measured with nothing else under way.

`WORKERS` nodes all lease, then all upload, then, once everything has a verdict, all ask for their receipt. The
processor time of the coordinator between is that of one kind of request, background tasks included. It depends on other
load of the machine only through its caches, which a request's latency and the rate of a closed loop do not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from sqlalchemy import select

from benchmarks.loading.coordinator import Served
from benchmarks.loading.worker import RequestSample, SimulatedWorker
from coordinator.storage.schema import submissions

WORKERS = 64
ROUNDS_PER_BATCH = 5
"""Rounds whose times are added up: the system counts processor time in units of 10 ms, a tenth of one phase."""
KINDS = ("lease", "upload", "receipt")
VERDICT_SECONDS = 60.0


async def processor_ms(served: Served, workers: Sequence[SimulatedWorker], *, batches: int) -> dict[str, float]:
    """Return milliseconds of the coordinators' processor time for a request of each of KINDS, the least of `batches`.

    Raises SystemExit if a request fails.
    """
    await _step_all(workers)  # registers
    await _round(served, workers)  # a connection's first requests prepare statements
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(batches):
        taken = dict.fromkeys(KINDS, 0.0)
        for _ in range(ROUNDS_PER_BATCH):
            for kind, seconds in (await _round(served, workers)).items():
                taken[kind] += seconds
        for kind, seconds in taken.items():
            found[kind].append(1000 * seconds / (ROUNDS_PER_BATCH * len(workers)))
    return {kind: min(times) for kind, times in found.items()}


async def _round(served: Served, workers: Sequence[SimulatedWorker]) -> dict[str, float]:
    taken = {}
    for kind in KINDS:
        if kind == "receipt":
            await asyncio.to_thread(_wait_for_verdicts, served)
        before = served.cpu_seconds()
        samples = await _step_all(workers)
        taken[kind] = served.cpu_seconds() - before
        wrong = [sample for sample in samples if sample.kind != kind or not 200 <= sample.status < 300]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {len(samples)} requests went wrong in the phase {kind}: {wrong[0]}")
    return taken


async def _step_all(workers: Sequence[SimulatedWorker]) -> list[RequestSample]:
    samples: list[RequestSample] = []
    await asyncio.gather(*(worker.step(due=time.perf_counter(), samples=samples) for worker in workers))
    for worker in workers:
        worker.skip_status()
    return samples


def _wait_for_verdicts(served: Served) -> None:
    """Wait until the stand-in for the verifiers has judged everything."""
    waiting = select(submissions.c.submission).where(submissions.c.outcome.is_(None)).limit(1)
    deadline = time.monotonic() + VERDICT_SECONDS
    while time.monotonic() < deadline:
        with served.home.database.read() as connection:
            if connection.execute(waiting).first() is None:
                return
        time.sleep(0.05)
    raise SystemExit("submissions are left without a verdict")
