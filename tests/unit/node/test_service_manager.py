"""What systemd hears of a process: too little, and it kills one that works; too much, and it keeps one that hangs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from notified import Manager

from node.runtime.service_manager import ALIVE, READY, notify, report_serving


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    with TemporaryDirectory(prefix="notify-") as folder:  # the address of a socket has 107 bytes, tmp_path's often more
        name = f"{folder}/notify@1" if request.param == "path" else f"\0swarmproof-test-{os.getpid()}"
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        for variable in ("WATCHDOG_PID", "WATCHDOG_USEC"):
            monkeypatch.delenv(variable, raising=False)
        made = Manager(name)
        yield made
        made.close()


async def test_a_process_that_serves_says_so_and_goes_on_saying_that_it_runs(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    reporting = asyncio.create_task(report_serving())
    heard: list[str] = []
    while len(heard) < 4:
        await asyncio.sleep(0.005)
        heard += manager.heard()
    assert heard[0] == READY
    assert set(heard[1:]) == {ALIVE}
    reporting.cancel()


@pytest.mark.parametrize("settings", [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "60", "WATCHDOG_PID": "1"}])
async def test_a_process_that_nobody_watches_says_that_it_serves_and_no_more(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    await asyncio.wait_for(report_serving(), 5)
    assert manager.heard() == [READY]


def test_service_goes_on_when_its_manager_is_away_or_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY)
    assert "was not told READY=1" in caplog.text
