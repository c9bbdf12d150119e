"""Tasksets of verifiers.v1: their `Env.run` is played with the given turns, in an interpreter of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from environment_rooms import Room, guest_command, room

from node.environments import EnvironmentFault
from node.environments.base import Conversation
from node.environments.isolated import load_isolated
from node.protocol.environment_spec import EnvironmentSpec, ProblemsSpec

COMMON = """
import time
import verifiers.v1 as vf


class Plain(vf.Task[vf.TaskData]):
    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        return 1.0


def taskset(task, data=None):
    class Made(vf.Taskset[task, vf.TasksetConfig]):
        def load(self):
            return [task(data or vf.TaskData(prompt="Go on."))]

    Made.__module__ = __name__
    return Made
"""

REFUSED = {
    "two_seats": (
        "2 seats",
        """
        class Seats(vf.EnvConfig):
            first: vf.AgentConfig = vf.AgentConfig()
            second: vf.AgentConfig = vf.AgentConfig()

        class Both(vf.Env[Seats]):
            async def run(self, task, agents):
                await agents.first.run(task)

        Set = taskset(Plain)
        __all__ = ["Set", "Both"]
        """,
    ),
    "twice": (
        "more than once",
        """
        class Again(vf.SingleAgentEnv):
            async def run(self, task, agents):
                await agents.agent.run(task)
                await agents.agent.run(task)

        Set = taskset(Plain)
        __all__ = ["Set", "Again"]
        """,
    ),
    "other_program": (
        "runs the program 'codex'",
        """
        class Seat(vf.EnvConfig):
            agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "codex"})

        class Coding(vf.Env[Seat]):
            async def run(self, task, agents):
                await agents.agent.run(task)

        Set = taskset(Plain)
        __all__ = ["Set", "Coding"]
        """,
    ),
    "runtime": (
        r"uses runtime\.run,",
        """
        class Running(vf.Task[vf.TaskData]):
            @vf.reward
            async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
                return float((await runtime.run(["true"], {})).exit_code == 0)

        Set = taskset(Running)
        __all__ = ["Set"]
        """,
    ),
    "setup_runtime": (
        r"uses runtime\.write,",
        """
        class Preparing(Plain):
            async def setup(self, runtime: vf.Runtime) -> None:
                try:
                    await runtime.write("answer", b"1")
                except Exception:
                    pass

        Set = taskset(Preparing)
        __all__ = ["Set"]
        """,
    ),
    "timed": (
        "how long something took",
        """
        class Quick(vf.Task[vf.TaskData]):
            @vf.reward
            async def quick(self, trace: vf.Trace) -> float:
                return float(trace.timing.agent.duration < 1)

        Set = taskset(Quick)
        __all__ = ["Set"]
        """,
    ),
    "tokens": (
        "tokens or times",
        """
        class Short(vf.Task[vf.TaskData]):
            @vf.reward
            async def short(self, trace: vf.Trace) -> float:
                return 1 / (1 + trace.num_output_tokens)

        Set = taskset(Short)
        __all__ = ["Set"]
        """,
    ),
    "script_requires": (
        "requires math-verify-of-nobody: install",
        """
        SCRIPT = '# /// script\\n# dependencies = ["math-verify-of-nobody>=1"]\\n# ///\\nprint(1.0)'

        class Verified(vf.Task[vf.TaskData]):
            @vf.reward
            async def verified(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
                return float((await runtime.run_uv_script(SCRIPT)).stdout)

        Set = taskset(Verified)
        __all__ = ["Set"]
        """,
    ),
    "container": (
        "needs a container",
        """
        class Boxed(Plain):
            NEEDS_CONTAINER = True

        Set = taskset(Boxed)
        __all__ = ["Set"]
        """,
    ),
    "remote_tools": (
        "'wiki' are on another machine",
        """
        class Wiki(vf.Toolset[vf.ToolsetConfig]):
            TOOL_PREFIX = "wiki"

        class Reading(Plain):
            @classmethod
            def toolsets(cls, config):
                return [Wiki(vf.ToolsetConfig(url="https://example.com/mcp"))]

        Set = taskset(Reading)
        __all__ = ["Set"]
        """,
    ),
    "intercepting": (
        "@vf.intercept",
        """
        class Changing(Plain):
            @vf.intercept
            async def change(self, request: vf.Request) -> None:
                return None

        Set = taskset(Changing)
        __all__ = ["Set"]
        """,
    ),
    "images": (
        "images or sounds",
        """
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
        Set = taskset(Plain, vf.TaskData(prompt=[vf.UserMessage(content=parts)]))
        __all__ = ["Set"]
        """,
    ),
    "empty": (
        "0 tasks",
        """
        class Set(vf.Taskset[Plain, vf.TasksetConfig]):
            def load(self):
                return []

        __all__ = ["Set"]
        """,
    ),
    "of_nothing": ("exports no Taskset", "__all__ = []"),
}


SCRIPTED = """
SCRIPT = b'''
import sys
# /// script
# dependencies = ["pydantic>=2"]
# ///
if __name__ == "__main__":
    if sys.argv[1] == "exit":
        sys.exit(3)
    print("so", int(sys.argv[1]))
'''

class Verified(vf.Task[vf.TaskData]):
    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.prepare_uv_script(SCRIPT)

    @vf.reward
    async def verified(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        result = await runtime.run_uv_script(SCRIPT, args=[trace.last_reply])
        if result.exit_code:
            return {3: 0.25}.get(result.exit_code, 0.0)
        return 1.0 if result.stdout == "so 4\\n" else 0.5

Set = taskset(Verified)
__all__ = ["Set"]
"""


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("modules")
    for name, (_, source) in REFUSED.items():
        lines = [line.removeprefix(" " * 8) for line in source.splitlines()]
        (folder / f"refused_{name}.py").write_text(COMMON + "\n".join(lines))
    (folder / "scripted.py").write_text(COMMON + SCRIPTED)
    command = guest_command(room("v1-examples").python, variables={"PYTHONPATH": str(folder)})
    shared = Room(command, first="verifiers:v1_letters")
    yield shared
    shared.process.close()


def call(tool: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def test_a_taskset_of_one_turn(v1: Room) -> None:
    source = v1.load("verifiers:owner/v1-letters@2.0.0", count=3)
    assert not isinstance(source, Conversation)
    assert [source.problem(index).prompt for index in (0, 2, 3)] == [
        f"User: Letters, please: {number}\n\nAssistant:" for number in (0, 2, 0)
    ]
    assert source.reward(source.problem(0), "abC") == pytest.approx(2 / 3)


def test_the_environment_is_the_user_of_a_scripted_conversation(v1: Room) -> None:
    source = v1.load("verifiers:v1_sorting", bound=5)
    assert isinstance(source, Conversation)
    problem = source.problem(1)
    assert problem.prompt == "System: Answer with names alone.\n\nUser: Sort: Tom Ann\n\nAssistant:"
    turns = ["Ann Tom", "Ann Ian Kim Tom", "Ada Ann Ian Kim Lea Tom"]
    said = [source.reply(problem, turns[:count]) for count in (1, 2, 3)]
    assert said == [
        "\n\nUser: Sort these too: Kim Ian\n\nAssistant:",
        "\n\nUser: Sort these too: Ada Lea\n\nAssistant:",
        None,
    ]
    assert [source.reward_turns(problem, turns[:count]) for count in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_a_taskset_without_end_needs_a_bound(v1: Room) -> None:
    with pytest.raises(EnvironmentFault, match=r"problems = \{ count = N \}") as caught:
        v1.load("verifiers:v1_sorting")
    assert caught.value.code == "needs_bound"


def test_a_tasks_tools_are_called_with_its_data(v1: Room) -> None:
    source = v1.load("verifiers:v1_lookup")
    assert isinstance(source, Conversation)
    problem = source.problem(1)
    assert "Look it up." in problem.prompt
    assert '"name": "facts_lookup"' in problem.prompt
    look = call("facts_lookup", name="alan")
    told = "\n\nUser: <tool_response>\n{}\n</tool_response>\n\nAssistant:"
    assert source.reply(problem, [look]) == told.format("described the machine")
    assert source.reply(source.problem(0), [look]) == told.format("Error executing tool lookup: 'alan'")
    assert source.reply(problem, [call("exec")]) == told.format("error: unknown tool 'exec'")
    for wrong in (call("facts_lookup", name="alan", times="x"), '<tool_call>{"name": "facts_lookup"}</tool_call>'):
        assert "validation error" in (source.reply(problem, [wrong]) or "")
    assert source.reply(problem, [look, "He described the machine."]) is None
    assert source.reward_turns(problem, [look, "He described the machine."]) == 1.0
    assert source.reward(problem, "He described the machine.") == 0.0


def test_a_shared_tool_writes_the_rollouts_state_and_no_other_ones(v1: Room) -> None:
    source = v1.load("verifiers:v1_notes")
    assert isinstance(source, Conversation)
    problem = source.problem(0)
    for _ in range(2):
        assert "\n2 notes\n" in (source.reply(problem, [call("note", text="a"), call("note", text="b")]) or "")
    assert source.reward_turns(problem, [call("note", text="a") + call("note", text="b"), "done"]) == 1.0
    three = "".join(call("note", text=letter) for letter in "abc")
    assert source.reply(problem, [three]) is None  # a stop that reads the state
    assert source.reward(problem, call("note", text="a")) == 0.0


def test_a_games_end_is_its_reward_and_a_limit_of_turns_ends_it(v1: Room) -> None:
    source = v1.load("verifiers:v1_guessing", **{"env.highest": 9})
    assert isinstance(source, Conversation)
    problem = source.problem(1)
    assert problem.prompt == "User: 1?\n\nAssistant: yes\n\nUser: Guess!\n\nAssistant:"
    assert source.reply(problem, ["9"]) == "\n\nUser: lower (1)\n\nAssistant:"
    assert source.reply(problem, ["1", "2"]) == "\n\nUser: higher (2)\n\nAssistant:"
    assert source.reply(problem, ["9", "3"]) is None
    assert (source.reward(problem, "3"), source.reward_turns(problem, ["9", "3"])) == (1.0, 0.75)
    assert source.reply(problem, ["1", "1", "1", "1"]) is None  # its seat's max_turns
    assert source.reward_turns(problem, ["1", "1"]) == 0.0  # the run's


def test_what_the_environment_cannot_bear_ends_the_rollout_and_earns_nothing(v1: Room) -> None:
    """An exception here would let a worker stop the verifier by what its model wrote."""
    source = v1.load("verifiers:v1_guessing")
    assert isinstance(source, Conversation)
    pid = v1.process.pid
    for text in ("no number", "", "\x00", "\ud800", "9" * 100_000):
        assert source.reply(source.problem(0), [text]) is None
        assert source.reward(source.problem(0), text) == 0.0
    assert v1.process.pid == pid


def test_a_script_that_verifies_an_answer_runs_beside_it(v1: Room) -> None:
    source = v1.load("verifiers:scripted")
    problem = source.problem(0)
    assert [source.reward(problem, text) for text in ("4", "5", "x", "exit", "")] == [1.0, 0.5, 0.0, 0.25, 0.0]


def test_settings_of_tasks_have_dotted_names_as_in_prime_rl(v1: Room) -> None:
    strict = v1.load("verifiers:v1_counting", bound=100)
    assert [strict.reward(strict.problem(4), told) for told in ("8", "9", "x")] == [1.0, 0.0, 0.0]
    wide = v1.load("verifiers:v1_counting", bound=100, **{"task.tolerance": 1})
    assert [wide.reward(wide.problem(4), told) for told in ("8", "9", "x")] == [1.0, 1.0, 0.0]
    for wrong in ("task.colour", "env.id", "id", "task.tolerance.x"):
        with pytest.raises(EnvironmentFault) as caught:
            v1.load("verifiers:v1_counting", bound=100, **{wrong: 1})
        assert caught.value.code == "bad_arguments", wrong


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_nobody_could_repeat_is_refused_by_name_before_a_run(v1: Room, name: str) -> None:
    with pytest.raises(EnvironmentFault, match=REFUSED[name][0]) as caught:
        v1.load(f"verifiers:refused_{name}")
    assert caught.value.code == "refused_environment"


def test_another_process_and_salt_derive_the_same_problems_and_replies(v1: Room) -> None:
    source = v1.load("verifiers:v1_sorting", bound=4)
    spec = EnvironmentSpec(name="verifiers:v1_sorting", problems=ProblemsSpec(count=4))
    other = load_isolated(spec, guest_command(room("v1-examples").python, variables={"PYTHONHASHSEED": "17"}), None)
    assert isinstance(source, Conversation)
    assert isinstance(other, Conversation)
    for index in range(4):
        assert source.problem(index) == other.problem(index)
        assert source.reply(source.problem(index), ["6"]) == other.reply(other.problem(index), ["6"])
