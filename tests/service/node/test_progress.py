"""How far a fetch is: one line that is rewritten on a terminal, log lines elsewhere, and figures for programs.

What would break for whom: a contributor sees nothing for minutes, takes the worker for dead and ends it; or log lines
and the line that is rewritten run into each other, and the one error that matters cannot be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import textwrap
import time

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from publishing import SWARMPROOF, slow
from terminal import Terminal

from node.broadcast import progress
from node.broadcast.progress import FetchProgress
from node.joining.session import JoinSettings
from node.relay.advice import Serving
from node.relay.daemon import RelaySettings, run_relay

pytestmark = pytest.mark.system  # starts processes, and waits on real clocks

OTHER_KEY = Ed25519PrivateKey.from_private_bytes(b"\3" * 32)
BAR = r"version 0 [━╸╺]+ \d+% of [\d.]+ MB  [\d.]+ \w+/s  1 source  \d+:\d\d left"
# The last one may come when there is nothing left to ask for.
LINE = r"version 0: \d+% of [\d.]+ MB, [\d.]+ \w+/s  (1 source|0 sources)  \d+:\d\d left"


@contextlib.contextmanager
def behind_a_slow_line(swarm, seconds=2):
    """The only source that the coordinator names takes at least `seconds` for the policy."""
    with slow(swarm.origin_url, bytes_per_s=swarm.policy_bytes // seconds) as url:
        swarm.coordinator.relays = (url,)
        yield url


@pytest.fixture
def swarm(swarm, tiny_policy_path):
    swarm.policy_bytes = tiny_policy_path.stat().st_size
    return swarm


async def test_a_terminal_shows_how_far_the_policy_is_and_keeps_log_lines_whole(swarm, tmp_path):
    """Of a relay; a worker has a view of its own."""
    with behind_a_slow_line(swarm) as url:
        command = [*SWARMPROOF, "relay", "--coordinator", swarm.url, "--run-id", swarm.run_id, "--state", str(tmp_path)]
        terminal = Terminal(*command, "--port", "0", "--upstream", url)
        await terminal.until(BAR)
        await terminal.until(r"version 0 fetched completely")
    terminal.end()
    for said in ("relaying run", "version 0 fetched completely"):
        assert any(re.match(rf"\d\d:\d\d:\d\d INFO    .*{said}", line) for line in terminal.lines), terminal.lines
    assert "Traceback" not in terminal.seen


CHATTY = """
    import logging, time
    from node.broadcast.progress import FetchProgress
    from node.runtime.logs import set_up_logging
    from shardcast import VersionProgress

    set_up_logging()
    log = logging.getLogger("node.chatty")
    view = FetchProgress()
    log.warning("before")
    with view.fetching(1) as one, view.fetching(2) as other:
        for step in range(1, 30):
            one(VersionProgress(step * 10_000, 1_000_000, 5e5, 1_000_000, 3))
            other(VersionProgress(step * 20_000, 1_000_000, 5e5, 1_000_000, 2))
            log.warning("line %d of several", step)
            time.sleep(0.05)
    log.warning("after")
"""


async def test_log_lines_and_rewritten_lines_do_not_run_into_each_other():
    """Two fetches at once, as a relay has them, and something to say all the while."""
    terminal = Terminal(sys.executable, "-c", textwrap.dedent(CHATTY))
    await terminal.until("after")
    terminal.end()
    said = [line for line in terminal.lines if "WARNING" in line]
    expected = ["before", *(f"line {step} of several" for step in range(1, 30)), "after"]
    assert [re.sub(r"^\d\d:\d\d:\d\d WARNING ", "", line) for line in said] == expected
    bars = [line for line in terminal.lines if "of 1.0 MB" in line]
    for version, sources in ((1, 3), (2, 2)):
        whole = rf"version {version} [━╸╺]+ \d+% of 1\.0 MB  500\.0 kB/s  {sources} sources  0:0\d left"
        assert any(re.fullmatch(whole, bar) for bar in bars), bars
    assert all(bar.startswith("version ") for bar in bars)


async def test_a_log_has_a_line_now_and_then_and_moves_no_cursor(swarm, tmp_path, caplog, capfd, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.2)
    stop, began = asyncio.Event(), time.monotonic()
    with behind_a_slow_line(swarm) as url, caplog.at_level(logging.INFO):
        settings = RelaySettings(
            join=JoinSettings(run_id=swarm.run_id, coordinators=(swarm.url,)),
            state=tmp_path,
            host="127.0.0.1",
            port=0,
            upstreams=(url,),
        )
        relay = asyncio.create_task(run_relay(settings, key=OTHER_KEY, stop=stop, watch=FetchProgress().fetching))
        await swarm.until(lambda: "version 0 fetched completely" in caplog.text)
        stop.set()
        await relay
    lines = [message for message in caplog.messages if message.startswith("version 0: ")]
    assert 2 <= len(lines) <= (time.monotonic() - began) / progress.LINE_SECONDS + 1
    assert all(re.fullmatch(LINE, said) for said in lines), lines
    assert "\x1b" not in capfd.readouterr().err


async def test_status_and_metrics_of_a_worker_have_the_same_figures(swarm):
    """Of the fetch that is under way, and none of one that has ended."""
    with behind_a_slow_line(swarm, seconds=6):
        async with swarm.working(serving=Serving(host="127.0.0.1", port=0)), aiohttp.ClientSession() as http:
            (slow_url,) = swarm.coordinator.relays
            await swarm.until(lambda: swarm.coordinator.relays != (slow_url,))
            (url,) = swarm.coordinator.relays

            async def figures() -> dict[str, float]:
                async with http.get(f"{url}/metrics") as response:
                    found = re.findall(r'shardcast_fetch_(\w+)\{version="0"\} (\S+)', await response.text())
                return {name: float(value) for name, value in found}

            seen, deadline = await figures(), time.monotonic() + 120
            while not seen and time.monotonic() < deadline:
                seen = await figures()
            assert set(seen) == {"done_bytes", "total_bytes", "bytes_per_second", "sources", "seconds_left"}
            assert seen["total_bytes"] == swarm.policy_bytes
            assert 0 < seen["done_bytes"] <= seen["total_bytes"]
            async with http.get(f"{url}/v1/status") as response:
                (described,) = (await response.json())["fetching"]
            await swarm.until(lambda: (swarm.status()["broadcast"] or {}).get("done_bytes"))
            assert described.keys() == swarm.status()["broadcast"].keys()
            assert (described["version"], described["total_bytes"]) == (0, swarm.policy_bytes)
            await swarm.until(lambda: swarm.status()["held_versions"] == [0])
            assert await figures() == {}
            await swarm.until(lambda: swarm.status()["broadcast"] is None)
