"""Requests at drawn times (open loop) and as fast as they are answered (closed loop), and what came of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.loading.coordinator import Served
from benchmarks.loading.worker import RequestSample, SimulatedWorker
from benchmarks.timing import quantile

GRACE_SECONDS = 120.0


@dataclass(frozen=True)
class LoadPhase:
    """Replies of one phase, with the processor time of the coordinators and of PostgreSQL."""

    name: str
    samples: Sequence[RequestSample]
    seconds: float
    cpu_seconds: float
    server_seconds: float

    @property
    def rate(self) -> float:
        return len(self.samples) / self.seconds

    def quantile_ms(self, share: float, kind: str | None = None) -> float:
        """Return the latency that `share` of the requests do not exceed."""
        times = [sample.seconds for sample in self.samples if kind in (None, sample.kind)]
        return 1000 * quantile(times, share) if times else float("nan")

    @property
    def errors(self) -> int:
        return sum(not 200 <= sample.status < 300 for sample in self.samples)


async def open_loop(served: Served, plan: Sequence[tuple[float, SimulatedWorker]], *, name: str) -> LoadPhase:
    """Send a request for each (seconds from the start, worker) of `plan`, at its time."""
    samples: list[RequestSample] = []
    cpu, server, start = served.cpu_seconds(), served.server_cpu_seconds(), time.perf_counter()
    async with asyncio.timeout(plan[-1][0] + GRACE_SECONDS), asyncio.TaskGroup() as tasks:
        for at, worker in plan:
            wait = start + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(worker.step(due=start + at, samples=samples))
    return _phase(name, samples, served, start=start, cpu=cpu, server=server)


async def closed_loop(served: Served, workers: Sequence[SimulatedWorker], *, seconds: float) -> LoadPhase:
    """Have each worker send its next request as soon as it has the answer to the last one."""
    samples: list[RequestSample] = []
    cpu, server, start = served.cpu_seconds(), served.server_cpu_seconds(), time.perf_counter()

    async def busy(worker: SimulatedWorker) -> None:
        while (now := time.perf_counter()) < start + seconds:
            await worker.step(due=now, samples=samples)

    await asyncio.gather(*map(busy, workers))
    return _phase("closed loop", samples, served, start=start, cpu=cpu, server=server)


def _phase(
    name: str, samples: Sequence[RequestSample], served: Served, *, start: float, cpu: float, server: float
) -> LoadPhase:
    took = time.perf_counter() - start
    return LoadPhase(name, samples, took, served.cpu_seconds() - cpu, served.server_cpu_seconds() - server)


def arrivals(
    workers: Sequence[SimulatedWorker], *, rate: float, seconds: float, rng: random.Random
) -> list[tuple[float, SimulatedWorker]]:
    """Draw a Poisson process of requests."""
    plan, at = [], rng.expovariate(rate)
    while at < seconds:
        plan.append((at, rng.choice(workers)))
        at += rng.expovariate(rate)
    return plan
