"""Completions that several policies drew, and every way to lie about which drew what.

A run that lets completions go on under a newer policy takes the worker's word for the moment at which that policy
arrived, and for nothing else. The policies here are one optimizer step apart, in float32, and the completions are
decoded without any engine: what is honest here is what the protocol says, not what an implementation does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from narrow_run import FAR_INSIDE, MANIFEST, LeasedSlot, loaded, make_rules, policy_file, sharp_model
from torch import Tensor
from verifying import InMemory, Part, decided, drawn, forged, measured

from node.engines.torch_decoder import cache_keyword
from node.policy.file import Policy
from node.protocol.admission import Outcome, judge_rows
from node.protocol.reasons import Reason
from node.protocol.run import SamplingSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Rollout, chunk_count
from node.submission.writer import write_rollouts
from node.verification.measure import PolicyUnavailable
from node.verification.verify import verify
from toploc import build_chunk_proofs

OLD, NEW, NEWER, TO_COME = 5, 6, 7, 8
RULES = make_rules("segments", SamplingSpec(group_size=3, max_new_tokens=40, max_version_lead=2))
SPEC = RULES.spec
LEARNING_RATE = 2e-4
SWITCHES = (8, 5, 11)
"""After how many tokens the new policy takes over in each row."""

LEAST_TOKENS = 20


def trained(steps: int) -> torch.nn.Module:
    """The first policy's model after so many steps of AdamW on fixed tokens."""
    model = sharp_model(seed=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ids = torch.randint(3, 100, (8, 32), generator=torch.Generator().manual_seed(7))
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Policy]:
    """Three policies, each a step after the one before."""
    return {
        version: loaded(policy_file(trained(version - OLD), tmp_path_factory.mktemp("policy")))
        for version in (OLD, NEW, NEWER)
    }


@dataclass(frozen=True)
class Slot(LeasedSlot):
    """A slot that is leased for the old policy, and its honest completions."""

    def parts(self, *, row: int) -> list[Part]:
        """The old policy up to the row's switch, then the new one."""
        return [(OLD, self.policies[OLD], SWITCHES[row]), (NEW, self.policies[NEW], None)]

    def group(self, draw: Callable[[int, bytes], Rollout]) -> list[Rollout]:
        return [draw(row, seed) for row, seed in enumerate(self.expected.seeds)]

    def drawn_by(self, *parts: Part) -> list[Rollout]:
        return self.group(lambda _, seed: drawn(parts, self.expected, seed, spec=SPEC))

    def honest(self) -> list[Rollout]:
        return self.group(lambda row, seed: drawn(self.parts(row=row), self.expected, seed, spec=SPEC))

    def retold(self, one: Rollout, *segments: tuple[int, int]) -> Rollout:
        """The tokens of `one` as if drawn in `segments` (version, tokens), with true proofs for that story."""
        told = [(version, self.policies[version], count) for version, count in segments]
        return forged(told, one.prompt_ids, one.completion_ids, seed=one.seed, spec=SPEC)


@pytest.fixture(scope="module")
def slot(policies: dict[int, Policy]) -> Slot:
    """The first slot whose completions are long enough, and in which a step changes what every row goes on with."""
    for number in range(200):
        slot = Slot(RULES, policies, OLD, number)
        switched, old = slot.honest(), slot.drawn_by((OLD, policies[OLD], None))
        pairs = list(zip(switched, old, strict=True))
        if all(len(one.completion_ids) >= LEAST_TOKENS for one in switched) and any(
            one.completion_ids != other.completion_ids for one, other in pairs
        ):
            return slot
    raise AssertionError("no such slot")


@pytest.fixture(scope="module")
def honest(slot: Slot) -> list[Rollout]:
    return slot.honest()


def told(rollouts: Sequence[Rollout], **fields: object) -> list[Rollout]:
    """Another story about the last row."""
    return [*rollouts[:-1], msgspec.structs.replace(rollouts[-1], **fields)]


# Honest work passes, or nothing below means anything.


def test_honest_completions_with_a_switch_are_admitted(slot: Slot, honest: list[Rollout]) -> None:
    judgement = slot.judgement(honest)
    assert (judgement.verdict.outcome, judgement.verdict.reason) == (Outcome.ADMITTED, None)
    assert all(one.segment_versions == [OLD, NEW] for one in honest)
    assert judgement.logprobs is not None
    for ours, one in zip(judgement.logprobs, honest, strict=True):
        assert ours == pytest.approx(one.logprobs, abs=4e-5)


def test_a_switch_costs_no_exactness(slot: Slot, honest: list[Rollout]) -> None:
    """Were the figures larger with a switch, limits would have to be wider, for everybody."""
    without = slot.drawn_by((OLD, slot.policies[OLD], None))
    three = slot.drawn_by(
        (OLD, slot.policies[OLD], 3), (NEW, slot.policies[NEW], 4), (NEWER, slot.policies[NEWER], None)
    )
    for group in (without, honest, three):
        rows = measured(slot.policies, group, spec=SPEC)
        assert judge_rows({number: row.figures for number, row in enumerate(rows)}, limits=FAR_INSIDE) is None


def test_a_lease_may_be_worked_on_by_a_newer_policy_from_the_start(slot: Slot) -> None:
    newer = slot.drawn_by((NEW, slot.policies[NEW], None))
    assert [one.segment_versions for one in newer] == [[NEW]] * 3
    assert slot.reason(newer) is None


def test_the_moment_of_the_switch_is_the_workers_to_choose(slot: Slot) -> None:
    """The freedom that a lead grants (docs/threat-model.md), and the reason why there is none by default."""
    for after in (1, 2, 6):
        assert slot.reason(slot.drawn_by((OLD, slot.policies[OLD], after), (NEW, slot.policies[NEW], None))) is None


# When the switch was.


@pytest.mark.parametrize("by", [-3, -1, 1, 3])
def test_a_switch_that_was_earlier_or_later_than_said(slot: Slot, honest: list[Rollout], by: int) -> None:
    lengths = honest[-1].segment_tokens
    assert len(honest[-1].proofs) == 2
    moved = told(honest, segment_tokens=[lengths[0] + by, lengths[1] - by])
    assert slot.reason(moved) is Reason.PROOF_MISMATCH


def test_a_whole_completion_of_the_old_policy_said_to_be_switched(slot: Slot) -> None:
    """To be paid for keeping up with the run, or to seem fresher than one is."""
    old = slot.drawn_by((OLD, slot.policies[OLD], None))
    (one,) = old[-1:]
    count = SWITCHES[-1]
    proofs = [one.proofs[0]] * 2
    lengths = [count, len(one.completion_ids) - count]
    assert (
        slot.reason(told(old, segment_versions=[OLD, NEW], segment_tokens=lengths, proofs=proofs))
        is Reason.PROOF_MISMATCH
    )


def test_tokens_of_the_old_policy_with_true_proofs_of_the_new_one(slot: Slot, honest: list[Rollout]) -> None:
    """A prefill makes every proof true for the story; the tokens are still those that the old policy forces."""
    old = slot.drawn_by((OLD, slot.policies[OLD], None))
    stories = [
        slot.retold(one, (OLD, count), (NEW, len(one.completion_ids) - count))
        for one, count in zip(old, SWITCHES, strict=True)
    ]
    assert slot.reason(stories) is Reason.WRONG_TOKEN


def test_all_tokens_said_to_be_the_old_policys(slot: Slot, honest: list[Rollout]) -> None:
    stories = [slot.retold(one, (OLD, len(one.completion_ids))) for one in honest]
    assert slot.reason(stories) is Reason.WRONG_TOKEN


def test_all_tokens_said_to_be_the_new_policys(slot: Slot) -> None:
    mixed = slot.drawn_by((OLD, slot.policies[OLD], LEAST_TOKENS - 1), (NEW, slot.policies[NEW], None))
    single = []
    for one in mixed:
        total = len(one.completion_ids)
        due = chunk_count([total], chunk_tokens=SPEC.proofs.chunk_tokens)
        single.append(
            msgspec.structs.replace(one, segment_versions=[NEW], segment_tokens=[total], proofs=one.proofs[:due])
        )
    assert slot.reason(single) is Reason.PROOF_MISMATCH


# Which policies there were.


def test_the_two_policies_swapped(slot: Slot) -> None:
    reversed_parts: list[Part] = [(NEW, slot.policies[NEW], 8), (OLD, slot.policies[OLD], None)]
    backwards = slot.drawn_by(*reversed_parts)
    assert slot.reason(backwards) is Reason.WRONG_SEGMENTS, "truthfully told"
    lied = [msgspec.structs.replace(one, segment_versions=[OLD, NEW]) for one in backwards]
    assert slot.reason(lied) is Reason.PROOF_MISMATCH


def test_the_newer_of_two_new_policies_named_for_the_other(slot: Slot, honest: list[Rollout]) -> None:
    assert slot.reason(told(honest, segment_versions=[OLD, NEWER])) is Reason.PROOF_MISMATCH


def test_a_policy_that_the_run_did_not_publish(slot: Slot, honest: list[Rollout]) -> None:
    """Nobody can say what it would force; and no policy is loaded to find that out."""
    shelf = InMemory(slot.policies)
    lied = slot.claim(told(honest, segment_versions=[OLD, NEWER]))
    (ahead,) = decided([lied], shelf, rules=RULES, published=[OLD, NEW])
    (skipped,) = decided([slot.claim(honest)], shelf, rules=RULES, published=[OLD, NEWER])
    for verdict in (ahead, skipped):
        assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, Reason.WRONG_SEGMENTS)
    assert shelf.measured == []


def test_a_policy_beyond_the_lead(slot: Slot, honest: list[Rollout]) -> None:
    assert slot.reason(told(honest, segment_versions=[OLD, TO_COME])) is Reason.WRONG_SEGMENTS


def test_a_policy_older_than_the_lease(slot: Slot, honest: list[Rollout]) -> None:
    assert slot.reason(told(honest, segment_versions=[OLD - 1, NEW])) is Reason.WRONG_SEGMENTS


# How the proofs are cut, and what they are of.


def states_of(policy: Policy, one: Rollout, start: int, end: int) -> Tensor:
    """The hidden states that the completion's tokens `start` .. `end` - 1 are chosen from, under `policy`."""
    with torch.inference_mode():
        ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]])
        hidden: Tensor = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0]
    first = len(one.prompt_ids) - 1
    return hidden[first + start : first + end].bfloat16()


def test_chunks_that_are_not_cut_at_the_switch(slot: Slot, honest: list[Rollout]) -> None:
    """The states are true and in order; only the borders of the proofs are elsewhere."""
    one = honest[-1]
    count, total = one.segment_tokens[0], len(one.completion_ids)
    states = torch.cat([states_of(slot.policies[OLD], one, 0, count), states_of(slot.policies[NEW], one, count, total)])
    uncut = build_chunk_proofs(list(torch.split(states, SPEC.proofs.chunk_tokens)), SPEC.proofs.top_k)
    expected = Reason.PROOF_MISMATCH if len(uncut) == len(one.proofs) else Reason.WRONG_PROOF_COUNT
    assert slot.reason(told(honest, proofs=uncut)) is expected
    halves = [states[: total // 2], states[total // 2 :]]
    assert slot.reason(told(honest, proofs=build_chunk_proofs(halves, SPEC.proofs.top_k))) is Reason.PROOF_MISMATCH


def test_the_proofs_of_the_two_segments_swapped(slot: Slot, honest: list[Rollout]) -> None:
    assert slot.reason(told(honest, proofs=honest[-1].proofs[::-1])) is Reason.PROOF_MISMATCH


@torch.inference_mode()
def with_old_cache(slot: Slot, row: int, seed: bytes) -> Rollout:
    """The new policy goes on over the keys and values that the old one left: cheaper by a prefill."""
    tokens: list[int] = []
    logprobs: list[float] = []
    states: list[Tensor] = []
    cache, pending = None, list(slot.expected.prompt_ids)
    while len(tokens) < SPEC.sampling.max_new_tokens and not (tokens and tokens[-1] in slot.expected.eos_ids):
        policy = slot.policies[OLD if len(tokens) < SWITCHES[row] else NEW]
        cached = {cache_keyword(policy.model): cache}
        output = policy.model(input_ids=torch.tensor([pending]), use_cache=True, output_hidden_states=True, **cached)
        cache = output.past_key_values
        logits = output.logits[0, -1].float()
        noise = torch.from_numpy(gumbel_noise([seed], [len(tokens)], vocabulary=policy.vocabulary))[0]
        tokens.append(int((logits + noise).argmax()))
        logprobs.append(float(logits.log_softmax(-1)[tokens[-1]]))
        states.append(output.hidden_states[-1][0, -1])
        pending = tokens[-1:]
    lengths = [SWITCHES[row], len(tokens) - SWITCHES[row]]
    chunks = [
        chunk
        for part in torch.split(torch.stack(states).bfloat16(), lengths)
        for chunk in torch.split(part, SPEC.proofs.chunk_tokens)
    ]
    return Rollout(
        seed=seed,
        prompt_ids=list(slot.expected.prompt_ids),
        completion_ids=tokens,
        logprobs=logprobs,
        segment_versions=[OLD, NEW],
        segment_tokens=lengths,
        proofs=build_chunk_proofs(chunks, SPEC.proofs.top_k),
    )


def test_the_old_policys_cache_kept_over_the_switch(slot: Slot) -> None:
    """Its log-probabilities belong to no policy, and an engine that preempts the request gets others."""
    assert slot.reason(slot.group(lambda row, seed: with_old_cache(slot, row, seed))) is Reason.PROOF_MISMATCH


# Segments that are none, from the bytes.


MALFORMED: dict[str, dict[str, list[int]]] = {
    "no segment": {"segment_versions": [], "segment_tokens": []},
    "a version without tokens": {"segment_versions": [OLD, NEW, NEWER]},
    "tokens without a version": {"segment_versions": [OLD]},
    "a segment of no tokens": {"segment_versions": [OLD, NEW, NEWER], "segment_tokens": [0]},
    "a segment of fewer than no tokens": {"segment_versions": [OLD, NEW, NEWER], "segment_tokens": [-1]},
    "more segments than policies": {"segment_versions": [OLD, NEW, NEWER, TO_COME], "segment_tokens": [1, 1]},
    "one policy twice": {"segment_versions": [OLD, OLD]},
    "back to the old policy": {"segment_versions": [OLD, NEW, OLD], "segment_tokens": [1]},
    "too few tokens": {"segment_tokens": [5, 5]},
    "too many tokens": {"segment_tokens": [40, 40]},
    "lengths whose sum wraps in 32 bits": {"segment_tokens": [2**31 - 1, 2**31 - 1]},
    "the smallest version": {"segment_versions": [-(2**63), NEW]},
    "the largest version": {"segment_versions": [OLD, 2**63 - 1]},
    "versions that wrap to the lease": {"segment_versions": [OLD - 2**32, NEW + 2**32]},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_segments_that_are_none(slot: Slot, honest: list[Rollout], name: str) -> None:
    fields = dict(MALFORMED[name])
    lengths = fields.get("segment_tokens")
    if lengths is not None and name.startswith(("a segment", "more", "back")):
        # What is left of the completion, spread so that only the named fault remains.
        rest = len(honest[-1].completion_ids) - sum(lengths)
        count = len(fields["segment_versions"]) - len(lengths)
        fields["segment_tokens"] = [*lengths, *[1] * (count - 1), rest - (count - 1)]
    shelf = InMemory(slot.policies)
    verdict = asyncio.run(
        verify(
            write_rollouts(told(honest, **fields)),
            version=OLD,
            manifest_digest=MANIFEST,
            slot=slot.number,
            policies=shelf,
            published=list(slot.policies),
            rules=RULES,
        )
    ).verdict
    assert (verdict.outcome, verdict.reason) == (Outcome.REJECTED, Reason.WRONG_SEGMENTS), verdict.detail
    assert shelf.measured == [], "garbage bought a forward pass"


def test_a_run_without_a_lead_takes_no_segments(slot: Slot, honest: list[Rollout]) -> None:
    strict = msgspec.structs.replace(SPEC, sampling=msgspec.structs.replace(SPEC.sampling, max_version_lead=0))
    (verdict,) = decided([slot.claim(honest)], slot.policies, rules=replace(RULES, spec=strict))
    assert verdict.reason is Reason.WRONG_SEGMENTS


# Whose fault it is when a policy cannot be had.


def test_a_policy_that_cannot_be_had_is_no_verdict_and_holds_nobody_else_up(slot: Slot, honest: list[Rollout]) -> None:
    old = slot.drawn_by((OLD, slot.policies[OLD], None))
    shelf = InMemory({OLD: slot.policies[OLD]})
    with pytest.raises(PolicyUnavailable):
        decided([slot.claim(honest)], shelf, rules=RULES, published=[OLD, NEW])
    (verdict,) = decided([slot.claim(old)], shelf, rules=RULES, published=[OLD, NEW])
    assert verdict.outcome is Outcome.ADMITTED


def test_each_policy_is_asked_for_at_most_twice_however_many_claims_name_it(slot: Slot, honest: list[Rollout]) -> None:
    """Claims of mixed segments share the policies, and one that is refused early asks for none."""
    old = slot.drawn_by((OLD, slot.policies[OLD], None))
    shelf = InMemory(slot.policies)
    claims = [slot.claim(told(honest, seed=bytes(16))), slot.claim(honest), slot.claim(old), slot.claim(honest)]
    verdicts = decided(claims, shelf, rules=RULES)
    assert [verdict.reason for verdict in verdicts] == [Reason.WRONG_SEED, None, None, None]
    # Once for the rows that are looked at first, which are drawn, and once for all others.
    assert set(shelf.measured) == {OLD, NEW}
    assert max(map(shelf.measured.count, (OLD, NEW))) <= 2
