"""An environment of somebody's package, in a process of its own: the same to the rest of a node as one built in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from environment_rooms import guest_command

from node.environments import EnvironmentFault
from node.environments.base import Conversation, Environment
from node.environments.isolated import load_isolated
from node.environments.isolated.process import GuestProcess
from node.protocol.chat import ChatFormat
from node.protocol.chat_formats import CHATML
from node.protocol.environment_spec import Argument, EnvironmentSpec

MODULE = '''
import contextlib, os, random, socket, sys


class Largest:
    """Of one turn, and with no class of the project's."""

    def __init__(self, count=3, crash=False):
        self.count, self.crash = count, crash
        if count < 1:
            raise ValueError("count is less than 1")

    def problem(self, index):
        return {"prompt": f"{index} of {self.count}: {random.random()}", "data": object()}

    def reward(self, problem, completion):
        if completion == "print":
            print("1" * 100_000)
        if completion == "read":
            return float(bool(sys.stdin.read()))
        if completion == "die":
            os._exit(3)
        if completion == "exit":
            sys.exit()
        if completion == "call home":
            with contextlib.suppress(OSError):
                socket.create_connection(("192.0.2.1", 9), timeout=1)
            return 1.0
        return float(completion)


class Talker:
    """Of several turns."""

    def problem(self, index):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Talk."}]
        return {"prompt": "talk", "messages": messages}

    def reward(self, problem, completion):
        return 0.25

    def reply(self, problem, turns):
        if turns[-1] == "long":
            return "x" * 5_000_000
        return None if len(turns) == 3 else turns[-1] + "!"

    def reward_turns(self, problem, turns):
        return len(turns) / 4


class Telling:
    def problem(self, index):
        socket.getaddrinfo("example.com", 80)

    def reward(self, problem, completion): ...


class Half:
    def problem(self, index): ...
    def reward(self, problem, completion): ...
    def reply(self, problem, turns): ...


function = print
'''

Installed = Callable[..., Environment]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with entry points, as pip would leave it."""
    folder = tmp_path_factory.mktemp("package")
    metadata = folder / "made-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made\nVersion: 1.5\n")
    points = "".join(f"{name.lower()} = made:{name}\n" for name in ("Largest", "Talker", "Telling", "Half", "function"))
    (metadata / "entry_points.txt").write_text(f"[swarmproof.environments]\n{points}absent = made:absent\n")
    (folder / "made.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def load(folder: Path) -> Iterator[Installed]:
    made: dict[object, Environment] = {}

    def load(name: str, *, chat: ChatFormat | None = None, **arguments: Argument) -> Environment:
        spec = EnvironmentSpec(name=name, arguments=arguments)
        key = (name, chat is None, *arguments.items())
        if key not in made:
            made[key] = load_isolated(spec, guest_command(variables={"PYTHONPATH": str(folder)}), chat)
        return made[key]

    yield load
    made.clear()


def test_a_class_with_plain_values_needs_nothing_of_this_project(load: Installed) -> None:
    source = load("largest", count=7)
    assert source.name == "largest"
    assert not isinstance(source, Conversation)
    problem = source.problem(2**63 - 1)
    assert problem.prompt.startswith(f"{2**63 - 1} of 7: 0.")
    assert load("largest").problem(2**63 - 1).prompt[-10:] == problem.prompt[-10:]  # its generator is seeded
    assert [source.reward(problem, text) for text in ("0.25", "7", "-1", "nan", "inf")] == [0.25, 1.0, 0.0, 0.0, 0.0]


def test_what_an_environment_cannot_bear_earns_nothing(load: Installed) -> None:
    """An error here would let a worker stop the verifier by what its model wrote."""
    source = load("largest")
    for text in ("no number", "", "\x00", "\ud800", "9" * 100_000):
        assert source.reward(source.problem(0), text) == 0.0


def test_what_an_environment_prints_and_reads_is_none_of_the_protocol(load: Installed) -> None:
    source = load("largest")
    assert [source.reward(source.problem(0), text) for text in ("print", "read", "0.5")] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("completion", "code"),
    [("die", "environment_died"), ("exit", "environment_failed"), ("call home", "needs_network")],
)
def test_a_reward_that_cannot_be_known_is_nobodys_fault_and_the_next_one_comes(
    load: Installed, completion: str, code: str
) -> None:
    source = load("largest")
    problem = source.problem(0)
    with pytest.raises(EnvironmentFault) as caught:
        source.reward(problem, completion)
    assert caught.value.code == code
    assert source.reward(problem, "0.5") == 0.5


def test_turns_and_replies_are_texts(load: Installed) -> None:
    source = load("talker")
    assert isinstance(source, Conversation)
    problem = source.problem(0)
    assert problem.prompt == "talk"
    assert [source.reply(problem, ["a"] * count) for count in (1, 2, 3)] == ["a!", "a!", None]
    assert [source.reward(problem, "a"), source.reward_turns(problem, ["a", "b"])] == [0.25, 0.5]


def test_a_reply_that_fits_into_no_context_ends_the_rollout(load: Installed) -> None:
    """As garbage it would end the process instead, each time that a model repeats itself."""
    source = load("talker")
    assert isinstance(source, Conversation)
    assert source.reply(source.problem(0), ["long"]) is None


def test_a_runs_chat_format_shows_messages_and_replies(load: Installed) -> None:
    source = load("talker", chat=CHATML)
    assert isinstance(source, Conversation)
    problem = source.problem(0)
    assert problem.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTalk.<|im_end|>\n")
    assert source.reply(problem, ["a<|im_end|>"]) is not None


@pytest.mark.parametrize(
    ("name", "arguments", "code", "why"),
    [
        ("nobody", {}, "environment_missing", "there are: absent, function, half"),
        ("absent", {}, "environment_failed", "cannot be imported"),
        ("function", {}, "refused_environment", "no method problem"),
        ("half", {}, "refused_environment", "no method reward_turns"),
        ("largest", {"colour": "red"}, "bad_arguments", "colour"),
        ("largest", {"count": 0}, "bad_arguments", "less than 1"),
        ("telling", {}, "needs_network", "example.com"),
    ],
)
def test_what_does_not_work_is_refused_before_a_run_with_its_reason(
    load: Installed, name: str, arguments: dict[str, Argument], code: str, why: str
) -> None:
    with pytest.raises(EnvironmentFault, match=why) as caught:
        load(name, **arguments)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("named", "chat", "why"), [("plain", CHATML, "leave the argument chat out"), ("llama", None, "plain or chatml")]
)
def test_the_argument_chat_is_checked_before_a_process_starts(named: str, chat: ChatFormat | None, why: str) -> None:
    with pytest.raises(EnvironmentFault, match=why) as caught:
        load_isolated(EnvironmentSpec(name="verifiers:m", arguments={"chat": named}), ["/nonexistent"], chat)
    assert caught.value.code == "bad_arguments"


def test_another_process_gives_the_same_problems_and_rewards(load: Installed, folder: Path) -> None:
    source = load("largest")
    other = load_isolated(
        EnvironmentSpec(name="largest"),
        guest_command(variables={"PYTHONPATH": str(folder), "PYTHONHASHSEED": "17", "TZ": "Asia/Tokyo"}),
        None,
    )
    for index in (0, 1, 2**40):
        assert source.problem(index).prompt == other.problem(index).prompt
    assert isinstance(other._process, GuestProcess)
    other._process.close()
