"""What a worker says about the environment, at the door: nothing that it invents, skips or hides is believed.

The run is one of a tool that the policy uses all the time, and the attackers hold the policy, draw with it by plain
transformers, and prove what they drew. Each lies in one row of a group whose other rows are honest. Without the lie
the same group is admitted, so that it is the lie which is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import pytest
from swarm import Peer, Swarm, running
from talking import SPEC, talk, talkative_file

from coordinator.calibration.cheats import Prover
from node.policy.file import Policy, render_reply
from node.policy.models.tiny_llama import EOS
from node.protocol.admission import Outcome
from node.protocol.messages import Lease
from node.protocol.reasons import Reason
from node.protocol.submission import Expected, Rollout
from node.protocol.turns import AskReply, Replies, replay, turns_of

Turns = Sequence[Sequence[int]]
CAP = SPEC.sampling.max_new_tokens
UNLIKE = (Reason.PROOF_MISMATCH, Reason.WRONG_TOKEN, Reason.WRONG_LOGPROB)
"""What tokens of another context are rejected for, whichever figure is over its limit first."""

Find = Callable[[Callable[[Rollout, Replies], object]], "Talk"]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("turns")
    with running(folder, talkative_file(folder), spec=SPEC) as swarm:
        yield swarm


@dataclass(frozen=True)
class Talk:
    """A leased slot, and what an honest worker draws for it; `row` is the one that is lied about."""

    swarm: Swarm
    peer: Peer
    lease: Lease
    rollouts: list[Rollout]
    row: int

    @property
    def policy(self) -> Policy:
        return self.swarm.engine.policy

    @cached_property
    def expected(self) -> Expected:
        return self.swarm.expected(self.lease)

    @property
    def ask(self) -> AskReply:
        assert self.expected.ask is not None
        return self.expected.ask

    @property
    def honest(self) -> Rollout:
        return self.rollouts[self.row]

    @property
    def replies(self) -> Replies:
        return replies_in(self.honest, self.expected)

    def over(self, ask: AskReply | None) -> Rollout:
        """The row, drawn over what `ask` says instead of the environment."""
        return talk(self.policy, self.expected.prompt_ids, self.honest.seed, ask)

    def proved(self, tokens: Sequence[int], replies: Replies) -> Rollout:
        """Any tokens, truly proved as if the environment had said `replies` between them."""
        rollout = msgspec.structs.replace(self.honest, completion_ids=list(tokens))
        return Prover(self.policy, SPEC).prove([rollout], [replies])[0]

    def verdict(self, lie: Rollout) -> Reason | None:
        """What the run decides when the row is `lie`."""
        sent = [*self.rollouts[: self.row], lie, *self.rollouts[self.row + 1 :]]
        receipt = self.swarm.judge(self.peer, sent, self.lease)
        assert receipt.outcome in (Outcome.ADMITTED, Outcome.REJECTED)
        return receipt.reason


def replies_in(rollout: Rollout, expected: Expected) -> Replies:
    return replay(rollout.completion_ids, eos_ids=expected.eos_ids, sampling=SPEC.sampling, ask=expected.ask).replies


@pytest.fixture(scope="module")
def talks(swarm: Swarm) -> Find:
    """A slot with a row of which something holds; one that no test wanted yet is looked at again."""
    unused: list[Talk] = []

    def find(holds: Callable[[Rollout, Replies], object]) -> Talk:
        for at in range(60):
            if at == len(unused):
                peer = swarm.peer()  # a key of its own: one that was caught gets no more than one slot at a time
                lease = peer.lease()
                unused.append(Talk(swarm, peer, lease, swarm.honest(lease), row=0))
            for row, rollout in enumerate(unused[at].rollouts):
                if holds(rollout, replies_in(rollout, unused[at].expected)):
                    return replace(unused.pop(at), row=row)
        raise AssertionError("the policy does not talk as it should")

    return find


def has_replies(_: Rollout, replies: Replies) -> bool:
    """Said early enough that the model goes on for a while."""
    return bool(replies) and replies[0][0] <= CAP - 16


def test_what_is_honest_is_admitted_whoever_drew_it(talks: Find) -> None:
    """The engine and plain transformers go on over the same replies; without it no attack below would say anything."""
    slot = talks(has_replies)
    again = slot.over(slot.ask)
    assert again.completion_ids == slot.honest.completion_ids
    assert slot.verdict(again) is None


def test_a_reply_that_the_worker_invents(talks: Find) -> None:
    """It has the tool say what suits it, and goes on over that; tokens and proofs are the policy's own."""
    slot = talks(has_replies)

    def invent(turns: Turns) -> list[int] | None:
        return None if slot.ask(turns) is None else render_reply(slot.policy, "=4711\n</think>")

    assert slot.verdict(slot.over(invent)) in UNLIKE


def test_a_reply_that_is_one_character_off(talks: Find) -> None:
    slot = talks(has_replies)

    def alter(turns: Turns) -> list[int] | None:
        said = slot.ask(turns)
        return None if said is None else [*said[:-1], said[-1] + 1]

    lie = slot.over(alter)
    assert slot.verdict(lie) in UNLIKE


def test_a_reply_that_the_worker_skips(talks: Find) -> None:
    """The tool costs it something, so it goes on as if the tool had said nothing."""
    slot = talks(has_replies)
    lie = slot.over(lambda turns: None if slot.ask(turns) is None else [])
    assert slot.verdict(lie) in UNLIKE


def test_the_honest_tokens_proved_without_the_replies(talks: Find) -> None:
    """The tokens are right, but were computed over another context."""
    slot = talks(has_replies)
    silent = tuple((before, ()) for before, _ in slot.replies)
    lie = slot.proved(slot.honest.completion_ids, silent)
    assert slot.verdict(lie) in UNLIKE


def test_an_answer_after_the_last_turn(talks: Find) -> None:
    """All turns are used up; it appends one more, with what the reward likes."""
    slot = talks(
        lambda one, said: len(said) == 3 and len(one.completion_ids) <= CAP - 8 and one.completion_ids[-1] == EOS
    )
    more = render_reply(slot.policy, "</think>7")
    tokens = [*slot.honest.completion_ids, *more, min(slot.expected.eos_ids)]
    said = (*slot.replies, (len(slot.honest.completion_ids), tuple(render_reply(slot.policy, "=7\n"))))
    assert slot.verdict(slot.proved(tokens, said)) is Reason.TOKENS_AFTER_EOS


def test_a_rollout_that_stops_where_a_reply_was_due(talks: Find) -> None:
    """A first turn is cheaper than four of them, and for a question that it cannot answer the reward is the same."""
    slot = talks(has_replies)
    (first, _), *_ = slot.replies
    lie = slot.proved(slot.honest.completion_ids[:first], ())
    assert slot.verdict(lie) is Reason.UNFINISHED


def test_a_rollout_that_stops_in_the_middle_of_a_later_turn(talks: Find) -> None:
    slot = talks(lambda one, said: bool(said) and len(one.completion_ids) > said[-1][0] + 2)
    cut = slot.replies[-1][0] + 1
    lie = slot.proved(slot.honest.completion_ids[:cut], slot.replies)
    assert slot.verdict(lie) is Reason.UNFINISHED


def test_a_turn_that_is_ended_where_nothing_forced_it(talks: Find) -> None:
    """An early end asks the tool when it suits the worker: the true policy, the true tool, another token."""
    slot = talks(lambda one, said: has_replies(one, said) and said[0][0] >= 6)
    tokens = list(slot.honest.completion_ids)
    tokens[2] = min(slot.expected.eos_ids)
    cut = _cut_to_rules(tokens, slot)
    assert slot.verdict(slot.proved(cut, _replies(cut, slot))) is Reason.WRONG_TOKEN


def test_a_turn_that_is_not_ended_where_it_was_forced_to(talks: Find) -> None:
    """It writes something else over the end, and goes on in the same turn, so that the tool is never asked."""
    slot = talks(has_replies)
    tokens = list(slot.honest.completion_ids)
    tokens[slot.replies[0][0] - 1] = 40
    cut = _cut_to_rules(tokens, slot)
    assert slot.verdict(slot.proved(cut, _replies(cut, slot))) is Reason.WRONG_TOKEN


def test_chunks_of_proofs_that_do_not_begin_anew_at_a_turn(talks: Find) -> None:
    """Turns cut elsewhere than at their ends: a chunk then holds states of two turns."""
    span = SPEC.proofs.chunk_tokens
    slot = talks(lambda one, said: said and said[0][0] % span and said[0][0] + 4 < len(one.completion_ids))
    lie = msgspec.structs.replace(slot.honest, proofs=Prover(slot.policy, SPEC).prove([slot.honest], [()])[0].proofs)
    assert slot.verdict(lie) in (Reason.WRONG_PROOF_COUNT, Reason.MALFORMED_PROOF, Reason.PROOF_MISMATCH)


def test_a_reply_passed_off_as_the_models_own_words(talks: Find) -> None:
    """The tool's words among the completion's tokens: then the model would be trained on them, and paid for them."""
    slot = talks(lambda one, said: has_replies(one, said) and len(one.completion_ids) + len(said[0][1]) <= CAP)
    (first, ids), *_ = slot.replies
    tokens = [*slot.honest.completion_ids[:first], *ids, *slot.honest.completion_ids[first:]]
    cut = _cut_to_rules(tokens, slot)
    assert slot.verdict(slot.proved(cut, _replies(cut, slot))) in (Reason.WRONG_TOKEN, Reason.PROOF_MISMATCH)


def test_tokens_hidden_in_a_reply(talks: Find) -> None:
    """Advice behind the tool's true words, which nobody else sees: the model then answers better than the policy."""
    slot = talks(has_replies)
    hint = render_reply(slot.policy, "23*47=1081 ")

    def hide(turns: Turns) -> list[int] | None:
        said = slot.ask(turns)
        return None if said is None else [*said, *hint]

    assert slot.verdict(slot.over(hide)) in UNLIKE


def test_positions_that_begin_anew_at_a_turn(talks: Find) -> None:
    """The noise of the first turn used again for the second: a worker's choice, were it allowed."""
    slot = talks(lambda one, said: bool(said) and len(turns_of(one.completion_ids, {EOS})[1]) > 6)
    first = slot.replies[0][0]
    rest = talk(
        slot.policy,
        [*slot.expected.prompt_ids, *slot.honest.completion_ids[:first], *slot.replies[0][1]],
        slot.honest.seed,
        None,
    )
    cut = _cut_to_rules([*slot.honest.completion_ids[:first], *rest.completion_ids], slot)
    assert cut != slot.honest.completion_ids, "the positions do not matter here"
    assert slot.verdict(slot.proved(cut, _replies(cut, slot))) is Reason.WRONG_TOKEN


def _replies(tokens: Sequence[int], slot: Talk) -> Replies:
    return replay(tokens, eos_ids=slot.expected.eos_ids, sampling=SPEC.sampling, ask=slot.ask).replies


def _cut_to_rules(tokens: Sequence[int], slot: Talk) -> list[int]:
    """What of `tokens` is no more than a rollout may have, filled up where it has to go on."""
    tokens = tokens[:CAP]
    replayed = replay(tokens, eos_ids=slot.expected.eos_ids, sampling=SPEC.sampling, ask=slot.ask)
    if replayed.end is not None:
        return list(tokens[: replayed.end])
    return [*tokens, *[40] * CAP][:CAP]
