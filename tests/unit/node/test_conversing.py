"""An environment of several turns under the verifier: what it may say, and whose fault it is when it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
import torch
from narrow_run import RUN_ID, LeasedSlot, loaded
from talking import SPEC, talk, talkative_file
from verifying import InMemory, generated

from coordinator.calibration.cheats import Prover
from node.engines.base import SampleRequest, requests_for
from node.engines.torch import TorchEngine
from node.environments.arithmetic import Arithmetic
from node.environments.base import Environment, EnvironmentFault, Problem
from node.environments.calculator import Calculator
from node.environments.grading import grade
from node.episodes.conversation import REPLY_SECONDS, all_graded, asking, graded
from node.policy.file import Policy, render_completion, render_reply
from node.policy.models.tiny_llama import EOS
from node.protocol.admission import Outcome, judge_gain
from node.protocol.reasons import Reason
from node.protocol.run import ProofSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.protocol.turns import MAX_REPLY_CHARACTERS, StopStrings, TurnRules, replay, turns_of
from node.verification.plan import Rules
from node.verification.prefill import TransformersPrefill
from node.verification.second_look import altered, int8, suspect_gain
from node.verification.spans import Span, spans_of

VERSION = 5
"""The leased policy's."""


@dataclass(frozen=True)
class Talker:
    """Says what it is told to; the reward is the share of turns that were used."""

    say: Callable[[Sequence[str]], str | None]
    name: str = "talker"

    def problem(self, index: int) -> Problem:
        return Problem(f"Q:{index % 100}\nA:")

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return self.say(turns)

    def reward(self, problem: Problem, completion: str) -> float:
        return 0.0

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return len(turns) / 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talkative_file(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(path: Path) -> Policy:
    return loaded(path)


def slot_of(policy: Policy, environment: Environment, *, number: int = 0, **sampling: int) -> LeasedSlot:
    spec = msgspec.structs.replace(SPEC, sampling=msgspec.structs.replace(SPEC.sampling, **sampling))
    return LeasedSlot(Rules(RUN_ID, spec, [environment]), {VERSION: policy}, VERSION, number)


def by_plain_transformers(slot: LeasedSlot) -> list[Rollout]:
    expected = slot.expected
    return [
        talk(slot.policy, expected.prompt_ids, seed, expected.ask, spec=slot.rules.spec, version=VERSION)
        for seed in expected.seeds
    ]


def by_the_engine(path: Path, slot: LeasedSlot, requests: Sequence[SampleRequest] | None = None) -> list[Rollout]:
    requests = requests_for(slot.expected) if requests is None else requests
    return generated(TorchEngine(slot.rules.spec), path, requests, version=VERSION)


def replies_in(slot: LeasedSlot, rollout: Rollout) -> list[int]:
    expected = slot.expected
    found = replay(
        rollout.completion_ids, eos_ids=expected.eos_ids, sampling=slot.rules.spec.sampling, ask=expected.ask
    )
    return [before for before, _ in found.replies]


def test_engine_and_reference_draw_the_same_and_are_admitted(path: Path, policy: Policy) -> None:
    slot = slot_of(policy, Talker(lambda turns: f"<{len(turns)}>"), number=1)
    engine, reference = by_the_engine(path, slot), by_plain_transformers(slot)
    assert [one.completion_ids for one in engine] == [one.completion_ids for one in reference]
    assert sum(len(replies_in(slot, one)) for one in engine) >= 4
    for rollouts in (engine, reference):
        judgement = slot.judgement(rollouts)
        verdict = judgement.verdict
        assert verdict.outcome is Outcome.ADMITTED, verdict.detail
        assert [len(said) for said in judgement.replies] == [len(replies_in(slot, one)) for one in rollouts]
        assert verdict.rewards == tuple(len(turns_of(one.completion_ids, {EOS})) / 4 for one in rollouts)


def test_one_pass_over_a_segment_says_what_a_pass_over_each_turn_says(path: Path, policy: Policy) -> None:
    """The states that count are picked out between the environment's words; one off would reject everybody."""
    slot = slot_of(policy, Talker(lambda _: "=12\n"), number=1)
    rollout = max(by_the_engine(path, slot), key=lambda one: len(replies_in(slot, one)))
    said = replay(
        rollout.completion_ids, eos_ids={EOS}, sampling=slot.rules.spec.sampling, ask=slot.expected.ask
    ).replies
    assert len(said) >= 2
    ((_, whole),) = spans_of(rollout, said, row=0, chunk_tokens=8)
    context, at, parts = list(rollout.prompt_ids), 0, []
    for end, ids in (*said, (len(rollout.completion_ids), ())):
        tokens = rollout.completion_ids[at:end]
        parts.append(Span(0, rollout.seed, list(context), at, tokens, [], 0))
        context += [*tokens, *ids]
        at = end
    prefill = TransformersPrefill(policy)
    together, each = prefill.states([whole])[0], torch.cat(prefill.states(parts))
    assert torch.allclose(together, each, atol=1e-4)
    assert whole.input_ids == context[:-1]


def test_a_policy_that_arrives_between_two_turns(path: Path, policy: Policy, tmp_path: Path) -> None:
    """A new policy takes over while the tool is at work, and reads the tool's words as if it had always been there."""
    newer = talkative_file(tmp_path, seed=3)
    loads = asyncio.Event()
    slot = slot_of(policy, Talker(lambda _: "=1\n"), number=1, max_version_lead=1)
    slot.policies[VERSION + 1] = loaded(newer)

    async def generate() -> list[Rollout]:
        engine = TorchEngine(slot.rules.spec)
        await engine.load(path, version=VERSION)
        loop = asyncio.get_running_loop()
        ask = slot.expected.ask
        assert ask is not None

        def ask_slowly(turns: Sequence[Sequence[int]]) -> Sequence[int] | None:
            if not loads.is_set():
                loads.set()
                asyncio.run_coroutine_threadsafe(engine.load(newer, version=VERSION + 1), loop).result(30)
            return ask(turns)

        try:
            return await engine.generate([replace(one, ask=ask_slowly) for one in requests_for(slot.expected)])
        finally:
            await engine.close()

    rollouts = asyncio.run(generate())
    both = [one for one in rollouts if one.segment_versions == [VERSION, VERSION + 1]]
    assert any(one.segment_tokens[0] in replies_in(slot, one) for one in both), "cut where a turn ends"
    assert any(max(replies_in(slot, one), default=0) > one.segment_tokens[0] for one in both), "and turns after that"
    verdict = slot.verdict(rollouts)
    assert verdict.outcome is Outcome.ADMITTED, verdict.detail


def test_the_longest_rollout_fits_into_the_engine(path: Path, policy: Policy) -> None:
    """Prompt, tokens and replies at their limits: a cache that is one column short would lose every slot."""
    slot = slot_of(
        policy, Talker(lambda _: "x" * 5), number=4, max_prompt_tokens=7, max_new_tokens=40, max_reply_tokens=15
    )
    rollouts = by_the_engine(path, slot)
    assert any(len(replies_in(slot, one)) == 3 and len(one.completion_ids) == 40 for one in rollouts)
    assert slot.reason(rollouts) is None


def test_a_second_look_sees_through_the_replies(path: Path, policy: Policy) -> None:
    """Read without them, honest work would be compared with states of another text."""
    slot = slot_of(policy, Talker(lambda _: "=12\n"), number=1, group_size=8)
    expected, eight_bits = slot.expected, altered(policy, int8)
    cheap = [talk(eight_bits, expected.prompt_ids, seed, expected.ask, version=VERSION) for seed in expected.seeds]
    spec = msgspec.structs.replace(
        slot.rules.spec, proofs=ProofSpec(scheme="sketch/1", chunk_tokens=8, sketch_step=0.001)
    )
    found = []
    for drawn_by, rollouts in ((policy, by_the_engine(path, slot)), (eight_bits, cheap)):
        ends, sampling = expected.eos_ids, spec.sampling
        said = [
            replay(one.completion_ids, eos_ids=ends, sampling=sampling, ask=expected.ask).replies for one in rollouts
        ]
        assert sum(map(len, said)) > 4
        look = suspect_gain(
            "int8",
            Prover(drawn_by, spec).prove(rollouts, said),
            said,
            version=VERSION,
            policies=InMemory(slot.policies),
            published=(VERSION,),
            spec=spec,
        )
        found.append(asyncio.run(look))
    honest, cheat = (judge_gain("int8", gain, limits=spec.limits) for gain in found)
    assert honest is None
    assert cheat is not None
    assert cheat.figure == "int8_gain"


# -- what an environment may say


TOO_MUCH: dict[str, str] = {
    "more tokens than the run allows": "x" * (SPEC.sampling.max_reply_tokens + 1),
    "more characters than are made tokens of": "x" * (MAX_REPLY_CHARACTERS + 1),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_reply_beyond_the_limits_ends_the_rollout_for_everybody(path: Path, policy: Policy, name: str) -> None:
    slot = slot_of(policy, Talker(lambda _: TOO_MUCH[name]), number=1)
    rollouts = by_the_engine(path, slot)
    assert all(one.completion_ids[-1] == EOS or len(one.completion_ids) == 48 for one in rollouts)
    assert all(EOS not in one.completion_ids[:-1] for one in rollouts)
    assert slot.reason(rollouts) is None


def test_the_longest_reply_is_as_long_as_the_run_allows(path: Path, policy: Policy) -> None:
    slot = slot_of(policy, Talker(lambda _: "x" * SPEC.sampling.max_reply_tokens), number=1)
    rollouts = by_the_engine(path, slot)
    assert any(len(replies_in(slot, one)) == 1 for one in rollouts)
    assert slot.reason(rollouts) is None


def test_a_run_of_one_turn_never_asks(path: Path, policy: Policy) -> None:
    def never(_: Sequence[str]) -> str:
        raise AssertionError("it has nothing to say in this run")

    slot = slot_of(policy, Talker(never), number=1, max_turns=1)
    rollouts = by_the_engine(path, slot)
    assert slot.expected.ask is None
    assert slot.reason(rollouts) is None


def test_a_reply_has_none_of_the_tokens_that_begin_a_sequence(policy: Policy) -> None:
    """A tokenizer that puts one before each prompt would begin the text anew in its middle."""
    assert render_reply(policy, "=7\n") == policy.tokenizer("=7\n")["input_ids"]
    assert render_completion(policy, render_reply(policy, "<think>7</think>")) == "<think>7</think>"
    assert render_reply(policy, "") == []


# -- whose fault it is


def fails(_: Sequence[str]) -> str:
    raise EnvironmentFault("the tool is broken", code="unavailable")


@pytest.mark.parametrize("error", [EnvironmentFault("broken", code="broken"), RuntimeError("bug"), MemoryError()])
def test_an_environment_that_fails_is_nobodys_fraud(path: Path, policy: Policy, error: Exception) -> None:
    honest = by_the_engine(path, slot_of(policy, Talker(lambda _: "=1\n"), number=1))

    def fail(_: Sequence[str]) -> str:
        raise error

    verdict = slot_of(policy, Talker(fail), number=1).verdict(honest)
    assert (verdict.outcome, verdict.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)


def test_a_submission_whose_replies_take_too_long_is_given_up(
    path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that makes the tool think would keep a verifier from everybody's work for its whole length."""
    slot, clock, asked = slot_of(policy, Talker(lambda _: "=1\n"), number=1), [0.0], list[int]()
    honest = by_the_engine(path, slot)
    assert sum(len(replies_in(slot, one)) for one in honest) > 4

    def think(turns: Sequence[str]) -> str:
        asked.append(len(turns))
        clock[0] += 0.4 * REPLY_SECONDS
        return "=1\n"

    monkeypatch.setattr("node.episodes.conversation.time.monotonic", lambda: clock[0])
    verdict = slot_of(policy, Talker(think), number=1).verdict(honest)
    assert (verdict.outcome, verdict.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)
    assert len(asked) == 3


def test_a_worker_whose_environment_fails_delivers_nothing_and_goes_on(path: Path, policy: Policy) -> None:
    """Completions beside it are given up, and the engine draws the next slot."""
    slot = slot_of(policy, Talker(fails), number=1)

    async def generate() -> list[Rollout]:
        engine = TorchEngine(slot.rules.spec)
        await engine.load(path, version=VERSION)
        try:
            with pytest.raises(EnvironmentFault):
                await engine.generate(requests_for(slot.expected))
            return await engine.generate([replace(one, ask=None) for one in requests_for(slot.expected)])
        finally:
            await engine.close()

    assert len(asyncio.run(generate())) == SPEC.sampling.group_size


def test_rewards_are_of_all_turns_in_a_conversation_and_of_the_text_otherwise(policy: Policy) -> None:
    problem = Calculator().problem(7)
    answer = problem.data["answer"]
    assert grade(Calculator(), problem, ["1*1", f"</think>{answer}"], tokens=9) == 1.0
    assert grade(Calculator(), problem, [f"</think>{answer}", "1*1"], tokens=9) == 0.0
    tokens = [*render_reply(policy, "1*1"), EOS, *render_reply(policy, f"</think>{answer}"), EOS]
    assert graded(policy, Calculator(), problem, tokens) == 1.0
    assert graded(policy, Talker(lambda _: None), problem, tokens) == 0.5
    assert graded(policy, Arithmetic(), Arithmetic().problem(3), tokens) == 0.0


def test_the_arithmetic_environment_has_nothing_to_say(policy: Policy) -> None:
    many = SamplingSpec(max_turns=4)
    assert asking(policy, Arithmetic(), Arithmetic().problem(3), sampling=many) is None
    assert asking(policy, Calculator(), Calculator().problem(3), sampling=many) is not None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that grading is measured by, which stands still but for what a test adds."""
    now = [0.0]
    monkeypatch.setattr("node.episodes.conversation.time.monotonic", lambda: now[0])
    return now


@dataclass(frozen=True)
class Slow(Talker):
    """Takes its time over each reward."""

    clock: list[float] = field(default_factory=list)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        self.clock[0] += 0.4 * REPLY_SECONDS
        return 0.5


def test_rewards_that_take_too_long_together_are_nobodys_fault(policy: Policy, clock: list[float]) -> None:
    """A group is graded within a claim's time, or two verifiers do it: what is not proved may be made to be slow."""
    slow = Slow(lambda _: None, clock=clock)
    rewards = all_graded(policy, slow, slow.problem(0), [[40]] * 8)
    assert [next(rewards) for _ in range(3)] == [0.5] * 3
    with pytest.raises(EnvironmentFault) as raised:
        next(rewards)
    assert raised.value.code == "too_slow"


def test_the_search_for_stop_strings_takes_nothing_of_the_time_for_rewards(policy: Policy, clock: list[float]) -> None:
    """It takes 20 s for 16 completions of 32768 tokens: an honest group of them would stay undecided for ever."""

    def decode(tokens: Sequence[int]) -> str:
        clock[0] += REPLY_SECONDS
        return ""

    rules = TurnRules(stop=StopStrings(("x",), decode))
    talker = Talker(lambda _: None)
    assert list(all_graded(policy, talker, talker.problem(0), [[40]] * 4, rules=rules)) == [0.25] * 4
