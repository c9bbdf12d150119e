"""The environment with a tool: everybody gets the same reply, whatever a model writes to the tool."""

from __future__ import annotations

import pytest

from node.environments import Conversation, EnvironmentFault, load_environment
from node.environments.arithmetic import Arithmetic
from node.environments.calculator import Calculator, calculate
from node.protocol.run import EnvironmentSpec

SOURCE = Calculator()
PROMPTS = ["Q:49*10=?\nA:", "Q:53*89=?\nA:", "Q:84*58=?\nA:", "Q:50*18=?\nA:"]


def test_it_is_a_conversation_and_a_run_can_name_it() -> None:
    named = load_environment(EnvironmentSpec(name="calculator", arguments={"digits": 3}))
    assert named == Calculator(digits=3)
    assert isinstance(named, Conversation)
    assert not isinstance(Arithmetic(), Conversation)
    with pytest.raises(EnvironmentFault):
        load_environment(EnvironmentSpec(name="calculator", arguments={"digits": 10}))


def test_golden_prompts_do_not_change_between_releases() -> None:
    """Two releases that disagree here reject each other's honest rollouts as wrong_prompt."""
    assert [SOURCE.problem(index).prompt for index in (0, 1, 2**32, 2**63 - 1)] == PROMPTS


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("007", 7),
        ("23*47", 1081),
        ("1+2*3", 7),
        ("2*3-4*5", -14),
        ("10-3-2", 5),
        ("1-2*3*4+5", -18),
        ("999999999*" * 7 + "999999999", 999999999**8),
    ],
)
def test_calculations(text: str, value: int) -> None:
    assert calculate(text) == value


HOSTILE = [
    "",
    " ",
    "1+",
    "+1",
    "-1",
    "1++2",
    "1 + 2",
    "1/0",
    "2**9",
    "(1)",
    "0x10",
    "1e9",
    "1_0",
    "٣*٤",
    "²",
    "1\n",
    "1\x00",
    "__import__('os')",
    "1234567890",
    "1+" * 8 + "1",
    "9" * 10**6,
    "1+" * 10**6 + "1",
    "(" * 10**6,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text)[:20])
def test_whatever_else_a_model_writes_to_the_tool_is_answered_and_not_run(text: str) -> None:
    assert calculate(text) is None


def test_a_reply_is_short_whatever_was_asked() -> None:
    """What everybody re-derives for each turn of each rollout must cost nothing."""
    problem = SOURCE.problem(3)
    for text in (*HOSTILE, "999999999*" * 7 + "999999999"):
        reply = SOURCE.reply(problem, ["x"] * 63 + [text])
        assert reply is not None
        assert len(reply) <= 80


def test_a_turn_with_an_answer_is_the_last() -> None:
    problem = SOURCE.problem(3)
    left, right = problem.data["factors"]
    assert problem.prompt == f"Q:{left}*{right}=?\nA:"
    assert SOURCE.reply(problem, [f"{left}*{right}"]) == f"={left * right}\n"
    assert SOURCE.reply(problem, [f" {left}*{right}\n"]) == f"={left * right}\n"
    assert SOURCE.reply(problem, ["what now"]) == "=?\n"
    for answer in (f"</think>{left * right}", "</think>", f"{left}*{right}</think>"):
        assert SOURCE.reply(problem, ["1*1", answer]) is None


def test_the_reward_is_the_last_turns() -> None:
    problem = SOURCE.problem(3)
    answer = problem.data["answer"]
    assert SOURCE.reward_turns(problem, ["1*1", f"</think>{answer}"]) == 1.0
    assert SOURCE.reward(problem, f"<think>hm</think> {answer}") == 1.0
    for turns in ([f"</think>{answer}", "1"], [answer], ["", ""], [f"</think>{answer}0"]):
        assert SOURCE.reward_turns(problem, turns) == 0.0
