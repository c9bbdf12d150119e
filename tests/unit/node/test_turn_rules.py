"""What an environment adds to the rules of turns: all must see a turn end at the same token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from node.protocol.environment_spec import EnvironmentSpec, ThinkingSpec
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Expected, Rollout, check_rollouts
from node.protocol.turns import CONTEXT_TOKENS, Dialogue, StopStrings, ThinkingBudget, TurnRules, replay, turns_of
from node.submission.reader import bounds_of

EOS = 1
RULES = SamplingSpec(max_new_tokens=12, max_turns=3, max_reply_tokens=5)
TEXTS = {7: "a", 8: "b<", 9: "/s", 10: ">", 11: "></s>", 12: "</s>c", 13: "é", 14: ""}


def decode(tokens: Sequence[int]) -> str:
    return "".join(TEXTS.get(token, "?") for token in tokens)


def stopping(*strings: str, **rules: object) -> TurnRules:
    return TurnRules(stop=StopStrings(strings, decode), **rules)  # type: ignore[arg-type]


def thinking(tokens: int, *end_ids: int, is_open: bool = True, **rules: object) -> TurnRules:
    budget = ThinkingBudget(tokens, end_ids, lambda _: is_open)
    return TurnRules(thinking=budget, **rules)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([7, 8, 9, 10, 7], 4),  # over several tokens
        ([7, 12, 7], 2),  # within one token that goes on behind it
        ([8, 7, 9, 10], None),  # not in one piece
        ([8, 9, EOS, 10], 3),  # an end mark comes first
        ([7, 8, 9], None),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(tokens: list[int], end: int | None) -> None:
    found = replay(tokens, eos_ids={EOS}, sampling=RULES, rules=stopping("x", "</s>"))
    assert (found.end, found.most) == (end, 12)


def test_a_stop_string_of_the_turn_before_ends_no_other() -> None:
    """Else each turn behind one that was stopped would have a single token."""
    found = replay([8, 9, 10, 7, 7], eos_ids={EOS}, sampling=RULES, ask=lambda _: [50], rules=stopping("</s>"))
    assert (found.replies, found.end) == (((3, (50,)),), None)
    assert turns_of([8, 9, 10, 7, EOS], {EOS}, stopping("</s>")) == [[8, 9, 10], [7, EOS]]


def test_what_a_token_costs_does_not_grow_with_the_turn() -> None:
    seen = list[int]()

    def measure(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return ""

    stop = StopStrings(("</s>", "é"), measure)
    replay([7] * 500, eos_ids={EOS}, sampling=SamplingSpec(max_new_tokens=500), rules=TurnRules(stop=stop))
    assert max(seen) == stop.window == 4 + CONTEXT_TOKENS
    assert StopStrings(("é" * 3,), decode).window == 6 + CONTEXT_TOKENS


def test_an_environments_own_limit_goes_before_a_higher_one_of_the_run() -> None:
    assert replay([7] * 5, eos_ids={EOS}, sampling=RULES, rules=TurnRules(max_new_tokens=5)).most == 5
    assert replay([7] * 5, eos_ids={EOS}, sampling=RULES, rules=TurnRules(max_new_tokens=50)).most == 12


@pytest.mark.parametrize(
    ("tokens", "rules", "replies", "end", "most"),
    [
        ([7] * 3, thinking(3, 60, 61), ((3, (60, 61)),), None, 10),
        ([7] * 2, thinking(3, 60, 61), (), None, 12),
        ([7, 7, EOS], thinking(3, 60), (), 3, 12),  # over with the budget's last token
        ([7, 7, 7, 7, EOS], thinking(3, 60), ((3, (60,)),), 5, 11),
        ([7] * 4, thinking(3, 60, is_open=False), ((3, ()),), None, 12),
        ([7] * 10, thinking(10, 60, 61), (), None, 12),  # no token would be left for an answer
        ([7] * 9, thinking(9, 60, 61), ((9, (60, 61)),), None, 10),
        ([7] * 3, thinking(3, 60, max_new_tokens=4), (), None, 4),
    ],
)
def test_an_open_thought_is_ended_once_and_what_ends_it_counts_as_drawn(
    tokens: list[int],
    rules: TurnRules,
    replies: tuple[tuple[int, tuple[int, ...]], ...],
    end: int | None,
    most: int,
) -> None:
    found = replay(tokens, eos_ids={EOS}, sampling=RULES, rules=rules)
    assert (found.replies, found.end, found.most) == (replies, end, most)


def test_each_turn_has_a_budget_and_its_text_has_the_end_of_its_thought() -> None:
    """Whoever grades must read what the policy read; and an end of a thought is no reply of the environment."""
    asked = list[Sequence[Sequence[int]]]()

    def ask(turns: Sequence[Sequence[int]]) -> Sequence[int]:
        asked.append(turns)
        return [50, 51, 52]

    rules = thinking(2, 60, 61, 62, 63)
    sampling = SamplingSpec(max_new_tokens=20, max_turns=2, max_reply_tokens=3)
    found = replay([7, 7, 7, EOS, 8, 8, 8, EOS], eos_ids={EOS}, sampling=sampling, ask=ask, rules=rules)
    ends = (60, 61, 62, 63)
    assert found.replies == ((2, ends), (4, (50, 51, 52)), (6, ends))
    assert (found.end, found.most) == (8, 12)
    assert asked == [((7, 7, *ends, 7, EOS),)]
    turns = [[7, 7, *ends, 7, EOS], [8, 8, *ends, 8, EOS]]
    assert turns_of([7, 7, 7, EOS, 8, 8, 8, EOS], {EOS}, TurnRules(20, None, rules.thinking)) == turns


def test_a_worker_that_draws_piece_by_piece_sees_what_a_verifier_replays() -> None:
    """Of any completion: the same replies and the same end, or honest work would be rejected."""
    rng = random.Random(5)
    for _ in range(300):
        rules = TurnRules(
            rng.choice([None, 9]),
            StopStrings(("</s>", "aa"), decode) if rng.random() < 0.7 else None,
            ThinkingBudget(rng.randint(1, 6), (60,) * rng.randint(1, 3), lambda tokens: sum(tokens) % 2 > 0),
        )
        stream = iter(rng.choices([EOS, *TEXTS], weights=[1] + [2] * len(TEXTS), k=100))
        worker, tokens, is_over = Dialogue(RULES, {EOS}, lambda turns: [50] * len(turns), rules), list[int](), False
        while not is_over:
            piece = list[int]()
            while len(piece) < worker.room and not (piece and rules.ends_turn(piece, {EOS})):
                piece.append(next(stream))
            tokens += piece
            is_over = worker.after(piece) is None or worker.tokens == worker.most
        found = replay(tokens, eos_ids={EOS}, sampling=RULES, ask=lambda turns: [50] * len(turns), rules=rules)
        assert found.replies == tuple(worker.replies)
        assert len(tokens) == (found.most if found.end is None else found.end)
        assert [token for turn in worker.turns for token in turn if token < 50] == tokens


def rollout_of(tokens: list[int], chunks: int) -> Rollout:
    return Rollout(bytes(16), [5], tokens, [-1.0] * len(tokens), [0], [len(tokens)], [b""] * chunks)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([8, 9, 10], Reason.WRONG_PROOF_COUNT),  # all is right up to the proofs
        ([8, 9, 10, EOS], Reason.TOKENS_AFTER_EOS),
        ([8, 9], Reason.UNFINISHED),
        ([7] * 7, Reason.TOO_LONG),
    ],
)
def test_stopping_late_early_or_past_the_environments_limit_is_refused(tokens: list[int], reason: Reason) -> None:
    spec = RunSpec(
        name="t",
        environments=(EnvironmentSpec(name="arithmetic"),),
        sampling=RULES,
        proofs=ProofSpec(scheme="sketch/1"),
    )
    rules = stopping("</s>", max_new_tokens=6)
    expected = Expected(
        version=0, published=None, prompt_ids=(5,), seeds=[bytes(16)], vocabulary=99, eos_ids={EOS}, rules=rules
    )
    with pytest.raises(Refusal) as refused:
        check_rollouts([rollout_of(tokens, 0)], expected=expected, spec=spec)
    assert refused.value.reason is reason


def test_a_prompt_that_is_too_long_for_its_environment_is_for_nobody() -> None:
    spec = RunSpec(name="t", environments=(EnvironmentSpec(name="arithmetic"),), sampling=RULES)
    expected = Expected(
        version=0,
        published=None,
        prompt_ids=(5,) * 4,
        seeds=[bytes(16)],
        vocabulary=99,
        eos_ids={EOS},
        max_prompt_tokens=3,
    )
    work = Rollout(bytes(16), [5] * 4, [EOS], [-1.0], [0], [1], [])
    with pytest.raises(Refusal, match="prompt of more than 3 tokens"):
        check_rollouts([work], expected=expected, spec=spec)


def test_a_run_with_budgets_leaves_room_for_the_proofs_of_two_pieces_a_turn() -> None:
    """Chunks end where a thought is ended: a reader with the old bound would refuse honest files."""
    plain = RunSpec(name="t", environments=(EnvironmentSpec(name="arithmetic"),), sampling=RULES)
    own = EnvironmentSpec(name="arithmetic", thinking=ThinkingSpec(tokens=3))
    thinks = RunSpec(name="t", environments=(plain.environments[0], own), sampling=RULES)
    assert bounds_of(thinks).proofs - bounds_of(plain).proofs == 2 * RULES.max_turns
