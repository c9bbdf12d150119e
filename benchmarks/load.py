"""Coordinator load: latency, throughput and errors of `python -m benchmarks.load [--json]`.

A real coordinator process (`swarmproof coordinator`, the default limits) and 1,000 simulated workers in another, on the
same cores: first with SQLite, then with a PostgreSQL server of its own on the same cores as well, its settings the
defaults. Each worker has a key, an address of loopback (so that each has the limits of an address to itself;
Linux only) and a connection that it keeps. It registers, and then, over and over, asks for a lease, submits a body of
random bytes for it, waits for the verdict, and every tenth time asks for `/v1/status`. Requests are signed as real ones
are, and a submission waits for `100 Continue`. A third process stands in for the verifiers: it looks for submissions
every 50 ms and admits them all, in the verifier's own transactions, so that workers keep their standing; it computes
nothing. The wait for a verdict counts like any other request.

Three phases:

- registrations, open loop, at `--registrations-per-s`;
- closed loop: `--busy` workers send one request after the other for `--seconds`, and the others are silent. That is the
  most that the machine does, with the generator and the stand-in on the same cores;
- open loop for `--seconds`, at `--rate` requests a second or, without it, at 70 % of what the closed loop did: the
  moments are drawn beforehand (a Poisson process), each for a worker drawn at random, and a request's latency counts
  from that moment, whether or not the worker, the generator or the coordinator was free then. So a stall is counted for
  all who would have asked during it. Before, each worker sends none, one or two requests, so that they do not all ask
  for their first lease within the same seconds: that is a run's start, and three times the leases of the closed loop.

Then the closed loop again, on PostgreSQL with two and with four API processes (`--role api`) and a leader: the workers
take turns at them. On as many cores as one API and its server fill, that says what more processes cost, and not what
they bring on more machines.

Then `loading.overload`: three times what a closed loop delivers, offered by workers who obey Retry-After.
`goodput_at_3x_overload_sqlite` is what is delivered then over `delivered_per_s_sqlite`, the capacity, and
`refused_lease_at_3x_overload_sqlite` the share of the leases that were refused. Generator and stand-in share a core,
and the coordinator has the other one.

Then `loading.processor`: what a lease, an upload and a receipt cost the coordinator's process, each alone, as
`processor_ms_lease_sqlite` and so on, and as `processor_ms_per_request_sqlite`, the mean of the three.

Last, one verifier process on `--groups` submissions that wait, with an engine that computes nothing and finds all
perfect (`loading.verdicts`): `verdicts_per_s_sqlite` and `verdicts_per_s_postgresql`, `..._verifiers_2` with two.
`verdict_cpu_ms_sqlite` is the processor time of the verifiers for each, which other load of the machine changes less,
and `verdict_cpu_ms_claim_sqlite` and so on that of its phases (`loading.verdicts.PHASES`).

With `--history N ...` nothing but `loading.growth`: what the database's part of a lease, an upload, a verdict and a
receipt, and what status, metrics and page cost with N submissions in the database, `lease_history_1000` and so on, and
how much worse the largest N is than the smallest, `slower_lease`. `slower_with_1e6_submissions` is the worst of these
where the largest is a million: 3.3 GB, and three times that while VACUUM runs.

`p50_ms_sqlite` and `p99_ms_sqlite` are of the open loop, at `offered_per_s_sqlite`, `requests_per_s_sqlite` of the
closed one, and so are those of PostgreSQL; `requests_per_s_postgresql_apis_2` is of the closed loop with two APIs.
`errors` counts answers that are not 2xx and requests without an answer, in all phases. `coordinator_cpu_ms_...` is
processor time of the coordinators for each request of the closed loop, `postgresql_cpu_ms` that of the server. Each
submission is synced to disk once and committed with another sync before its answer: `sync_ms` is the median of one
such sync here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.loading.coordinator import Served, judging, serving
from benchmarks.loading.growth import GROWING, growth
from benchmarks.loading.loops import LoadPhase, arrivals, closed_loop, open_loop
from benchmarks.loading.overload import KINDS, Overload, deliveries, overload, own_cores
from benchmarks.loading.postgresql import running_postgresql
from benchmarks.loading.processor import WORKERS, processor_ms
from benchmarks.loading.verdicts import verdicts_per_s
from benchmarks.loading.worker import SimulatedWorker
from benchmarks.report import make_parser, report, say

A_MILLION = 1_000_000
SHARE_OF_CAPACITY = 0.7
"""Of what the closed loop did, what the open loop offers."""

NOT_MEASURED = {"slower_with_1e6_submissions": "only with --history"}
PARTS = ("requests", "overload", "processor", "verdicts")


def workers_of(served: Served, count: int, options: argparse.Namespace, *, first: int = 0) -> list[SimulatedWorker]:
    """Make workers, each with an address of its own, the `first` one's number, which take turns at the APIs."""
    run_id, ports = served.home.run_id, served.ports
    return [
        SimulatedWorker(run_id, ports[index % len(ports)], f"127.1.{index >> 8}.{index & 255}", options.body_bytes)
        for index in range(first, first + count)
    ]


async def busy_only(served: Served, options: argparse.Namespace) -> LoadPhase:
    """Run the closed loop alone."""
    workers = workers_of(served, options.busy, options)
    await asyncio.gather(*(worker.step(due=time.perf_counter(), samples=[]) for worker in workers))
    phase = await closed_loop(served, workers, seconds=options.seconds)
    tell(phase)
    for worker in workers:
        worker.close()
    return phase


async def spread(workers: Sequence[SimulatedWorker], *, busy: int, rng: random.Random) -> None:
    """Bring the workers to different requests of their lives; `busy` of them go on at a time."""

    async def go_on(worker: SimulatedWorker, requests: int) -> None:
        for _ in range(requests):
            await worker.step(due=time.perf_counter(), samples=[])

    for index in range(0, len(workers), busy):
        await asyncio.gather(*(go_on(worker, rng.randrange(3)) for worker in workers[index : index + busy]))


async def load(served: Served, options: argparse.Namespace) -> list[LoadPhase]:
    """Run all three phases."""
    rng = random.Random(options.seed)
    workers = workers_of(served, options.workers, options)
    each = 1 / options.registrations_per_s
    plan = [(index * each, worker) for index, worker in enumerate(workers)]
    phases = [await open_loop(served, plan, name="registrations")]
    tell(phases[-1])
    phases.append(await closed_loop(served, workers[: options.busy], seconds=options.seconds))
    tell(phases[-1])
    await spread(workers, busy=options.busy, rng=rng)
    rate = options.rate or SHARE_OF_CAPACITY * phases[-1].rate
    plan = arrivals(workers, rate=rate, seconds=options.seconds, rng=rng)
    phases.append(await open_loop(served, plan, name=f"open loop, {rate:.0f} requests/s offered"))
    tell(phases[-1])
    for worker in workers:
        worker.close()
    return phases


async def overloaded(served: Served, options: argparse.Namespace) -> tuple[float, Overload]:
    """Measure capacity, overload, and capacity again; return the capacity, deliveries a second, and the overload."""
    numbers = itertools.count(2 * options.workers)
    workers = workers_of(served, options.workers, options, first=options.workers)
    for index in range(0, len(workers), options.busy):
        each = workers[index : index + options.busy]
        await asyncio.gather(*(worker.persist("register", samples=[]) for worker in each))
    await workers[0].persist("receipt", samples=[])  # until the stand-in has started
    loops = [await closed_loop(served, workers[: options.busy], seconds=options.seconds / 3)]
    found = await overload(
        served,
        workers,
        new_worker=lambda: workers_of(served, 1, options, first=next(numbers))[0],
        capacity_per_s=deliveries(loops[0].samples) / loops[0].seconds,
        seconds=options.seconds,
        rng=random.Random(options.seed),
    )
    loops.append(await closed_loop(served, workers[: options.busy], seconds=options.seconds / 3))
    for worker in workers:
        worker.close()
    before, after = (deliveries(loop.samples) / loop.seconds for loop in loops)
    cpu_ms = [1000 * loop.cpu_seconds / max(1, deliveries(loop.samples)) for loop in loops]
    say(
        f"{found.offered_per_s:.0f} slots/s offered, {found.delivered_per_s:.1f} delivered; capacity {before:.1f} and "
        f"{after:.1f}; {found.cpu_ms:.2f} ms of the coordinator's processor time for each, {cpu_ms[0]:.2f} and "
        f"{cpu_ms[1]:.2f} at capacity; the generator took {100 * found.generator_share:.0f} % of its core; "
        f"{found.failures} failures"
    )
    for kind in KINDS:
        count = sum(sample.kind == kind for sample in found.samples)
        share, p99 = 100 * found.refused_share(kind), found.p99_ms(kind)
        say(f"  {kind:<10} {count:>7}   {share:5.1f} % refused   p99 of the others {p99:7.1f} ms")
    return (before + after) / 2, found


def tell(phase: LoadPhase) -> None:
    """Print a progress line for each kind of request."""
    say(
        f"{phase.name}: {phase.rate:.0f} requests/s, {phase.errors} errors, "
        f"{1000 * phase.cpu_seconds / len(phase.samples):.2f} ms of the coordinator's processor time each"
    )
    for kind in sorted({sample.kind for sample in phase.samples}):
        count = sum(sample.kind == kind for sample in phase.samples)
        p50, p99 = phase.quantile_ms(0.5, kind), phase.quantile_ms(0.99, kind)
        say(f"  {kind:<10} {count:>7}   p50 {p50:7.1f} ms   p99 {p99:7.1f} ms")


def sync_ms(folder: Path) -> float:
    """Return the median time of a sync of 16 KiB to disk, of 20."""
    taken = []
    with (folder / "sync").open("wb") as file:
        for _ in range(20):
            start = time.perf_counter()
            file.write(bytes(16 * 1024))
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def figures_of(phases: Sequence[LoadPhase], database: str, *, seconds: float) -> dict[str, Any]:
    """Compute the figures of one database's phases, whose open loop offered its requests in `seconds`."""
    registrations, closed, opened = phases
    figures: dict[str, Any] = {
        f"offered_per_s_{database}": round(len(opened.samples) / seconds, 1),
        f"answered_per_s_{database}": round(opened.rate, 1),
        f"p50_ms_{database}": round(opened.quantile_ms(0.5), 1),
        f"p99_ms_{database}": round(opened.quantile_ms(0.99), 1),
        f"max_ms_{database}": round(opened.quantile_ms(1.0), 1),
        f"requests_per_s_{database}": round(closed.rate, 1),
        f"coordinator_cpu_ms_{database}": round(1000 * closed.cpu_seconds / len(closed.samples), 2),
        f"p99_ms_register_{database}": round(registrations.quantile_ms(0.99), 1),
    }
    for kind in ("lease", "upload", "receipt", "status"):
        if not any(sample.kind == kind for sample in opened.samples):
            continue
        figures[f"p50_ms_{kind}_{database}"] = round(opened.quantile_ms(0.5, kind), 1)
        figures[f"p99_ms_{kind}_{database}"] = round(opened.quantile_ms(0.99, kind), 1)
    return figures


def on_sqlite(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Load a coordinator on SQLite; return the figures, and the number of errors."""
    say("SQLite")
    with serving(folder) as served, judging(folder / "data"):
        phases = asyncio.run(load(served, options))
    return figures_of(phases, "sqlite", seconds=options.seconds), sum(phase.errors for phase in phases)


def on_postgresql(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Load one API, then several, on PostgreSQL, each time on an empty server."""
    figures: dict[str, Any] = {}
    errors = 0
    for apis in (1, *options.apis):
        say(f"PostgreSQL, {apis} API{'s' if apis > 1 else ''}")
        inside = folder / str(apis)
        inside.mkdir()
        with (
            running_postgresql() as (url, server),
            serving(inside, apis=apis, database_url=url) as served,
            judging(inside / "data", url),
        ):
            seen = replace(served, server=server)
            phases = asyncio.run(load(seen, options)) if apis == 1 else [asyncio.run(busy_only(seen, options))]
        closed = phases[1] if apis == 1 else phases[0]
        errors += sum(phase.errors for phase in phases)
        if apis == 1:
            figures |= figures_of(phases, "postgresql", seconds=options.seconds)
            figures["postgresql_cpu_ms"] = round(1000 * closed.server_seconds / len(closed.samples), 2)
        else:
            figures[f"requests_per_s_postgresql_apis_{apis}"] = round(closed.rate, 1)
    return figures, errors


def processor_of(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure the processor time of each kind of request, by database."""
    found: dict[str, float] = {}
    for database in ("sqlite", "postgresql"):
        if options.only not in (None, database):
            continue
        inside = folder / f"processor-{database}"
        inside.mkdir()
        with contextlib.ExitStack() as running:
            url = running.enter_context(running_postgresql())[0] if database == "postgresql" else None
            served = running.enter_context(serving(inside, database_url=url))
            running.enter_context(judging(inside / "data", url))
            workers = workers_of(served, WORKERS, options)
            times = asyncio.run(processor_ms(served, workers, batches=options.batches))
        found |= {f"processor_ms_{kind}_{database}": round(ms, 2) for kind, ms in times.items()}
        found[f"processor_ms_per_request_{database}"] = round(statistics.mean(times.values()), 2)
    say(", ".join(f"{name} {ms}" for name, ms in found.items()))
    return found


def growth_of(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure with each length of a past; return all, and by how much the longest is worse than the shortest."""
    measured: dict[int, dict[str, float]] = {}
    for submissions in sorted(options.history):
        inside = folder / f"history-{submissions}"
        measured[submissions] = growth(inside, submissions)
        say(f"{submissions} submissions: " + ", ".join(f"{k} {v:.3g}" for k, v in measured[submissions].items()))
        shutil.rmtree(inside)
    shortest, longest = measured[min(measured)], measured[max(measured)]
    ratios = {name: longest[name] / shortest[name] for name in GROWING}
    found = {f"{name}_history_{count}": round(v, 3) for count, one in measured.items() for name, v in one.items()}
    found |= {f"slower_{name}": round(ratio, 2) for name, ratio in ratios.items()}
    if max(measured) == A_MILLION:
        found["slower_with_1e6_submissions"] = round(max(ratios.values()), 2)
    return found


def overload_of(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Offer each database's coordinator three times its capacity."""
    found: dict[str, Any] = {}
    for database in ("sqlite", "postgresql"):
        if options.only not in (None, database):
            continue
        inside = folder / f"overload-{database}"
        inside.mkdir()
        say(f"overload, {database}")
        with contextlib.ExitStack() as running:
            url = running.enter_context(running_postgresql())[0] if database == "postgresql" else None
            served = running.enter_context(serving(inside, database_url=url))
            judge = running.enter_context(judging(inside / "data", url))
            running.enter_context(own_cores(served, judge))
            capacity, one = asyncio.run(overloaded(served, options))
        found[f"delivered_per_s_{database}"] = round(capacity, 1)
        found[f"goodput_at_3x_overload_{database}"] = round(one.delivered_per_s / capacity, 2)
        for kind in KINDS:
            found[f"refused_{kind}_at_3x_overload_{database}"] = round(one.refused_share(kind), 3)
        found[f"failures_at_3x_overload_{database}"] = one.failures
    worst = min(found[name] for name in found if name.startswith("goodput"))
    return found | {"goodput_at_3x_overload": worst}


def verdicts_of(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure verdicts per second, by database and number of verifiers."""
    found: dict[str, float] = {}
    for verifiers, suffix in ((1, ""), (2, "_verifiers_2")):
        for database in ("sqlite", "postgresql"):
            if options.only not in (None, database):
                continue
            inside = folder / f"verdicts-{database}-{verifiers}"
            with contextlib.ExitStack() as running:
                url = running.enter_context(running_postgresql())[0] if database == "postgresql" else None
                rate = verdicts_per_s(inside, groups=options.groups, verifiers=verifiers, database_url=url)
            found[f"verdicts_per_s_{database}{suffix}"] = round(rate.per_s, 1)
            found[f"verdict_cpu_ms_{database}{suffix}"] = round(rate.cpu_ms, 2)
            if verifiers == 1:
                found |= {f"verdict_cpu_ms_{name}_{database}": round(ms, 3) for name, ms in rate.phases_ms.items()}
    say(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rate", type=float, help="requests a second, open loop (default: 70 %% of the closed loop's)")
    parser.add_argument("--registrations-per-s", type=float, default=100.0)
    parser.add_argument("--busy", type=int, default=64, help="workers of the closed loop (default 64)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each loop (default 30)")
    parser.add_argument("--body-bytes", type=int, default=16 * 1024, help="of a submission (default 16384)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--groups", type=int, default=600, help="submissions for each verdict figure (default 600)")
    parser.add_argument("--only", choices=("sqlite", "postgresql"), help="one database")
    parser.add_argument("--apis", type=int, nargs="*", default=[2, 4], help="of PostgreSQL (default 2 4)")
    parser.add_argument("--batches", type=int, default=5, help="of which the least processor time counts (default 5)")
    parser.add_argument("--history", type=int, nargs="+", default=[], help="only growth, with so many submissions")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure these only")
    options = parser.parse_args()
    parts = () if options.history else options.parts
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sync = sync_ms(folder)
        figures: dict[str, Any] = {"workers": options.workers, "errors": 0}
        for name, run in (("sqlite", on_sqlite), ("postgresql", on_postgresql)):
            if options.only in (None, name) and "requests" in parts:
                (folder / name).mkdir()
                found, errors = run(folder / name, options)
                figures |= found | {"errors": figures["errors"] + errors}
        for part, measure in (("overload", overload_of), ("processor", processor_of), ("verdicts", verdicts_of)):
            if part in parts:
                figures |= measure(folder, options)
        if options.history:
            figures |= growth_of(folder, options)
        figures |= {"sync_ms": round(sync, 2), **dict.fromkeys(NOT_MEASURED), **figures}
    notes = {key: getattr(options, key) for key in ("busy", "seconds", "body_bytes", "seed")}
    notes |= {} if options.history else NOT_MEASURED
    report("load", options, figures, notes)


if __name__ == "__main__":
    main()
