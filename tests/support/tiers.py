"""The four tiers of tests: which one a test belongs to, what each may take, and what a run says at its end.

A test belongs to the tier that its folder is named after (`tests/service/...`), unless a marker of a tier's name says
otherwise. `make unit`, `make service`, `make system` and `make nightly` run one each.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import date
from pathlib import Path

import pytest
from locations import ROOT

BUDGETS = {"unit": 90, "service": 210, "system": 1500, "nightly": 3600}
"""Seconds of wall time on two quiet cores. Only printed: a machine that is busy with other things is not a defect."""
UNIT_SECONDS = 1.0
MOST_QUARANTINED = 5

_FOLDER = ROOT / "tests"
_running: ContextVar[str | None] = ContextVar("running", default=None)
"""The unit test that runs now, which may start no process."""


def tier_of(item: pytest.Item) -> str:
    """Name the tier of a collected test; raise UsageError for a test outside the tiers' folders."""
    for tier in BUDGETS:
        if item.get_closest_marker(tier) is not None:
            return tier
    folder = item.path.relative_to(_FOLDER).parts[0]
    if folder not in BUDGETS:
        raise pytest.UsageError(f"{item.nodeid}: tests live in tests/ + one of {', '.join(BUDGETS)}")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and let those in quarantine fail without failing the run."""
    quarantined = [item for item in items if item.get_closest_marker("quarantine") is not None]
    if len({item.nodeid.partition("[")[0] for item in quarantined}) > MOST_QUARANTINED:
        raise pytest.UsageError(f"more than {MOST_QUARANTINED} tests are in quarantine: mend one before adding another")
    for item in items:
        tier = tier_of(item)
        if item.get_closest_marker(tier) is None:
            item.add_marker(tier)
        # A report's keywords hold the folders' names too, and a marker may say otherwise.
        item.user_properties.append(("tier", tier))
    for item in quarantined:
        reason, since = _quarantine(item)
        item.add_marker(pytest.mark.xfail(reason=f"quarantine since {since}: {reason}", strict=False))
    _sort_longest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Have each of several processes begin with another file of a folder.

    In a fresh clone, whoever imports a test file first also compiles it, which takes a process 5 s for all; those that
    come after find it compiled. In the same order each would compile every file, at the same time as the others.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and isinstance(collector, pytest.Directory):
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = [*report.result[first:], *report.result[:first]]
    return report


def _sort_longest_first(items: list[pytest.Item]) -> None:
    """Put the files first whose tests ask for most time, so that no process ends a run alone with a long one.

    Others by name: pytest-xdist wants the same order of every process, however each has collected.
    """
    seconds: Counter[Path] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("timeout")) is not None:
            seconds[item.path] += marker.args[0]
    items.sort(key=lambda item: (-seconds[item.path], item.path))


def _quarantine(item: pytest.Item) -> tuple[str, date]:
    marker = item.get_closest_marker("quarantine")
    assert marker is not None
    reason = marker.kwargs.get("reason")
    if not reason or "since" not in marker.kwargs:
        raise pytest.UsageError(f'{item.nodeid}: quarantine takes reason="..." and since="YYYY-MM-DD"')
    since = date.fromisoformat(marker.kwargs["since"])
    if since <= _last_release():
        raise pytest.UsageError(f"{item.nodeid}: in quarantine since before the last release: mend or remove it")
    return str(reason), since


def _last_release() -> date:
    """The date in the changelog's newest heading that has one (`## 1.2.3 - 2027-01-31`)."""
    dates = re.findall(r"^## .* (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return max(map(date.fromisoformat, dates), default=date.min)


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: fail a unit test that starts a process."""
    if event in {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"} and _running.get():
        raise RuntimeError(f"a unit test starts no process ({event}); tests/service and tests/system are for those")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    token = _running.set(item.nodeid if item.get_closest_marker("unit") is not None else None)
    try:
        return (yield)
    finally:
        _running.reset(token)


class Account:
    """What the tests of a session took and what was left out, told at its end."""

    def __init__(self, processes: int) -> None:
        self._processes = max(1, processes)
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._slow: list[tuple[float, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = dict(report.user_properties).get("tier")
        if tier is None:
            return
        self._seconds[tier] += report.duration
        self._tests[tier] += report.when == "call"
        if report.when == "call" and tier == "unit" and report.duration > UNIT_SECONDS:
            self._slow.append((report.duration, report.nodeid))
        if report.skipped and not hasattr(report, "wasxfail") and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        if self._slow:
            terminalreporter.section(f"unit tests over {UNIT_SECONDS:.0f} s")
            for seconds, name in sorted(self._slow, reverse=True)[:20]:
                write(f"{seconds:6.1f} s  {name}")
        terminalreporter.section("tiers")
        for tier in self._seconds:
            seconds = self._seconds[tier] / self._processes
            write(f"{tier:8} {self._tests[tier]:5} tests {seconds:6.0f} s of {BUDGETS[tier]} s")
        if self._skipped:
            terminalreporter.section("skipped, and how to run them")
            for reason, count in sorted(self._skipped.items()):
                write(f"{count:5}  {reason}")


def pytest_configure(config: pytest.Config) -> None:
    for tier, seconds in BUDGETS.items():
        config.addinivalue_line("markers", f"{tier}: a test of this tier, at most {seconds} s in all")
    config.addinivalue_line("markers", "quarantine(reason, since): flaky; runs, is listed and fails nothing")
    if not hasattr(config, "workerinput"):
        processes = config.getoption("numprocesses", default=None)
        config.pluginmanager.register(Account(processes if isinstance(processes, int) else 1))
    sys.addaudithook(_refuse_processes)
