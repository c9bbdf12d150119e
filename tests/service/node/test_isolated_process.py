"""The process of an environment is somebody else's code: whatever it does, a query ends, and nobody is judged by it."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.environments.base import EnvironmentFault
from node.environments.isolated.messages import Load, ProblemAnswer, ProblemQuery, RewardAnswer, RewardQuery
from node.environments.isolated.process import GuestProcess

LOAD = Load(kind="plain", target="test", arguments={})
LOADED = (
    '{"type":"loaded","protocol":1,"problems":null,"several_turns":false,"speaks":"text","versions":{"python":"3.11"}}'
)
PROGRAM = f"""
import os, sys, time
answer = lambda text: (sys.stdout.write(text + "\\n"), sys.stdout.flush())
sys.stdin.readline(); answer('{LOADED}')
for line in sys.stdin:
    {{0}}
"""

Guest = Callable[..., GuestProcess]


@pytest.fixture
def guest(tmp_path: Path):
    """Start a process that answers a load, and then does what is given for each line."""
    started = []

    def guest(body: str, *, program: str = PROGRAM, seconds: float = 20) -> GuestProcess:
        (tmp_path / "guest.py").write_text(program.replace("{0}", body))
        command = [sys.executable, "-I", "-S", str(tmp_path / "guest.py")]
        started.append(GuestProcess("test", command, LOAD, load_seconds=seconds, answer_seconds=seconds))
        return started[-1]

    yield guest
    for process in started:
        process.close()


def fault_of(process: GuestProcess, *, completion: str = "") -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        process.ask(RewardQuery(index=0, turns=(completion,)), RewardAnswer)
    return caught.value


def rewards(number: str) -> str:
    return f'{{"type":"reward","reward":{number}}}'


NESTED = f'{{"type":"loaded","protocol":1,"problems":null,"tools":{"[" * 100_000}'
GARBAGE = {
    "no JSON": "1.0 is the reward",
    "no object": "[1.0]",
    "no such message": '{"type":"verdict","reward":1.0}',
    "the answer to another query": '{"type":"reply","text":"1.0"}',
    "a field that nobody knows": '{"type":"reward","reward":1.0,"signature":"00"}',
    "not a number": rewards("NaN"),
    "infinite": rewards("1e999"),
    "huge": rewards("1" + "0" * 5000),
    "above one": rewards("1.1"),
    "below zero": rewards("-0.1"),
    "a text": rewards('"1.0"'),
    "deeply nested": NESTED,
    "two at once": rewards("1.0") + "\\n" + rewards("1.0"),
    "no UTF-8": "\\udcff",
    "a code of its own": '{"type":"fault","code":"fraud","detail":""}',
}


def test_garbage_is_no_reward_and_the_process_is_replaced(guest: Guest) -> None:
    choice = f"""answer({GARBAGE!r}[__import__("json").loads(line)["turns"][0]])"""
    process = guest("sys.stdout.reconfigure(errors='surrogateescape'); " + choice.replace("\\\\", "\\"))
    for attack in GARBAGE:
        pid = process.start() and process.pid
        assert fault_of(process, completion=attack).code == "environment_garbled", attack
        assert process.pid is None
        assert pid is not None
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param("sys.exit(3)", "environment_died", id="exits"),
        pytest.param("os.kill(os.getpid(), 9)", "environment_died", id="is-killed"),
        pytest.param("sys.stdout.write('{'); sys.stdout.flush(); sys.exit()", "environment_died", id="half-a-line"),
        pytest.param("time.sleep(60)", "environment_slow", id="hangs"),
        pytest.param("[os.write(1, b'1') and time.sleep(0.01) for _ in range(10**6)]", "environment_slow", id="drips"),
        pytest.param("(os.fork() or time.sleep(60)) and os._exit(0)", "environment_slow", id="leaves-a-fork"),
    ],
)
def test_what_ends_or_never_answers_is_nobodys_fault(guest: Guest, body: str, code: str) -> None:
    process = guest(body, seconds=0.7)
    process.start()
    began = time.monotonic()
    assert fault_of(process).code == code
    assert time.monotonic() - began < 15


def test_a_flood_is_cut_off_at_its_limit_and_not_at_the_deadline(guest: Guest) -> None:
    process = guest("[os.write(1, b'1' * 65536) for _ in range(10**6)]")
    fault = fault_of(process)
    assert fault.code == "environment_garbled"
    assert "16777216" in str(fault)


def test_a_process_that_reads_nothing_is_slow_and_does_not_hold_the_node(guest: Guest) -> None:
    process = guest("time.sleep(60)", seconds=0.7)
    process.start()
    assert fault_of(process, completion="x" * 2**20).code == "environment_slow"


@pytest.mark.parametrize(
    ("protocol", "code"), [("2", "environment_garbled"), ('"1"', "environment_garbled"), ("1", None)]
)
def test_another_version_of_the_protocol_is_refused(guest: Guest, protocol: str, code: str | None) -> None:
    process = guest("pass", program=PROGRAM.replace('"protocol":1', f'"protocol":{protocol}'))
    if code is None:
        assert process.start().protocol == 1
        return
    with pytest.raises(EnvironmentFault) as caught:
        process.start()
    assert caught.value.code == code


@pytest.mark.parametrize(
    "schema", ['{"a":' * 60 + "1" + "}" * 60, '{"maximum":1e300}', '{"maximum":' + "9" * 400 + "}", "[]", "null"]
)
def test_a_tools_schema_that_no_chat_format_can_show_is_garbage(guest: Guest, schema: str) -> None:
    tool = f'"tools":[{{"name":"a","description":"","parameters":{schema}}}],'
    process = guest("pass", program=PROGRAM.replace('"speaks"', tool + '"speaks"'))
    with pytest.raises(EnvironmentFault) as caught:
        process.start()
    assert caught.value.code == "environment_garbled"


def test_a_restarted_process_with_other_problems_is_no_stand_in(guest: Guest) -> None:
    """Its prompts would be others than those that were drawn, and honest work would be rejected."""
    program = PROGRAM.replace(f"answer('{LOADED}')", "answer('" + LOADED.replace("null", "%d") + "' % os.getpid())")
    process = guest("sys.exit()", program=program)
    process.start()
    assert fault_of(process).code == "environment_died"
    assert fault_of(process).code == "environment_changed"


def test_it_gets_none_of_the_users_variables(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very secret")
    secret = "float('AWS_SECRET_ACCESS_KEY' in os.environ)"
    process = guest(f'answer(\'{{"type":"reward","reward":%s}}\' % {secret})')
    assert process.ask(RewardQuery(index=0, turns=("",)), RewardAnswer).reward == 0.0


def test_what_it_says_of_a_fault_moves_no_terminals_cursor(guest: Guest) -> None:
    fault = r'{"type":"fault","code":"environment_failed","detail":"\\u001b[2Jgone"}'
    process = guest(f"answer('{fault}')")
    with pytest.raises(EnvironmentFault, match=r"test: \?\[2Jgone"):
        process.ask(ProblemQuery(index=0), ProblemAnswer)


def test_an_environment_that_nobody_needs_any_more_leaves_no_process(guest: Guest, tmp_path: Path) -> None:
    guest("pass")
    process = GuestProcess("test", [sys.executable, "-I", "-S", str(tmp_path / "guest.py")], LOAD)
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, 0)
    del process
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        GuestProcess("test", [str(tmp_path / "python")], LOAD).start()
    assert caught.value.code == "environment_died"
