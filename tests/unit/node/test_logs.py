"""What collects an operator's logs reads one JSON object a line, and finds a submission by its id in all processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from node.runtime import logs
from node.runtime.logs import JsonLines, TextLines, bound, name_process

AN_ID = "ab" * 32
FIRST_KEYS = ["time", "level", "logger", "message"]


@pytest.fixture(autouse=True)
def of_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of a process are the process's; tests share one."""
    monkeypatch.setattr(logs, "_OF_PROCESS", {})


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    caught = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord("node.worker.daemon", logging.WARNING, __file__, 1, message, arguments, caught)


def logged(message: str, *arguments: object, error: BaseException | None = None) -> dict[str, object]:
    found = json.loads(JsonLines().format(record(message, *arguments, error=error)))
    assert isinstance(found, dict)
    return found


def raised(message: str, *, cause: Exception | None = None) -> BaseException:
    async def fail() -> None:
        raise ValueError(message) from cause

    (found,) = asyncio.run(gathered(fail()))
    return found


async def gathered(*tasks: Coroutine[None, None, None]) -> list[BaseException]:
    return [found for found in await asyncio.gather(*tasks, return_exceptions=True) if found is not None]


def test_a_line_is_an_object_whose_keys_do_not_change():
    found = logged("slot %d of policy %d", 3, 5)
    assert list(found) == FIRST_KEYS
    assert (found["level"], found["logger"]) == ("warning", "node.worker.daemon")
    assert found["message"] == "slot 3 of policy 5"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(found["time"])), "RFC 3339, in UTC"


def test_a_line_in_text_is_what_it_was_before_there_was_a_choice():
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING slot 3 of 5", TextLines().format(record("slot %d of %d", 3, 5)))


def test_ids_are_fields_where_they_are_bound_and_nowhere_else():
    with bound(slot=3, policy=5), bound(submission=AN_ID):
        assert {key: logged("x").get(key) for key in ("slot", "policy", "submission")} == {
            "slot": 3,
            "policy": 5,
            "submission": AN_ID,
        }
    assert list(logged("x")) == FIRST_KEYS


def test_two_slots_at_once_keep_their_own_ids():
    """As a worker has them: a task each, whose lines come in any order."""
    seen: list[tuple[int, object]] = []

    async def one(slot: int) -> None:
        with bound(slot=slot):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append((slot, logged("x")["slot"]))
                seen.append((slot, await asyncio.to_thread(lambda: logged("x")["slot"])))

    async def both() -> None:
        await asyncio.gather(one(1), one(2))

    asyncio.run(both())
    assert len(seen) == 12
    assert all(bound_to == said for bound_to, said in seen)


def test_what_a_process_is_called_is_on_the_lines_of_every_thread():
    name_process(run=AN_ID, node="cd" * 32, name="verifier-1")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: logged("x")).result()
    assert (found["run"], found["node"], found["name"]) == (AN_ID, "cd" * 32, "verifier-1")
    with bound(node="ef" * 32):
        assert logged("about another")["node"] == "ef" * 32


def test_an_exception_is_a_field():
    found = logged("it failed", error=raised("no such slot"))
    assert str(found["exception"]).startswith("Traceback")
    assert str(found["exception"]).endswith("ValueError: no such slot")


def test_of_a_long_traceback_the_end_is_kept_which_says_what_happened():
    found = logged("it failed", error=raised("the end", cause=ValueError("x" * 100_000)))
    assert str(found["exception"]).endswith("ValueError: the end")
    assert len(str(found["exception"])) <= logs.MAX_TEXT_BYTES


@pytest.mark.parametrize(
    ("said", "without"),
    [
        ("GET https://store/b/k?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=5ec2e7&X-Amz-Expires=60", "5ec2e7"),
        ("GET https://store/b/k?AWSAccessKeyId=AKIA&Signature=5ec2e7%3D&Expires=1", "5ec2e7"),
        ("X-Amz-Security-Token=5ec2e7&x=1", "5ec2e7"),
        ("postgresql+psycopg://run:5ec2e7@db/run is away", "5ec2e7"),
        ("{'Authorization': 'Bearer 5ec2e7'}", "5ec2e7"),
        ("Authorization: Swarmproof 5ec2e7==", "5ec2e7"),
        ("(b'authorization', b'x'), authorization=b'5ec2e7'", "5ec2e7"),
        (f"bad header 'Swarmproof {'5ec2e7' * 20}=='", "5ec2e7"),
    ],
)
def test_what_looks_like_a_credential_is_blotted_out(said: str, without: str):
    assert without not in json.dumps(logged("%s", said))
    assert without not in TextLines().format(record("%s", said))
    assert without not in json.dumps(logged("failed", error=ValueError(said)))
    assert "***" in str(logged("%s", said)["message"])


def test_what_is_no_credential_stays_readable():
    said = f"the coordinator http://192.0.2.1:8700/v1/run?after=5 is away; submission {AN_ID}: Signature mismatch"
    assert logged("%s", said)["message"] == said


def swarmproof(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "node.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.system
def test_a_command_that_fails_says_so_in_the_format_that_was_asked_for(tmp_path):
    missing = ("keys", "show", str(tmp_path / "key"))
    for found in (swarmproof("--log-format", "json", *missing), swarmproof(*missing, SWARMPROOF_LOG_FORMAT="json")):
        assert found.returncode == 1
        (line,) = found.stderr.splitlines()
        assert json.loads(line)["level"] == "error"
        assert "swarmproof keys new" in json.loads(line)["message"]
    assert swarmproof(*missing).stderr.startswith("Error: ")


UNCAUGHT = """
import sys, threading, warnings
from node.runtime.logs import set_up_logging
set_up_logging(log_format="json")
warnings.warn("an old way")
def fail():
    raise ValueError("in\\na thread")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
raise RuntimeError("in\\nthe end")
"""


@pytest.mark.system
def test_what_python_itself_writes_is_json_too():
    """A warning, a thread that ends, and the end of the process: else a collector drops what an operator needs most."""
    # Starting vLLM turns warnings off for every process that this one starts later.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, "-c", UNCAUGHT]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["warning", "critical", "critical"]
    assert [str(line.get("exception", "")).rpartition("\n")[2] for line in lines] == ["", "a thread", "the end"]


def test_the_level_counts_for_this_project_and_less_for_others():
    root = logging.getLogger()
    before = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in logs.PACKAGES}
    try:
        shown = {}
        for level in logs.LEVELS:
            logs.set_up_logging(level=level)
            shown[level] = (logging.getLogger("node.x").getEffectiveLevel(), logging.getLogger("x").getEffectiveLevel())
    finally:
        root.handlers[:], root.level = before[:2]
        for name, old in before[2].items():
            logging.getLogger(name).setLevel(old)
    assert shown == {
        "debug": (logging.DEBUG, logging.DEBUG),
        "info": (logging.INFO, logging.WARNING),
        "warning": (logging.WARNING, logging.WARNING),
        "error": (logging.ERROR, logging.ERROR),
    }


def test_many_threads_may_log_at_once():
    unrepeated = logs.RepeatFilter()

    def say(who: int) -> int:
        return sum(unrepeated.filter(record(f"{who} {n % 500}")) for n in range(1000))

    with ThreadPoolExecutor(8) as pool:
        passed = list(pool.map(lambda who: copy_context().run(say, who), range(8)))
    assert passed == [500] * 8
    assert threading.active_count() < 100


def test_what_was_said_is_remembered_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(logs, "MAX_REMEMBERED", 10)
    unrepeated = logs.RepeatFilter()
    for n in range(1000):
        unrepeated.filter(record(f"text of a stranger {n}"))
    assert len(unrepeated._said) <= 12
