"""What a contributor sees of a worker, on a real pseudo-terminal, in a log and as JSON.

What would break for whom: a contributor takes a worker that waits for one that hangs and ends it; log lines and the
view run into each other; a closed window loses the slots under way; a program that reads the events finds other keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from publishing import ROOT, SWARMPROOF, slow
from rich.cells import cell_len
from rich.console import Console
from terminal import Screen, Terminal

from node.client.http import Backoff
from node.engines.torch import TorchEngine
from node.joining.session import JoinSettings
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.runtime.terminal import LiveDisplay
from node.worker.daemon import WorkerSettings, run_worker
from node.worker.events import KEYS, EventKind
from node.worker.view import watching as module
from node.worker.view.account import SessionTally, doing
from node.worker.view.render import Frame, rows
from node.worker.view.watching import LogReporter, WorkerIdentity, observe_worker

pytestmark = pytest.mark.usefixtures("forked_commands")

STATUS = {
    "run_name": "arithmetic",
    "coordinator": "http://192.0.2.1:8700",
    "coordinator_away": False,
    "endpoints": ["http://192.0.2.1:8700", "http://192.0.2.2:8700"],
    "network": None,
    "doing": "generating 4 slots with policy 3",
    "slots": [{}] * 4,
    "version": 3,
    "head_version": 4,
    "held_versions": [3, 2],
    "broadcast": {
        "version": 4,
        "done_bytes": 10**9,
        "total_bytes": 2 * 10**9,
        "bytes_per_s": 50_000_000,
        "sources": 3,
        "seconds_left": 25.0,
    },
    "uploading": 1,
    "undelivered": 3,
    "tokens": 123_456,
    "tokens_per_s": 1234.5,
    "admitted": 100,
    "rejected": 7,
    "admitted_tokens": 12_345_678,
    "standing": {
        "banned": False,
        "verified": 3,
        "probation": 8,
        "strikes": 2,
        "ban_after": 8,
        "full_rate": 1.0,
        "wait_seconds": 0.0,
        "unvested_tokens": 100,
    },
}
"""Of a worker that has everything to show at once."""


def account(**changes):
    counted = SessionTally(has_started=True)
    counted.status = lambda: STATUS | changes
    for reason, count in ((Reason.WRONG_TOKEN, 3), (Reason.PROOF_MISMATCH, 2), (Reason.TOO_LONG, 1)):
        for _ in range(count):
            counted.count(EventKind.REJECTED, {"reason": reason.value})
    return counted


def frame(**changes):
    now = account(**changes)
    return Frame(
        run_id="ab" * 32, node="cd" * 32, coordinators=("http://192.0.2.1:8700",), sums=now.sums(), status=now.status()
    )


def drawn(columns, lines, **changes):
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    return rows(frame(**changes), console, columns=columns, lines=lines)


def plain(shown):
    return [line.plain for line in shown]


def test_the_mean_of_a_run_that_is_over_does_not_fall_any_more():
    now = 100.0
    counted = account(run_is_over=True, tokens=5000)
    counted.clock = lambda: now
    counted.count(EventKind.LEASED, {})
    now = 150.0
    counted.count(EventKind.GENERATED, {})
    now = 1e6
    assert counted.sums()["mean_tokens_per_s"] == 100.0


# -- the picture


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 120, 300])
@pytest.mark.parametrize("lines", [1, 2, 8, 24, 60])
def test_the_picture_fits_the_terminal_and_keeps_what_matters_most(columns, lines):
    shown = drawn(columns, lines)
    assert 1 <= len(shown) <= lines
    assert all(line.cell_len <= columns for line in shown)
    if lines >= 8:
        assert any("generating 4 slots" in line or "generating" in line for line in plain(shown))


def test_a_large_terminal_shows_all_of_it_and_reasons_in_plain_words():
    told = {"nickname": "Ada", "hardware": "CPU, torch 2.13.0, float32"}
    text = " ".join(" ".join(plain(drawn(110, 60, **told))).split())
    for expected in (
        "shown as Ada: CPU, torch 2.13.0, float32",
        "arithmetic abababababababab… node cdcdcdcdcdcdcdcd…",
        "http://192.0.2.1:8700 and 1 other",
        "generating 4 slots with policy 3; uploading 1 slot",
        "50% of 2.0 GB, 50.0 MB/s, 3 sources, 0:25 left",
        "3, the newest is 4",
        "1,234 a second now",
        "4 leased, 0 generated, 0 delivered, 2 waiting for a verdict",
        "6 rejected; before this start 100 and 1",
        "3 wrong_token The tokens are not those that the slot's seed draws",
        "→ Change nothing about sampling",
        "100 would be void after a rejection",
        "on probation, 3 of 8 slots admitted in a row; 2 of 8 rejections to a ban; measured in full",
    ):
        assert expected in text, text


def test_a_strangers_text_drives_no_terminal():
    hostile = "x\x1b[2J\u202e\ny"
    shown = drawn(100, 60, run_name=hostile, coordinator=hostile, doing=hostile)
    assert not any(re.search(r"\x1b|\u202e|[\r\n]", line) for line in plain(shown))


def test_drawing_once_a_second_costs_less_than_a_hundredth_of_a_core():
    drawn(80, 40)
    frames = list[float]()
    for _ in range(20):
        began = time.thread_time()
        drawn(80, 40)
        frames.append(time.thread_time() - began)
    assert min(frames) < 0.01 * module.DRAW_SECONDS, "without what the collector does in between"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "generating 4 slots with policy 3; uploading 1 slot"),
        ({"coordinator_away": True}, "waiting for the coordinator; generating 4 slots with policy 3"),
        ({"coordinator_away": True, "slots": []}, "waiting for the coordinator"),
        ({"held_versions": [], "doing": "waiting for a policy", "uploading": 0}, "fetching policy 4"),
        (
            {"held_versions": [], "doing": "solving a proof of work of 20 bits, to join the run", "uploading": 0},
            "solving a proof of work of 20 bits, to join the run; fetching policy 4",
        ),
        ({"doing": "loading policy 3", "uploading": 2}, "loading policy 3; uploading 2 slots"),
    ],
)
def test_what_it_is_doing_is_what_a_person_waits_for(changes, expected):
    assert doing(STATUS | changes).startswith(expected)


# -- the lines that are drawn over themselves

SHAKEN = """
    import logging, sys, time
    from node.runtime.logs import set_up_logging
    from node.runtime.terminal import LiveDisplay

    set_up_logging()
    display, log, step = LiveDisplay(sys.stderr), logging.getLogger("node.shaken"), 0
    with display:
        while step < 40:
            columns, lines = display.console.size
            step += 1
            width = min(columns, 100)
            texts = [f"row {row} of {columns}".ljust(width, ".") for row in range(min(step % 4 + 6, lines - 1))]
            display.update("\\n".join(["=" * width, *texts]), refresh=True)
            if step % 3 == 0:
                log.warning("line %d, %s!", step, "long " * 20)
            if step % 5 == 0:
                print("printed", step)
            time.sleep(0.1)
        display.update("")
    log.warning("the end")
"""


async def test_resizing_and_log_lines_leave_one_view_and_every_line_once():
    terminal = Terminal(sys.executable, "-c", textwrap.dedent(SHAKEN), columns=100, lines=24)
    try:
        for columns, lines in ((60, 24), (120, 40), (70, 40), (100, 24)):
            await terminal.until_shown(rf"of {terminal.screen.columns}")
            terminal.resize(columns, lines)
        shown = await terminal.ended()
    finally:
        terminal.kill()
    whole = "".join(line.ljust(1) for line in shown.splitlines())
    assert re.findall(r"WARNING line (\d+)", shown) == [str(step) for step in range(3, 40, 3)]
    assert [int(step) for step in re.findall(r"printed (\d+)", shown)] == list(range(5, 41, 5))
    assert whole.count("!") == 13, "log lines are whole"
    assert "row 0" not in shown, "nothing of the view is left"
    assert shown.splitlines()[-1].endswith("WARNING the end")


class OnTerminal(io.StringIO):
    def isatty(self):
        return True


async def test_what_another_process_wrote_meanwhile_is_not_drawn_over():
    stream = OnTerminal()
    with LiveDisplay(stream) as display:
        display.update("one\ntwo", refresh=True)
        display.forget()
        stream.write("$ ls\nfiles\n")
        display.update("one\ntwo", refresh=True)
    screen = Screen(80, 24)
    screen.write(stream.getvalue().replace("\n", "\r\n"))
    assert screen.text == ["one", "two", "$ ls", "files", "one", "two"]


def test_a_terminal_that_is_gone_is_written_to_no_more_and_ends_nothing():
    class Gone(OnTerminal):
        writes = 0

        def write(self, text):
            self.writes += 1
            raise OSError(5, "Input/output error")

    stream = Gone()
    with LiveDisplay(stream) as display:
        for step in range(3):
            display.update(f"{step}", refresh=True)
            display.console.print("above")
    assert stream.writes == 1


# -- a worker on a terminal


@contextlib.asynccontextmanager
async def on_terminal(swarm, *options, slots="2", **terminal):
    command = [*SWARMPROOF, "worker", "--coordinator", swarm.url, "--run-id", swarm.run_id]
    shown = Terminal(*command, "--state", str(swarm.state), "--slots", slots, *options, **terminal)
    try:
        yield shown
    finally:
        shown.kill()


@pytest.mark.parametrize("columns", [60, 120])
async def test_a_contributor_sees_the_fetch_then_the_work_then_what_came_of_it(swarm, tiny_policy_path, columns):
    with slow(swarm.origin_url, bytes_per_s=tiny_policy_path.stat().st_size // 8) as url:
        swarm.coordinator.relays = (url,)
        async with on_terminal(swarm, columns=columns) as terminal:
            await terminal.until_shown(r"now +fetching policy 0")
            await terminal.until_shown(
                r"fetching +0  ━+  \d+% of [\d.]+ MB,\s+[\d.]+\s\w+/s,\s+1\s+source,\s+0:0\d\s+left"
            )
            shown = await terminal.until_shown(r"verdicts +[1-9]\d* admitted, 0 rejected")
            view = shown[shown.rindex("── swarmproof worker") :].splitlines()
            assert all(cell_len(line) <= columns for line in view)
            assert shown.count("── swarmproof worker") == 1
            for expected in (r"run +test ", rf"coordinator +{swarm.url}", r"policy +0$", r"credit +[\d,]+ tokens"):
                assert re.search(expected, shown, re.MULTILINE), shown
            assert re.search(r"\d\d:\d\d:\d\d INFO +policy 0 is here", shown.replace("\n", ""))
            terminal.press("\x03")
            shown = await terminal.ended()
            assert terminal.process.returncode == 0
    final_summary = shown[shown.rindex("ended        after") :]
    assert re.search(r"slots +0 leased, [1-9]\d* generated", final_summary)
    assert re.search(r"verdicts +[1-9]\d* admitted, 0 rejected", final_summary)
    assert re.search(r"tokens +[1-9]\d* generated, \d+ a second on average", final_summary)
    assert "── swarmproof worker" not in shown
    assert (
        not set(swarm.coordinator.leases)
        - set(swarm.coordinator.returned)
        - {lease.lease_id for _, lease, _ in swarm.coordinator.submissions.values()}
    ), "every slot was delivered or handed back"


async def test_a_rejection_is_in_plain_words_on_the_screen_and_in_the_end(swarm):
    swarm.coordinator.outcome, swarm.coordinator.reason = Outcome.REJECTED, Reason.WRONG_TOKEN
    async with on_terminal(swarm, "--once", columns=80) as terminal:
        shown = await terminal.ended()
    assert re.search(r"verdicts +0 admitted, 1 rejected", shown)
    told = " ".join(shown[shown.rindex("verdicts") :].split())
    assert "1 wrong_token The tokens are not those that the slot's seed draws" in told.replace("\n", " ")


async def test_a_coordinator_that_goes_away_is_waited_for_before_everybodys_eyes(swarm):
    async with on_terminal(swarm) as terminal:
        await terminal.until_shown(r"verdicts +[1-9]\d* admitted")
        await swarm.stop()
        await terminal.until_shown(r"coordinator +\S+  away")
        await terminal.until_shown(r"now +waiting for the coordinator.*since \d\d:\d\d:\d\d")
        await swarm.start()
        await terminal.until_shown(r"coordinator +http://[\d.:]+\n")


async def test_a_run_that_nobody_answers_for_is_looked_for_before_everybodys_eyes(swarm):
    await swarm.stop()
    async with on_terminal(swarm) as terminal:
        await terminal.until_shown(r"now +looking for the run  since")
        terminal.press("\x03")
        assert "ended        after" in await terminal.ended()
        assert terminal.process.returncode == 0


@pytest.mark.parametrize("ending", ["twice", "window closed"])
async def test_ctrl_c_twice_ends_at_once_and_a_closed_window_hands_slots_back(swarm, ending):
    """The slot takes for ever; the grace is longer than anybody waits."""
    endless = "from node.engines.torch import TorchEngine\nimport asyncio\nasync def generate(self, requests, **_):\n"
    endless += "    await asyncio.sleep(1000)\nTorchEngine.generate = generate\n"
    endless += "from node.cli import main\nmain(prog_name='swarmproof')"
    command = ["worker", "--coordinator", swarm.url, "--run-id", swarm.run_id, "--state", str(swarm.state)]
    grace = ("--grace", "1000") if ending == "twice" else ("--grace", "0.5")
    terminal = Terminal("env", "--default-signal=INT,HUP", sys.executable, "-c", endless, *command, *grace)
    try:
        await terminal.until_shown(r"now +generating 1 slot")
        if ending == "twice":
            terminal.press("\x03")
            await terminal.until_shown("a second signal exits at once")
            terminal.press("\x03")
            assert await asyncio.to_thread(terminal.process.wait, 20) == 130
        else:
            terminal.hang_up()
            await swarm.until(lambda: swarm.coordinator.returned)
            assert await asyncio.to_thread(terminal.process.wait, 20) == 0
    finally:
        terminal.kill()


@pytest.mark.parametrize(
    ("environment", "forbidden"),
    [
        ({"NO_COLOR": "1"}, rb"\x1b\[[0-9;]*3[0-9]"),
        ({"TERM": "dumb"}, rb"\x1b(?!\[0m$)"),
        ({}, rb"\x1b\[\?|\x1b\[[0-9]*J"),
    ],
    ids=["no colour", "dumb terminal", "modes that a kill would leave behind"],
)
async def test_a_terminal_gets_only_what_it_can_take(swarm, environment, forbidden):
    async with on_terminal(swarm, "--once", environment=environment) as terminal:
        shown = await terminal.ended()
    assert "1 admitted" in shown
    assert re.search(forbidden, terminal.written) is None


# -- a worker in a log, and for a program


def start(swarm, *options, **streams):
    command = [*SWARMPROOF, "worker", "--coordinator", swarm.url, "--run-id", swarm.run_id, "--state", str(swarm.state)]
    return subprocess.Popen([*command, *options], cwd=ROOT, text=True, **streams)


async def test_a_log_has_lines_that_drive_no_terminal_and_ends_with_what_came_of_it(swarm):
    swarm.coordinator.outcome, swarm.coordinator.reason = Outcome.REJECTED, Reason.WRONG_TOKEN
    process = start(swarm, "--once", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert said == ""
    assert "\x1b" not in errors
    lines = errors.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d (INFO|WARNING) ", line) for line in lines), errors
    assert any("in run 'test', by http://" in line for line in lines)
    assert re.search(
        r"ended after \d+ s: 1 slot generated, 0 admitted, 1 rejected \(1 wrong_token\); 0 tokens credited; "
        r"\d+ tokens/s now, \d+ on average$",
        lines[-1],
    ), lines[-1]


async def test_a_log_has_a_summary_every_minute(swarm, monkeypatch, caplog):
    monkeypatch.setattr(module, "SUMMARY_SECONDS", 1.5)
    stop = asyncio.Event()
    settings = WorkerSettings(
        join=JoinSettings(run_id=swarm.run_id, coordinators=(swarm.url,)),
        state=swarm.state,
        backoff=Backoff(max_seconds=0.1),
    )
    identity = WorkerIdentity(run_id=swarm.run_id, node=swarm.node, coordinators=(swarm.url,))
    with caplog.at_level(logging.INFO):
        async with observe_worker(identity, as_json=False, stop=stop) as reporter:
            assert isinstance(reporter, LogReporter)
            work = asyncio.create_task(
                run_worker(settings, key=swarm.node_key, make_engine=TorchEngine, stop=stop, observer=reporter)
            )
            summary = r"; \d+ slots? generated, \d+ admitted, 0 rejected.*; [\d,]+ tokens credited; [\d,]+ tokens/s now"
            await swarm.until(lambda: len([line for line in caplog.messages if re.search(summary, line)]) >= 2)
            stop.set()
            await work


def events(text):
    return [json.loads(line) for line in text.splitlines()]


async def test_a_program_reads_every_event_with_the_keys_that_are_documented(swarm):
    swarm.coordinator.outcome, swarm.coordinator.reason = Outcome.REJECTED, Reason.WRONG_TOKEN
    process = start(swarm, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await swarm.until(lambda: len(swarm.coordinator.submissions) >= 2)
    swarm.coordinator.outcome, swarm.coordinator.reason = Outcome.ADMITTED, None
    count = len(swarm.coordinator.submissions)
    await swarm.until(lambda: len(swarm.coordinator.submissions) > count + 2)
    process.send_signal(signal.SIGINT)
    said, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
    assert re.match(r"\d\d:\d\d:\d\d ", errors), "logs are on stderr"
    happened = events(said)
    for event in happened:
        kind = EventKind(event["event"])
        assert list(event) == ["event", "time", "run", "node", *KEYS[kind]], kind
        assert event["run"] == swarm.run_id
        assert {event["node"]} == swarm.coordinator.nodes
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"])
    kinds = [event["event"] for event in happened]
    assert kinds[:2] == ["started", "joined"]
    assert kinds[-1] == "ended"
    assert "stopping" in kinds
    for slot in {event["slot"] for event in happened if event["event"] == "slot_submitted"}:
        of_it = [event for event in happened if event.get("slot") == slot]
        way = [event["event"] for event in of_it]
        assert way[:3] == ["slot_leased", "slot_generated", "slot_submitted"]
        submissions = {event["submission"] for event in of_it if "submission" in event}
        assert len(submissions) == 1
    rejected = next(event for event in happened if event["event"] == "slot_rejected")
    assert rejected["reason"] == "wrong_token"
    assert rejected["meaning"].startswith("The tokens are not those")
    assert happened[-1]["reasons"] == {"wrong_token": happened[-1]["rejected"]}
    assert happened[-1]["admitted"] == kinds.count("slot_admitted") > 0


async def test_a_program_that_ends_ends_the_worker_which_hands_its_slots_back(swarm):
    process = start(swarm, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    await asyncio.to_thread(process.stdout.readline)
    process.stdout.close()
    with process.stderr:
        errors = await asyncio.to_thread(process.stderr.read)
    assert await asyncio.to_thread(process.wait, 30) == 141
    assert "event stream closed by its reader (Broken pipe); stopping the worker" in errors
    assert "Traceback" not in errors
    assert "Error" not in errors


def test_the_document_lists_every_event_and_its_keys():
    text = (ROOT / "docs" / "operating.md").read_text()
    rows_of = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, re.MULTILINE)
    documented = {name: tuple(re.findall(r"`(\w+)`", keys)) for name, keys in rows_of}
    sums = tuple(re.findall(r"`(\w+)`", re.search(r"The sums are (.+?)\n\n", text, re.DOTALL)[1]))
    for kind, keys in KEYS.items():
        wanted = tuple(key for key in keys if kind not in (EventKind.SUMMARY, EventKind.ENDED) or key not in sums)
        assert documented.get(kind.value) == wanted, kind
    assert KEYS[EventKind.SUMMARY] == sums
    assert Path(ROOT / "docs" / "images" / "worker.png").stat().st_size < 150_000
