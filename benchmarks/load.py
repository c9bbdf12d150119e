"""What one coordinator takes: `python -m benchmarks.load [--json]`.

A real coordinator process (`veriswarm coordinator`, SQLite, the default limits) and 1,000 simulated workers in another,
on the same cores. Each worker has a key, an address of loopback (so that each has the limits of an address to itself;
Linux only) and a connection that it keeps. It registers, and then, over and over, asks for a lease, submits a body of
random bytes for it, waits for the verdict, and every tenth time asks for `/v1/status`. Requests are signed as real ones
are, and a submission waits for `100 Continue`. A third process stands in for the verifiers: it looks for submissions
every 50 ms and admits them all, in the verifier's own transactions, so that workers keep their standing; it computes
nothing. The wait for a verdict counts like any other request.

Three phases:

- registrations, open loop, at `--registrations-per-s`;
- open loop at `--rate` requests a second for `--seconds`: the moments are drawn beforehand (a Poisson process), each
  for a worker drawn at random, and a request's latency counts from that moment, whether or not the worker, the
  generator or the coordinator was free then. So a stall is counted for all who would have asked during it;
- closed loop: `--busy` workers send one request after the other for `--seconds`, and the others are silent. That is the
  most that the machine does, with the generator and the stand-in on the same cores.

`p50_ms_sqlite` and `p99_ms_sqlite` are of the open loop, `requests_per_s_sqlite` of the closed one. `errors` counts
answers that are not 2xx and requests without an answer, in all phases. `coordinator_cpu_ms` is processor time of the
coordinator for each request of the closed loop. Each submission is synced to disk twice and committed with another
sync before its answer: `sync_ms` is the median of one such sync here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.loading.coordinator import Served, judging, serving
from benchmarks.loading.worker import Sample, Worker

GRACE_SECONDS = 120.0


@dataclass(frozen=True)
class Phase:
    """What came back in one phase; `cpu_seconds` is the coordinator's."""

    name: str
    samples: Sequence[Sample]
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return len(self.samples) / self.seconds

    def quantile_ms(self, share: float, kind: str | None = None) -> float:
        """The latency that `share` of the requests do not exceed."""
        times = sorted(sample.seconds for sample in self.samples if kind in (None, sample.kind))
        return 1000 * times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")

    @property
    def errors(self) -> int:
        return sum(not 200 <= sample.status < 300 for sample in self.samples)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cpu_seconds(served: Served) -> float:
    times = served.process.cpu_times()
    return times.user + times.system


async def open_loop(served: Served, plan: Sequence[tuple[float, Worker]], *, name: str) -> Phase:
    """Send what `plan` says (seconds from the start, worker) when it says so."""
    samples: list[Sample] = []
    cpu, start = cpu_seconds(served), time.perf_counter()
    async with asyncio.timeout(plan[-1][0] + GRACE_SECONDS), asyncio.TaskGroup() as tasks:
        for at, worker in plan:
            wait = start + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(worker.step(due=start + at, samples=samples))
    return Phase(name, samples, time.perf_counter() - start, cpu_seconds(served) - cpu)


async def closed_loop(served: Served, workers: Sequence[Worker], *, seconds: float) -> Phase:
    """Each worker sends its next request when it has the answer to the last one."""
    samples: list[Sample] = []
    cpu, start = cpu_seconds(served), time.perf_counter()

    async def busy(worker: Worker) -> None:
        while (now := time.perf_counter()) < start + seconds:
            await worker.step(due=now, samples=samples)

    await asyncio.gather(*map(busy, workers))
    return Phase("closed loop", samples, time.perf_counter() - start, cpu_seconds(served) - cpu)


def arrivals(
    workers: Sequence[Worker], *, rate: float, seconds: float, rng: random.Random
) -> list[tuple[float, Worker]]:
    """A Poisson process."""
    plan, at = [], rng.expovariate(rate)
    while at < seconds:
        plan.append((at, rng.choice(workers)))
        at += rng.expovariate(rate)
    return plan


async def load(served: Served, options: argparse.Namespace) -> list[Phase]:
    rng = random.Random(options.seed)
    workers = [
        Worker(served.home.run_id, served.port, f"127.1.{index >> 8}.{index & 255}", options.body_bytes)
        for index in range(options.workers)
    ]
    each = 1 / options.registrations_per_s
    plan = [(index * each, worker) for index, worker in enumerate(workers)]
    phases = [await open_loop(served, plan, name="registrations")]
    tell(phases[-1])
    plan = arrivals(workers, rate=options.rate, seconds=options.seconds, rng=rng)
    phases.append(await open_loop(served, plan, name="open loop"))
    tell(phases[-1])
    phases.append(await closed_loop(served, workers[: options.busy], seconds=options.seconds))
    tell(phases[-1])
    for worker in workers:
        worker.close()
    return phases


def tell(phase: Phase) -> None:
    """A line for each kind of request, for people."""
    say(
        f"{phase.name}: {phase.rate:.0f} requests/s, {phase.errors} errors, "
        f"{1000 * phase.cpu_seconds / len(phase.samples):.2f} ms of the coordinator's processor time each"
    )
    for kind in sorted({sample.kind for sample in phase.samples}):
        count = sum(sample.kind == kind for sample in phase.samples)
        p50, p99 = phase.quantile_ms(0.5, kind), phase.quantile_ms(0.99, kind)
        say(f"  {kind:<10} {count:>7}   p50 {p50:7.1f} ms   p99 {p99:7.1f} ms")


def sync_ms(folder: Path) -> float:
    """The median of 20 times 16 KiB to disk."""
    taken = []
    with (folder / "sync").open("wb") as file:
        for _ in range(20):
            start = time.perf_counter()
            file.write(bytes(16 * 1024))
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def figures_of(phases: Sequence[Phase], options: argparse.Namespace) -> dict[str, Any]:
    registrations, opened, closed = phases
    figures: dict[str, Any] = {
        "workers": options.workers,
        "errors": sum(phase.errors for phase in phases),
        "offered_per_s": options.rate,
        "answered_per_s": round(opened.rate, 1),
        "p50_ms_sqlite": round(opened.quantile_ms(0.5), 1),
        "p99_ms_sqlite": round(opened.quantile_ms(0.99), 1),
        "max_ms_sqlite": round(opened.quantile_ms(1.0), 1),
        "requests_per_s_sqlite": round(closed.rate, 1),
        "coordinator_cpu_ms": round(1000 * closed.cpu_seconds / len(closed.samples), 2),
        "p99_ms_register": round(registrations.quantile_ms(0.99), 1),
    }
    for kind in ("lease", "upload", "receipt", "status"):
        if not any(sample.kind == kind for sample in opened.samples):
            continue
        figures[f"p50_ms_{kind}"] = round(opened.quantile_ms(0.5, kind), 1)
        figures[f"p99_ms_{kind}"] = round(opened.quantile_ms(0.99, kind), 1)
    return figures


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second, open loop (default 300)")
    parser.add_argument("--registrations-per-s", type=float, default=100.0)
    parser.add_argument("--busy", type=int, default=64, help="workers of the closed loop (default 64)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each loop (default 30)")
    parser.add_argument("--body-bytes", type=int, default=16 * 1024, help="of a submission (default 16384)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sync = sync_ms(folder)
        with serving(folder) as served, judging(folder / "data"):
            phases = asyncio.run(load(served, options))
    figures = figures_of(phases, options) | {"sync_ms": round(sync, 2)}
    if options.json:
        notes = {key: getattr(options, key) for key in ("busy", "seconds", "body_bytes", "seed")}
        print(json.dumps({"benchmark": "load", "machine": machine.describe(), "figures": figures, "notes": notes}))


if __name__ == "__main__":
    main()
