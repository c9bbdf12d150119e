"""The tool `python` around an environment: which text is a call, what it is answered with, and who can have it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from node.environments import (
    Conversation,
    EnvironmentFault,
    Problem,
    check_replies,
    check_rewards,
    load_environment,
    python_tool,
)
from node.environments.python_tool import DEFINITION, NO_CALL
from node.protocol.challenge import challenge_spec
from node.protocol.chat import ChatFormat
from node.protocol.chat_formats import CHAT_FORMATS, CHATML
from node.protocol.control import AskChallenge
from node.protocol.environment_spec import LengthSpec, ToolSpec
from node.protocol.run import EnvironmentSpec, parse_run_toml
from node.sandbox.root import PYTHON_VERSION
from shardcast.errors import Malformed

TOOL = ToolSpec(python=PYTHON_VERSION)


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was run, each as the cells of one sandbox; cell 'x' says '[x]'."""
    asked: list[tuple[str, ...]] = []

    def run_cells(cells: tuple[str, ...], *, wanted: int, steps: int, characters: int) -> tuple[str, ...]:
        assert (steps, characters) == (TOOL.steps, TOOL.characters)
        asked.append(cells)
        return tuple(f"[{cell}]" for cell in cells[-wanted:])

    monkeypatch.setattr(python_tool, "run_cells", run_cells)
    return asked


def loaded(name: str = "arithmetic", *, chat: ChatFormat | None = None, **fields: object) -> Conversation:
    environment = load_environment(EnvironmentSpec(name=name, tool=TOOL, **fields), chat=chat)  # type: ignore[arg-type]
    assert isinstance(environment, Conversation)
    return environment


def call(code: str) -> str:
    return (
        '<tool_call>\n{"name": "python", "arguments": '
        + msgspec.json.encode({"code": code}).decode()
        + "}\n</tool_call>"
    )


def said(environment: Conversation, turns: Sequence[str], problem: Problem | None = None) -> str | None:
    return environment.reply(problem or environment.problem(3), turns)


def test_without_a_chat_format_a_turn_without_an_end_of_thought_is_code(runs: list[tuple[str, ...]]) -> None:
    tool = loaded()
    assert tool.problem(3) == load_environment(EnvironmentSpec(name="arithmetic")).problem(3)
    assert said(tool, [" 1+1\n"]) == "[1+1]\n"
    assert said(tool, ["x=1", "x</think>", "x"]) == "[x]\n"
    assert runs == [("1+1",), ("x=1", "x")]
    assert said(tool, ["x=1", "</think>12"]) is None


def test_in_a_chat_format_calls_are_the_formats_and_each_has_a_result(runs: list[tuple[str, ...]]) -> None:
    tool = loaded(chat=CHATML)
    prompt = tool.problem(3).prompt
    assert '"name": "python"' in prompt
    assert "<tool_call>" in prompt
    first, second = "so" + call("x = 1"), call("x") + call("x + 1") + '<tool_call>{"name": "bash"}</tool_call>'
    assert said(tool, ["no call"]) is None
    reply = said(tool, [first, "what?", second])
    assert reply is not None
    assert runs == [("x = 1", "x", "x + 1")], "one sandbox for all of a turn, after the code of those before it"
    assert [part.partition("\n")[0] for part in reply.split("<tool_response>\n")[1:]] == ["[x]", "[x + 1]", NO_CALL]
    assert reply.endswith("<|im_start|>assistant\n")
    assert reply.count("<|im_start|>user") == 1


@pytest.mark.parametrize(
    "written", ["", "nonsense", "[]", '{"name": "python"}', '{"name": "python", "arguments": {"code": 1}}',
                '{"name": "python", "arguments": ["code"]}', '{"name": "Python", "arguments": {"code": "1"}}',
                "[" * 9999],
)  # fmt: skip
def test_what_is_no_call_of_the_tool_is_answered_and_not_run(written: str, runs: list[tuple[str, ...]]) -> None:
    reply = said(loaded(chat=CHATML), [f"<tool_call>{written}</tool_call>"])
    assert reply is not None
    assert NO_CALL in reply
    assert not runs


def test_what_the_code_says_cannot_end_the_turn() -> None:
    reply = said(loaded(chat=CHATML), [call("<|im_end|></tool_response>")])
    assert reply is not None
    assert (reply.count("<|im_end|>"), reply.count("</tool_response>")) == (1, 1)


@pytest.mark.parametrize("chat", [None, CHATML])
def test_the_answer_is_judged_as_without_the_tool(chat: ChatFormat | None) -> None:
    tool = loaded(chat=chat)
    problem = tool.problem(3)
    answer = (problem.data["asked"] if chat else problem).data["answer"]
    for turns in (["1+1", f"</think>{answer}"], [f"</think>{answer}"]):
        assert tool.reward_turns(problem, turns) == 1.0
    assert tool.reward_turns(problem, [f"</think>{answer}", "1"]) == 0.0
    assert tool.reward(problem, f"</think>{answer}") == 1.0


def test_it_goes_with_length_targets() -> None:
    tool = loaded(length=LengthSpec(targets=(32,), form="short"))
    problem = tool.problem(3)
    assert problem.prompt.startswith("T:32\n")
    assert said(tool, ["1"], problem) == "[1]\n"


@pytest.mark.parametrize(("name", "chat"), [("calculator", None), ("terminal", None),
                                            ("arithmetic", CHAT_FORMATS["llama3"])])  # fmt: skip
def test_it_is_refused_where_it_could_not_be_called(name: str, chat: ChatFormat | None) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        loaded(name, chat=chat)
    assert caught.value.code == "bad_arguments"


@pytest.mark.parametrize("chat", [None, CHATML])
@pytest.mark.parametrize("check", [check_replies, check_rewards])
def test_another_python_runs_nothing(check: object, chat: ChatFormat | None) -> None:
    """What code means, and how its errors are worded, changes between versions."""
    spec = EnvironmentSpec(name="arithmetic", tool=ToolSpec(python="3.99"), length=LengthSpec(targets=(9,)))
    with pytest.raises(EnvironmentFault, match=r"3\.99") as caught:
        check([load_environment(spec, chat=chat)])  # type: ignore[operator]
    assert caught.value.code == "python_version"


def test_a_run_names_it_by_one_line_and_has_turns_for_its_calls() -> None:
    run = 'name = "tool"\n[[environments]]\nname = "arithmetic"\ntool = { python = "3.11" }\n'
    spec = parse_run_toml(run + "[sampling]\nmax_turns = 2\n")
    assert spec.environments[0].tool == ToolSpec(python="3.11")
    assert challenge_spec(spec, AskChallenge(samples=1, max_tokens=1)).sampling.max_turns == 1
    for wrong in (run, run.replace("3.11", "2.7"), run.replace('"3.11"', '"3.11", steps = 500001')):
        with pytest.raises(Malformed):
            parse_run_toml(wrong)


def test_what_a_model_is_told_stands_on_the_page(document: str) -> None:
    """An implementation by the page alone has to show the same prompt."""
    told = msgspec.json.encode(DEFINITION["function"]["description"]).decode()
    assert told.strip('"') in " ".join(document.split())
    assert NO_CALL in document


@pytest.fixture
def document() -> str:
    from locations import ROOT

    return (ROOT / "docs" / "protocol.md").read_text()
