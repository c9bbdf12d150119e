"""Latency and size of the run's pages, and cost of the log: `python -m benchmarks.dashboard [--json]`.

A real coordinator process (`swarmproof coordinator`, SQLite) on the database of a run with 10,000 workers and 100,000
judged submissions, as `benchmarks.dashboards.stocked` writes it.

- `first_paint_ms`: Chromium's first contentful paint of the run's page, median of `--loads`, each with an empty cache.
  `first_paint_bytes` is what was transferred for it (the page, its style sheet, its script, compressed), `bytes` all of
  a first visit, with uPlot, which comes after the paint, and `bytes_again` a second visit. `plots_ms`: until plots can
  be read off. Null where there is no Chromium.
- `page_ms` is a page that had to be made anew, `page_again_ms` one that was made within the second; `workers_ms` is
  another part of the table of workers, `submission_ms` and `audit_ms` are those pages, `status_ms` and `metrics_ms`
  `/v1/status` and `/metrics`, made anew. Medians over HTTP on loopback, all with the whole run behind them.
- `page_ms_small` is `page_ms` of a run of the same kind with 100 workers and 1,000 submissions.
- `append_ms_N`, `inclusion_ms_N`, `consistency_ms_N`, `root_ms_N`: the log's functions at N entries, without commits;
  medians. `append_growth` and `inclusion_growth` are the ratios of 1,000,000 entries to 1,000: 1 is flat, and the
  hashes of a proof grow with the logarithm, from 10 to 20.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.dashboards.browser import look
from benchmarks.dashboards.served import serving
from benchmarks.dashboards.stocked import Stock, append_many
from benchmarks.report import make_parser, report, say
from benchmarks.timing import milliseconds
from coordinator.storage import log
from coordinator.storage.database import Database, sqlite_url
from node.protocol.messages import PolicyEntry
from shardcast.wire import encode

ANEW_SECONDS = 1.1
"""Longer than any page is cached."""

SIZES = (1_000, 10_000, 100_000, 1_000_000)


def get(url: str) -> bytes:
    """Return one reply's body."""
    with urlopen(url, timeout=60) as answer:  # noqa: S310  (our own process's)
        return bytes(answer.read())


def median_ms(url: Callable[[int], str], *, times: int, anew: bool) -> float:
    """Return the median of `times` replies; with `anew`, wait before each until no cached page is valid."""
    taken = []
    for number in range(times):
        if anew:
            time.sleep(ANEW_SECONDS)
        taken.append(milliseconds(lambda at=number: get(url(at))))  # type: ignore[misc]
    return round(statistics.median(taken), 2)


def pages(url: str, submissions: list[str], *, times: int) -> dict[str, float]:
    """Time each kind of page."""
    get(f"{url}/")  # templates are compiled, and the past is read once
    rng = random.Random(1)
    workers = [f"{url}/?sort={sort}" for sort in ("seen", "rejected", "credit")] + [f"{url}/?find=ab"]
    for _ in range(2 * times):
        following = re.search(r'href="/(\?sort=credit&amp;after=[^"#]+)', get(workers[-2]).decode())
        if following:
            workers.insert(-1, f"{url}/{following[1].replace('&amp;', '&')}")
    return {
        "page_ms": median_ms(lambda _: f"{url}/", times=times, anew=True),
        "page_again_ms": median_ms(lambda _: f"{url}/", times=5 * times, anew=False),
        "workers_ms": median_ms(lambda number: workers[number % len(workers)], times=5 * times, anew=False),
        "submission_ms": median_ms(
            lambda _: f"{url}/submissions/{rng.choice(submissions)}", times=5 * times, anew=False
        ),
        "audit_ms": median_ms(lambda _: f"{url}/audit", times=5 * times, anew=False),
        "status_ms": median_ms(lambda _: f"{url}/v1/status", times=times, anew=True),
        "metrics_ms": median_ms(lambda _: f"{url}/metrics", times=times, anew=True),
    }


def log_costs(folder: Path, sizes: Sequence[int]) -> dict[str, float]:
    """Time the log's functions at each size."""
    database = Database(sqlite_url(folder))
    database.migrate()
    rng, figures = random.Random(1), dict[str, float]()
    for size in sizes:
        with database.write(durable=False) as connection:
            append_many(connection, [_leaf(index) for index in range(log.size(connection), size)])
        figures |= {f"{name}_ms_{size}": value for name, value in _costs(database, size, rng).items()}
        say(f"log of {size:>9,}: " + ", ".join(f"{k} {v}" for k, v in figures.items() if k.endswith(f"_{size}")))
    database.close()
    for name in ("append", "inclusion"):
        figures[f"{name}_growth"] = round(figures[f"{name}_ms_{sizes[-1]}"] / figures[f"{name}_ms_{sizes[0]}"], 2)
    return figures


def _leaf(index: int) -> bytes:
    return encode(_entry(index))


def _entry(index: int) -> PolicyEntry:
    return PolicyEntry(version=index, manifest_digest=f"{index:064x}", result_digest=f"{index:064x}")


def _costs(database: Database, size: int, rng: random.Random) -> dict[str, float]:
    append, inclusion, consistency, root = (list[float]() for _ in range(4))
    with database.write(durable=False) as connection:
        for index in range(size, size + 257):
            append += [milliseconds(lambda at=index: log.append(connection, _entry(at)))]  # type: ignore[misc]
        connection.rollback()
    with database.read() as connection:
        for _ in range(200):
            at = rng.randrange(size)
            inclusion.append(milliseconds(lambda at=at: log.inclusion(connection, at, size)))  # type: ignore[misc]
            consistency.append(milliseconds(lambda at=at: log.consistency(connection, at, size)))  # type: ignore[misc]
            root.append(milliseconds(lambda: log.root(connection, size)))
    timings = {"append": append, "inclusion": inclusion, "consistency": consistency, "root": root}
    return {name: round(statistics.median(values), 3) for name, values in timings.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    figures: dict[str, Any] = {"workers": options.workers, "submissions": options.submissions}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        small = Stock(workers=100, submissions=1000)
        with serving(folder / "small", small) as served:
            figures["page_ms_small"] = pages(served.url, served.submissions, times=options.times)["page_ms"]
        shutil.rmtree(folder / "small")
        started = time.perf_counter()
        large = Stock(workers=options.workers, submissions=options.submissions, relays=48)
        with serving(folder / "large", large) as served:
            say(f"the run was written in {time.perf_counter() - started:.0f} s")
            figures |= pages(served.url, served.submissions, times=options.times)
            figures |= look(served.url, loads=options.loads)
        shutil.rmtree(folder / "large")
        (folder / "log").mkdir()
        figures |= log_costs(folder / "log", [size for size in SIZES if size <= options.log_entries])
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--submissions", type=int, default=100_000)
    parser.add_argument("--log-entries", type=int, default=SIZES[-1], help="of the largest log (default 1000000)")
    parser.add_argument("--times", type=int, default=9, help="pages of each kind that are made anew (default 9)")
    parser.add_argument("--loads", type=int, default=7, help="visits with an empty cache (default 7)")
    options = parser.parse_args()
    figures = measure(options)
    notes: dict[str, Any] = {"times": options.times, "loads": options.loads}
    notes |= {name: "no Chromium on this machine" for name, value in figures.items() if value is None}
    report("dashboard", options, figures, notes)


if __name__ == "__main__":
    main()
