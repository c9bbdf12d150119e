"""Length targets: everybody asks for the same number of tokens, and missing it costs what the run says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from blake3 import blake3
from locations import VECTORS_FOLDER
from sandboxing import needs_sandbox

from node.environments import EnvironmentFault, check_rewards, load_environment
from node.environments.base import Conversation, Problem
from node.environments.grading import grade
from node.environments.lengths import with_lengths
from node.protocol.run import EnvironmentSpec, LengthSpec
from shardcast.wire import decode

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "slots.json").read_text())["lengths"]


def environment(name: str = "arithmetic", *, targets: Sequence[int] = (16,), penalty: float = 0.01, form="sentence"):
    length = LengthSpec(targets=tuple(targets), penalty=penalty, form=form)
    return load_environment(EnvironmentSpec(name=name, length=length))


def right_answer(problem: Problem) -> str:
    return f"<think></think>{problem.data['asked'].data['answer']}"


def test_the_prompt_asks_for_the_target_before_the_question():
    plain = load_environment(EnvironmentSpec(name="arithmetic")).problem(0).prompt
    assert plain == "Q:53+14=?\nA:"
    assert environment().problem(0).prompt == "Think for about 16 tokens before you answer.\n" + plain
    assert environment(form="short").problem(0).prompt == "T:16\n" + plain


def test_the_request_stands_in_what_the_user_says_and_not_before_a_chat_begins():
    """In front of a chat's first mark it would belong to no message, which no model has been trained to read."""

    @dataclass(frozen=True)
    class Chat:
        name: str = "chat"

        def problem(self, index: int) -> Problem:
            return Problem("<user>2+2?<assistant>", opening=len("<user>"))

        def reward(self, problem: Problem, completion: str) -> float:
            return 1.0

    length = LengthSpec(targets=(4,), form="short")
    problem = with_lengths(Chat(), EnvironmentSpec(name="chat", length=length)).problem(3)
    assert problem.prompt == "<user>T:4\n2+2?<assistant>"


@pytest.mark.parametrize(
    ("tokens", "reward"),
    [(16, 1.0), (15, 0.99), (17, 0.99), (1, 0.85), (48, 0.68), (115, 0.01), (116, 0.0), (999, 0.0)],
)
def test_each_token_off_the_target_costs_the_penalty_and_no_reward_is_negative(tokens, reward):
    source = environment(penalty=0.01)
    problem = source.problem(5)
    assert grade(source, problem, [right_answer(problem)], tokens=tokens) == pytest.approx(reward, abs=1e-12)
    assert grade(source, problem, ["</think>wrong"], tokens=tokens) == 0.0


def test_an_answer_of_the_right_length_is_worth_nothing_if_it_is_wrong():
    """Otherwise the way to a reward is to fill the target with anything."""
    source = environment()
    assert grade(source, source.problem(0), [""], tokens=16) == 0.0


def test_targets_are_drawn_evenly_and_by_nothing_but_the_index():
    source = environment(targets=(8, 16, 24))
    drawn = [source.problem(index).data["target_tokens"] for index in range(3000)]
    assert drawn == [environment("reverse", targets=(8, 16, 24)).problem(i).data["target_tokens"] for i in range(3000)]
    counts = Counter(drawn)
    assert set(counts) == {8, 16, 24}
    assert min(counts.values()) > 900  # of 1000 expected; six standard deviations are 155


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: f"{case['problem'][:4]}-{case['tokens']}")
def test_targets_and_rewards_are_the_published(case):
    """An implementation that draws another target sends another prompt, and all its work is refused."""
    index = int(case["problem"])
    parts = (b"length", index.to_bytes(8, "big"), (0).to_bytes(4, "big"))
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    drawn = blake3(framed, derive_key_context="swarmproof/1 environment").digest()
    assert (4, 10)[int.from_bytes(drawn[:8], "big") % 2] == case["target"]

    source = load_environment(decode(EnvironmentSpec, VECTORS["environment"].encode(), max_bytes=1000))
    problem = source.problem(index)
    assert (problem.prompt, problem.data["target_tokens"]) == (case["prompt"], case["target"])
    assert grade(source, problem, [case["completion"]], tokens=case["tokens"]) == case["reward"]
    earned = 1.0 if "</think>" in case["completion"] else 0.0
    assert case["reward"] == max(0.0, earned - 0.01 * abs(case["tokens"] - case["target"]))


def test_a_conversation_is_held_to_one_target_over_all_its_turns():
    @dataclass(frozen=True)
    class Talk:
        name: str = "talk"

        def problem(self, index: int) -> Problem:
            return Problem("say yes twice")

        def reward(self, problem: Problem, completion: str) -> float:
            return 0.0

        def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
            return f"{problem.prompt}, again" if len(turns) < 2 else None

        def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
            return sum(turn == "yes" for turn in turns) / 2

    spec = EnvironmentSpec(name="talk", length=LengthSpec(targets=(10,), penalty=0.1, form="short"))
    source = with_lengths(Talk(), spec)
    assert isinstance(source, Conversation)
    assert not isinstance(environment(), Conversation)
    problem = source.problem(0)
    assert source.reply(problem, ["yes"]) == "say yes twice, again"
    assert source.reply(problem, ["yes", "yes"]) is None
    assert grade(source, problem, ["yes", "yes"], tokens=7) == pytest.approx(0.7)
    assert grade(source, problem, ["yes", "no"], tokens=13) == pytest.approx(0.2)


def test_a_reward_without_a_number_of_tokens_is_refused_rather_than_unpunished():
    source = environment()
    with pytest.raises(EnvironmentFault) as caught:
        source.reward(source.problem(0), "</think>144")
    assert caught.value.code == "no_length"


@needs_sandbox
def test_length_targets_do_not_hide_that_answers_run_in_a_sandbox():
    """A verifier with another Python would start, and judge by it."""
    length = LengthSpec(targets=(16,))
    arguments = {"python": "3.99"}
    source = load_environment(EnvironmentSpec(name="code", arguments=arguments, length=length))
    with pytest.raises(EnvironmentFault) as caught:
        check_rewards([source])
    assert caught.value.code == "python_version"
