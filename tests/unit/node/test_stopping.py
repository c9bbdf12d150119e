"""Stop strings and thinking budgets from engine to verdict: honest work is admitted, and stopping elsewhere is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrow_run import RUN_ID, LeasedSlot, loaded
from talking import SPEC, talk, talkative_file
from verifying import generated

from coordinator.calibration.cheats import Prover
from node.chat.turns import is_thinking
from node.engines.base import requests_for
from node.engines.torch import TorchEngine
from node.environments.base import Problem
from node.policy.file import Policy, render_completion, render_reply
from node.policy.models.tiny_llama import EOS
from node.protocol.admission import Outcome
from node.protocol.chat_formats import CHAT_FORMATS
from node.protocol.reasons import Reason
from node.protocol.run import ThinkingSpec
from node.protocol.submission import Rollout
from node.protocol.turns import RUN_RULES, TurnRules, replay
from node.verification.plan import Rules

VERSION = 5
"""The leased policy's."""
END = "</think>"


@dataclass(frozen=True)
class Listener:
    """Rewards a last turn that holds `wanted`; says nothing, or `says` after each turn."""

    wanted: str = ""
    says: Callable[[Sequence[str]], str | None] = lambda _: None
    name: str = "arithmetic"

    def problem(self, index: int) -> Problem:
        return Problem(f"Q:{index % 100}\nA:")

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return self.says(turns)

    def reward(self, problem: Problem, completion: str) -> float:
        return float(self.wanted in completion)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.reward(problem, turns[-1])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talkative_file(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(path: Path) -> Policy:
    return loaded(path)


def slot_of(policy: Policy, listener: Listener, *, sampling: dict[str, Any] | None = None, **own: Any) -> LeasedSlot:
    """A slot of an environment with rules of its own."""
    environment = msgspec.structs.replace(SPEC.environments[0], **own)
    rules = msgspec.structs.replace(SPEC.sampling, **(sampling or {}))
    spec = msgspec.structs.replace(SPEC, environments=(environment,), sampling=rules)
    return LeasedSlot(Rules(RUN_ID, spec, [listener]), {VERSION: policy}, VERSION, 1)


def by_the_engine(path: Path, slot: LeasedSlot) -> list[Rollout]:
    return generated(TorchEngine(slot.rules.spec), path, requests_for(slot.expected), version=VERSION)


def by_plain_transformers(slot: LeasedSlot, rules: TurnRules | None = None) -> list[Rollout]:
    """What a worker draws that has plain transformers, or that has other `rules` than the slot's."""
    expected, spec = slot.expected, slot.rules.spec
    own = expected.rules if rules is None else rules
    return [
        talk(slot.policy, expected.prompt_ids, seed, expected.ask, spec=spec, version=VERSION, rules=own)
        for seed in expected.seeds
    ]


def text_of(slot: LeasedSlot, rollout: Rollout) -> str:
    return render_completion(slot.policy, rollout.completion_ids)


def stop_in(policy: Policy, *, sampling: dict[str, Any] | None = None) -> str:
    """Two characters that a completion has in its middle."""
    slot = slot_of(policy, Listener(), sampling=sampling)
    return max((text_of(slot, one) for one in by_plain_transformers(slot)), key=len)[4:6]


def test_a_stopped_turn_has_its_stop_string_at_the_end_and_is_admitted(path: Path, policy: Policy) -> None:
    stop = stop_in(policy)
    slot = slot_of(policy, Listener(wanted=stop), stop=(stop, "never said"))
    engine, reference = by_the_engine(path, slot), by_plain_transformers(slot)
    assert [one.completion_ids for one in engine] == [one.completion_ids for one in reference]
    stopped = [one for one in engine if stop in text_of(slot, one)]
    assert stopped
    assert not any(stop in render_completion(policy, one.completion_ids[:-1]) for one in stopped)
    verdict = slot.verdict(engine)
    assert verdict.outcome is Outcome.ADMITTED, verdict.detail
    assert verdict.rewards == tuple(float(one in stopped) for one in engine)


def test_a_worker_that_ignores_or_invents_a_stop_string_is_rejected(path: Path, policy: Policy) -> None:
    """By the rules alone: all that it draws is truly the policy's."""
    stop = stop_in(policy)
    slot, free = slot_of(policy, Listener(), stop=(stop,)), slot_of(policy, Listener())
    assert slot.reason(by_plain_transformers(slot, RUN_RULES)) is Reason.TOKENS_AFTER_EOS
    assert free.reason(by_plain_transformers(free, slot.expected.rules)) is Reason.UNFINISHED


def test_a_stop_string_that_hands_over_to_a_tool_goes_on_behind_an_end_mark(path: Path, policy: Policy) -> None:
    """A chat's marks stand behind an end mark; the policy drew none, and has to see one as in any other turn."""
    sampling = {"chat": CHAT_FORMATS["plain"], "max_prompt_tokens": 128}
    stop = stop_in(policy, sampling=sampling)

    def ask(slot: LeasedSlot) -> Sequence[int]:
        assert slot.expected.ask is not None
        return slot.expected.ask([render_reply(policy, stop)]) or ()

    plain = slot_of(policy, Listener(says=lambda _: "=12\n"), stop=(stop,))
    chat = slot_of(policy, Listener(says=lambda _: "=12\n"), sampling=sampling, stop=(stop,))
    assert list(ask(plain)) == render_reply(policy, "=12\n")
    assert list(ask(chat)) == [EOS, *render_reply(policy, "=12\n")]
    for slot in (plain, chat):
        rollouts = by_the_engine(path, slot)
        assert any(text_of(slot, one).count(stop) > 1 for one in rollouts) or slot is chat
        verdict = slot.verdict(rollouts)
        assert verdict.outcome is Outcome.ADMITTED, verdict.detail


def test_a_long_thought_is_ended_and_the_answer_behind_it_is_graded_and_admitted(path: Path, policy: Policy) -> None:
    own = {"thinking": ThinkingSpec(tokens=5, end=END), "max_new_tokens": 30}
    slot = slot_of(policy, Listener(wanted=END), sampling={"max_turns": 1, "max_prompt_tokens": 7}, **own)
    assert len(slot.expected.prompt_ids) == 7, "the longest prompt, to which the end of a thought must not be counted"
    engine, reference = by_the_engine(path, slot), by_plain_transformers(slot)
    assert [one.completion_ids for one in engine] == [one.completion_ids for one in reference]
    judgement = slot.judgement(engine)
    assert judgement.verdict.outcome is Outcome.ADMITTED, judgement.verdict.detail
    ended = [len(said) == 1 for said in judgement.replies]
    assert any(ended)
    assert judgement.verdict.rewards == tuple(map(float, ended))
    end_ids = tuple(render_reply(policy, END))
    assert {said for said in judgement.replies if said} == {((5, end_ids),)}
    assert max(len(one.completion_ids) for one in engine) <= 30 - len(end_ids)


def test_a_worker_that_thinks_on_or_ends_thoughts_that_are_not_to_be_ended_is_rejected(policy: Policy) -> None:
    own = {"thinking": ThinkingSpec(tokens=5, end=END), "max_new_tokens": 30}
    slot = slot_of(policy, Listener(), sampling={"max_turns": 1}, **own)
    free = slot_of(policy, Listener(), sampling={"max_turns": 1}, max_new_tokens=30)
    thinks_on = by_plain_transformers(slot, replace(slot.expected.rules, thinking=None))
    assert slot.reason(thinks_on) is not None
    answers = by_plain_transformers(free, slot.expected.rules)
    assert free.reason(answers) is not None


def test_a_turn_that_thinks_on_with_proofs_of_what_it_should_have_read_draws_other_tokens(policy: Policy) -> None:
    """The last thing to try: the tokens of an unended thought, truly proved as if its end had stood there."""
    own = {"thinking": ThinkingSpec(tokens=5, end=END), "max_new_tokens": 24}
    slot = slot_of(policy, Listener(), sampling={"max_turns": 1}, **own)
    free = slot_of(policy, Listener(), sampling={"max_turns": 1}, max_new_tokens=24 - len(render_reply(policy, END)))
    drawn = by_plain_transformers(free)
    replies = [
        replay(one.completion_ids, eos_ids={EOS}, sampling=slot.rules.spec.sampling, rules=slot.expected.rules).replies
        for one in drawn
    ]
    assert any(replies)
    assert slot.reason(Prover(policy, slot.rules.spec).prove(drawn, replies)) is Reason.WRONG_TOKEN


@pytest.mark.parametrize(
    ("text", "generation", "thinks"),
    [
        ("12", None, True),
        ("12</think>", None, False),
        ("12", "Assistant:", False),
        ("<think>12", "Assistant:", True),
        ("<think>12</think>3", "Assistant:", False),
        ("<think>12</think><think>3", "Assistant:", True),
        ("12", "Assistant:<think>\n", True),
        ("12", "Assistant:<think>\n\n</think>\n\n", False),
    ],
)
def test_only_an_open_thought_is_ended(text: str, generation: str | None, thinks: bool) -> None:
    """A policy that does not think must not be told that it has thought."""
    chat = None if generation is None else msgspec.structs.replace(CHAT_FORMATS["plain"], generation=generation)
    assert is_thinking(text, chat) is thinks


def test_an_engine_asked_for_fewer_tokens_than_a_budget_draws_no_more(path: Path, policy: Policy) -> None:
    slot = slot_of(policy, Listener(), thinking=ThinkingSpec(tokens=5, end=END))
    for most in (3, 5, 7):
        request = replace(requests_for(slot.expected)[0], max_tokens=most)
        (rollout,) = generated(TorchEngine(slot.rules.spec), path, [request], version=VERSION)
        assert len(rollout.completion_ids) == most or rollout.completion_ids[-1] == EOS
