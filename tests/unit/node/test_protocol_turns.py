"""The walk through a completion's turns: worker, verifier and auditor must come to the same end of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from node.protocol.run import SamplingSpec
from node.protocol.submission import chunk_count, chunk_sizes
from node.protocol.turns import AskReply, Dialogue, Replies, interleaved, pieces, replay, turns_of

EOS, OTHER_EOS = 1, 2
ENDS = frozenset({EOS, OTHER_EOS})
RULES = SamplingSpec(max_new_tokens=12, max_turns=3, max_reply_tokens=5)

Turns = Sequence[Sequence[int]]


def saying(*replies: Sequence[int] | None) -> AskReply:
    """An environment that says these, one after the other, and then nothing more."""

    def ask(turns: Turns) -> Sequence[int] | None:
        return replies[len(turns) - 1] if len(turns) <= len(replies) else None

    return ask


def never(_: Turns) -> Sequence[int] | None:
    raise AssertionError("nobody may be asked here")


CASES: dict[str, tuple[list[int], AskReply | None, Replies, int | None]] = {
    "one turn, no environment to ask": ([7, 7, EOS], None, (), 3),
    "nothing has ended yet": ([7, 7], never, (), None),
    "the environment has nothing to say": ([7, EOS], saying(None), (), 2),
    "two turns": ([7, EOS, 8, EOS], saying([50, 51]), ((2, (50, 51)),), 4),
    "any end-of-sequence token ends a turn": ([7, OTHER_EOS, 8, EOS], saying([50]), ((2, (50,)),), 4),
    "a reply is due, and nothing follows it": ([7, EOS], saying([50]), ((2, (50,)),), None),
    "a later turn is under way": ([7, EOS, 8], saying([50], [51]), ((2, (50,)),), None),
    "an empty reply begins a turn like any other": ([7, EOS, 8, EOS], saying([]), ((2, ()),), 4),
    "an end by itself is a turn": ([EOS, EOS, 7], saying([50], [51]), ((1, (50,)), (2, (51,))), None),
    "what follows the end is left out": ([7, EOS, 8, EOS, 9, 9], saying([50]), ((2, (50,)),), 4),
    "after the last turn nobody is asked": (
        [7, EOS, 8, EOS, 9, EOS, 9],
        saying([50], [51], [52]),
        ((2, (50,)), (4, (51,))),
        6,
    ),
    "at the cap nobody is asked": ([*[7] * 11, EOS], never, (), 12),
    "the tokens of all replies are counted together": (
        [7, EOS, 8, EOS, 9],
        saying([1] * 3, [2] * 3),
        ((2, (1,) * 3),),
        4,
    ),
    "as many as are allowed": ([7, EOS, 8, EOS, 9], saying([1] * 3, [2] * 2), ((2, (1,) * 3), (4, (2,) * 2)), None),
    "one reply that is too long": ([7, EOS, 8], saying([1] * 6), (), 2),
    "end marks in a reply end nothing": ([7, EOS, 8, EOS], saying([EOS, OTHER_EOS]), ((2, (EOS, OTHER_EOS)),), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_where_a_rollout_is_over(name: str) -> None:
    tokens, ask, replies, end = CASES[name]
    found = replay(tokens, eos_ids=ENDS, sampling=RULES, ask=ask)
    assert (found.replies, found.end) == (replies, end)


@pytest.mark.parametrize("name", CASES)
def test_the_worker_learns_the_same_turn_by_turn(name: str) -> None:
    """It may not know what comes later; else an honest worker would be refused for stopping or going on."""
    tokens, ask, _, _ = CASES[name]
    whole = replay(tokens, eos_ids=ENDS, sampling=RULES, ask=ask)
    dialogue, at = Dialogue(RULES, ENDS, ask), 0
    for turn in turns_of(tokens[: whole.end], ENDS):
        at += len(turn)
        said = dialogue.after(turn)
        assert dialogue.tokens == at
        assert (said is None) == (at == whole.end or turn[-1] not in ENDS)
    assert tuple(dialogue.replies) == whole.replies


def test_one_turn_is_all_there_is_unless_the_run_says_otherwise() -> None:
    found = replay([7, EOS, 8], eos_ids=ENDS, sampling=SamplingSpec(max_new_tokens=12), ask=never)
    assert (found.replies, found.end) == ((), 2)


def test_the_environment_is_asked_with_every_turn_so_far_and_each_time_once() -> None:
    asked: list[Turns] = []

    def ask(turns: Turns) -> Sequence[int]:
        asked.append(turns)
        return [50]

    replay([7, EOS, 8, 8, EOS, 9], eos_ids=ENDS, sampling=RULES, ask=ask)
    assert asked == [((7, EOS),), ((7, EOS), (8, 8, EOS))]


def test_a_completion_is_cut_behind_its_ends() -> None:
    assert turns_of([7, EOS, EOS, 8], ENDS) == [[7, EOS], [EOS], [8]]
    assert turns_of([7], ENDS) == [[7]]
    assert turns_of([], ENDS) == []


def test_what_the_model_reads() -> None:
    assert interleaved([1, 2, 3], []) == [1, 2, 3]
    assert interleaved([1, 2, 3], [(1, [8, 9]), (2, ()), (3, [7])]) == [1, 8, 9, 2, 3, 7]


@pytest.mark.parametrize(
    ("segments", "replies", "expected"),
    [
        ([10], (), [10]),
        ([10], ((4, (1,)),), [4, 6]),
        ([4, 6], ((4, (1,)),), [4, 6]),
        ([3, 7], ((4, ()), (9, (1,))), [3, 1, 5, 1]),
    ],
)
def test_chunks_go_beyond_neither_a_policy_nor_a_turn(
    segments: list[int], replies: Replies, expected: list[int]
) -> None:
    assert pieces(segments, replies) == expected
    assert sum(chunk_sizes(expected, chunk_tokens=4)) == 10
    assert len(chunk_sizes(expected, chunk_tokens=4)) == chunk_count(expected, chunk_tokens=4)
