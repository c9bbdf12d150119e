"""What the run's pages cost: `python -m benchmarks.dashboard [--json]`.

A real coordinator process (`swarmproof coordinator`, SQLite) on the database of a run with 10,000 workers and 100,000
judged submissions, as `benchmarks.dashboards.stocked` writes it.

- `first_paint_ms`: Chromium's first contentful paint of the run's page, median of `--loads`, each with an empty cache.
  `first_paint_bytes` is what was transferred for it (the page, its style sheet, its script, compressed), `bytes` all of
  a first visit, with Plotly, which comes after the paint, and `bytes_again` a second visit. `plots_ms`: until plots can
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
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks import machine
from benchmarks.dashboards.browser import look
from benchmarks.dashboards.served import serving
from benchmarks.dashboards.stocked import Stock, append_many
from coordinator.storage import log
from coordinator.storage.database import Database, sqlite_url
from node.protocol.messages import PolicyEntry
from shardcast.wire import encode

ANEW_SECONDS = 1.1
"""After it nothing that was made is still good."""

SIZES = (1_000, 10_000, 100_000, 1_000_000)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def get(url: str) -> bytes:
    """One answer."""
    with urlopen(url, timeout=60) as answer:  # noqa: S310  (our own process's)
        return bytes(answer.read())


def median_ms(url: Callable[[int], str], *, times: int, anew: bool) -> float:
    """The median of `times` answers; with `anew` each is made for the purpose."""
    taken = []
    for number in range(times):
        if anew:
            time.sleep(ANEW_SECONDS)
        taken.append(_timed(lambda at=number: get(url(at))))  # type: ignore[misc]
    return round(statistics.median(taken), 2)


def pages(url: str, submissions: list[str], *, times: int) -> dict[str, float]:
    """The time of each kind of page."""
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


def log_costs(folder: Path) -> dict[str, float]:
    """The log's functions at each of SIZES entries."""
    database = Database(sqlite_url(folder))
    database.migrate()
    rng, figures = random.Random(1), dict[str, float]()
    for size in SIZES:
        with database.write(durable=False) as connection:
            append_many(connection, [_leaf(index) for index in range(log.size(connection), size)])
        figures |= {f"{name}_ms_{size}": value for name, value in _costs(database, size, rng).items()}
        say(f"log of {size:>9,}: " + ", ".join(f"{k} {v}" for k, v in figures.items() if k.endswith(f"_{size}")))
    database.close()
    for name in ("append", "inclusion"):
        figures[f"{name}_growth"] = round(figures[f"{name}_ms_{SIZES[-1]}"] / figures[f"{name}_ms_{SIZES[0]}"], 2)
    return figures


def _leaf(index: int) -> bytes:
    return encode(_entry(index))


def _entry(index: int) -> PolicyEntry:
    return PolicyEntry(version=index, manifest_digest=f"{index:064x}", result_digest=f"{index:064x}")


def _costs(database: Database, size: int, rng: random.Random) -> dict[str, float]:
    append, inclusion, consistency, root = (list[float]() for _ in range(4))
    with database.write(durable=False) as connection:
        for index in range(size, size + 257):
            append += [_timed(lambda at=index: log.append(connection, _entry(at)))]  # type: ignore[misc]
        connection.rollback()
    with database.read() as connection:
        for _ in range(200):
            at = rng.randrange(size)
            inclusion.append(_timed(lambda at=at: log.inclusion(connection, at, size)))  # type: ignore[misc]
            consistency.append(_timed(lambda at=at: log.consistency(connection, at, size)))  # type: ignore[misc]
            root.append(_timed(lambda: log.root(connection, size)))
    timings = {"append": append, "inclusion": inclusion, "consistency": consistency, "root": root}
    return {name: round(statistics.median(values), 3) for name, values in timings.items()}


def _timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - started)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
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
            say(json.dumps(figures))
        shutil.rmtree(folder / "large")
        (folder / "log").mkdir()
        figures |= log_costs(folder / "log")
    return figures


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--submissions", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=9, help="pages of each kind that are made anew (default 9)")
    parser.add_argument("--loads", type=int, default=7, help="visits with an empty cache (default 7)")
    options = parser.parse_args()
    figures = measure(options)
    for name, value in figures.items():
        say(f"{name:<28} {value}")
    if options.json:
        notes = {"times": options.times, "loads": options.loads}
        print(json.dumps({"benchmark": "dashboard", "machine": machine.describe(), "figures": figures, "notes": notes}))


if __name__ == "__main__":
    main()
