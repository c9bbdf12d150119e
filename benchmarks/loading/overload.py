"""Three times the capacity, asked for by workers who keep what they have and obey Retry-After.

The capacity is what a closed loop delivers: groups that were leased, uploaded and given their verdict, a second. Then
all workers begin at once, as after an outage, and three times as many slots begin a second, at moments drawn
beforehand, each at a worker drawn at random that is idle; where none is, nobody is left to ask. A worker whose request
is refused asks again as a real one does: after Retry-After and up to half as long again, and after its backoff where
there was no answer. One that has a lease uploads until the upload is taken. Beside them come readers of `/v1/status`,
who do not come again, and new nodes, who do. Goodput is what is delivered then over the capacity, which is measured
before and after: other load of the machine changes it. As long again before it counts, so that slots begun are not
taken for goodput lost.

The coordinator has a core to itself; the generator and the stand-in for the verifiers share another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.loading.coordinator import Served
from benchmarks.loading.worker import STATUS_EVERY, RequestSample, SimulatedWorker
from benchmarks.timing import quantile

TIMES: Final = 3
NEW_NODE_EVERY: Final = 30
"""Deliveries offered for each new node that is."""

TOO_MANY_REQUESTS: Final = 429
KINDS: Final = ("status", "register", "lease", "receipt", "upload")
"""In the order in which they are to be refused."""


@dataclass(frozen=True)
class Overload:
    """What came of `offered_per_s` slots a second."""

    offered_per_s: float
    delivered_per_s: float
    cpu_ms: float
    """Processor time of the coordinators for each delivery."""

    generator_share: float
    """Of a core, what the generator took."""

    samples: Sequence[RequestSample]

    def refused_share(self, kind: str) -> float:
        """Return the share of the requests of `kind` that were answered with 429; nan of none."""
        asked = [sample for sample in self.samples if sample.kind == kind]
        refused = sum(sample.status == TOO_MANY_REQUESTS for sample in asked)
        return refused / len(asked) if asked else float("nan")

    def p99_ms(self, kind: str) -> float:
        """Return the latency that 99 % of the requests of `kind` that were not refused do not exceed; nan of none."""
        taken = [one.seconds for one in self.samples if one.kind == kind and 200 <= one.status < 300]
        return 1000 * quantile(taken, 0.99) if taken else float("nan")

    @property
    def failures(self) -> int:
        """Answers that are neither 2xx nor 429, and requests without an answer."""
        return sum(not 200 <= one.status < 300 and one.status != TOO_MANY_REQUESTS for one in self.samples)


@contextlib.contextmanager
def own_cores(served: Served, judge: int) -> Iterator[None]:
    """Give the coordinators one core, and this process and `judge` another, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        for process in served.processes:
            process.cpu_affinity(cores[:1])
        for pid in (0, judge):
            os.sched_setaffinity(pid, cores[1:2])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def deliveries(samples: Sequence[RequestSample]) -> int:
    """Count the verdicts that workers were given."""
    return sum(sample.kind == "receipt" and sample.status == 200 for sample in samples)


class _Crowd:
    """Registered `workers`, readers and new nodes, and what they were answered."""

    def __init__(self, workers: Sequence[SimulatedWorker], new_worker: Callable[[], SimulatedWorker]) -> None:
        self.samples: list[RequestSample] = []
        self._idle = list(workers)
        self._new_worker = new_worker
        self._readers = [new_worker() for _ in range(STATUS_EVERY)]
        self._tasks = set[asyncio.Task[None]]()
        self._over = asyncio.Event()

    async def begin(self, *, per_s: float, seconds: float, rng: random.Random) -> int:
        """Begin slots at workers that are idle, for `seconds`; return how many were to begin."""
        start, at, number = time.perf_counter(), 0.0, 0
        while (at := at + rng.expovariate(per_s)) < seconds:
            await asyncio.sleep(start + at - time.perf_counter())  # at least gives way to the others
            number += 1
            if self._idle:
                chosen = rng.randrange(len(self._idle))
                self._idle[chosen], self._idle[-1] = self._idle[-1], self._idle[chosen]
                self._start(self._deliver(self._idle.pop()))
            if number % STATUS_EVERY == 0:
                self._start(self._read(rng.choice(self._readers)))
            if number % NEW_NODE_EVERY == 0:
                self._start(self._arrive())
        return number

    def begin_all(self) -> None:
        """Begin a slot at every idle worker."""
        while self._idle:
            self._start(self._deliver(self._idle.pop()))

    async def end(self) -> None:
        """Wait for the requests under way: the coordinator would do them for nobody while the capacity is measured."""
        self._over.set()
        await asyncio.gather(*self._tasks)
        for reader in self._readers:
            reader.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, worker: SimulatedWorker) -> None:
        await worker.persist("receipt", samples=self.samples, over=self._over)
        self._idle.append(worker)

    async def _arrive(self) -> None:
        worker = self._new_worker()
        await worker.persist("register", samples=self.samples, over=self._over)
        worker.close()

    async def _read(self, reader: SimulatedWorker) -> None:
        await reader.step(due=time.perf_counter(), samples=self.samples, request=reader.status)


async def overload(
    served: Served,
    workers: Sequence[SimulatedWorker],
    *,
    new_worker: Callable[[], SimulatedWorker],
    capacity_per_s: float,
    seconds: float,
    rng: random.Random,
) -> Overload:
    """Offer TIMES `capacity_per_s` for `seconds` to registered `workers`; `new_worker` makes a node to register."""
    crowd, per_s = _Crowd(workers, new_worker), TIMES * capacity_per_s
    crowd.begin_all()
    await crowd.begin(per_s=per_s, seconds=seconds, rng=rng)
    before, cpu, own, start = len(crowd.samples), served.cpu_seconds(), time.process_time(), time.perf_counter()
    begun = await crowd.begin(per_s=per_s, seconds=seconds, rng=rng)
    took = time.perf_counter() - start
    samples = crowd.samples[before:]
    done = deliveries(samples)
    cpu_ms = 1000 * (served.cpu_seconds() - cpu) / max(1, done)
    own_share = (time.process_time() - own) / took
    await crowd.end()
    return Overload(begun / took, done / took, cpu_ms, own_share, samples)
