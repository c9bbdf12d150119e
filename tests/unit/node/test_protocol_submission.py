"""The checks that need no model: each malformation has its own reason, decided in the documented order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import msgspec
import pytest

from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import (
    MAX_LOGPROB,
    Expected,
    Rollout,
    Segment,
    check_rollouts,
    chunk_count,
    chunk_sizes,
    proof_bytes,
)

Scheme = Literal["toploc/1", "sketch/1", "toploc/1+sketch/1"]

EOS = 1
SPEC = RunSpec(
    name="t",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=2, max_new_tokens=6, max_version_lead=2),
    proofs=ProofSpec(scheme="toploc/1", chunk_tokens=4, top_k=8),
)
SEEDS = (bytes(16), bytes([1]) * 16)
EXPECTED = Expected(
    version=7, published=(7, 8, 9), prompt_ids=(5, 6, 7), seeds=SEEDS, vocabulary=10, eos_ids=frozenset({EOS, 2})
)


def rollout(
    row: int = 0,
    tokens: tuple[int, ...] = (4, 5, 6, 7, EOS),
    *,
    versions: tuple[int, ...] = (7,),
    lengths: tuple[int, ...] | None = None,
    **changes: object,
) -> Rollout:
    lengths = (len(tokens),) if lengths is None else lengths
    due = min(8, chunk_count(lengths, chunk_tokens=4))
    good = Rollout(
        seed=SEEDS[row],
        prompt_ids=[5, 6, 7],
        completion_ids=list(tokens),
        logprobs=[-0.5] * len(tokens),
        segment_versions=list(versions),
        segment_tokens=list(lengths),
        proofs=[bytes(proof_bytes(SPEC.proofs, tokens=4))] * due,
    )
    return msgspec.structs.replace(good, **changes)


def refusal(*rollouts: Rollout, expected: Expected = EXPECTED) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check_rollouts(rollouts, expected=expected, spec=SPEC)
    return caught.value


def reason(**changes: object) -> Reason:
    """Why a group is refused whose second row alone is wrong."""
    return refusal(rollout(0), rollout(1, **changes)).reason


@pytest.mark.parametrize("tokens", [(EOS,), (2,), (4, EOS), (0, 9, 4, EOS), (4, 4, 4, 4, 4, EOS), (4,) * 6])
def test_honest_groups_of_every_boundary_length_pass(tokens: tuple[int, ...]) -> None:
    check_rollouts([rollout(0, tokens), rollout(1, tokens)], expected=EXPECTED, spec=SPEC)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_part_of_a_group_or_more_than_it(count: int) -> None:
    """An empty file must not be a group in which every rollout passes."""
    assert refusal(*[rollout(0)] * count).reason is Reason.WRONG_GROUP_SIZE


@pytest.mark.parametrize("prompt", [[], [5, 6], [5, 6, 8], [5, 6, 7, 7], [3, 5, 6, 7], [7, 6, 5]])
def test_another_prompt(prompt: list[int]) -> None:
    assert reason(prompt_ids=prompt) is Reason.WRONG_PROMPT


@pytest.mark.parametrize("seed", [SEEDS[0], b"", bytes(15), bytes(17), bytes([2]) * 16])
def test_another_seed(seed: bytes) -> None:
    assert reason(seed=seed) is Reason.WRONG_SEED


def test_rows_in_another_order_so_that_the_best_draw_is_counted_twice() -> None:
    assert refusal(rollout(1), rollout(0)).reason is Reason.WRONG_SEED
    assert refusal(rollout(0), rollout(0)).reason is Reason.WRONG_SEED


def test_an_empty_completion() -> None:
    assert reason(tokens=()) is Reason.EMPTY_COMPLETION


def test_a_completion_longer_than_the_cap() -> None:
    assert reason(tokens=(4,) * 7) is Reason.TOO_LONG
    assert reason(tokens=(4,) * 6 + (EOS,)) is Reason.TOO_LONG


@pytest.mark.parametrize("token", [-1, 10, 2**31 - 1, -(2**31)])
def test_a_token_that_indexes_outside_the_vocabulary(token: int) -> None:
    assert reason(tokens=(4, token, EOS)) is Reason.TOKEN_OUT_OF_RANGE


@pytest.mark.parametrize("tokens", [(EOS, EOS), (4, EOS, 4), (4, 2, EOS), (EOS, 4, 4, 4, 4, 4)])
def test_padding_after_the_end(tokens: tuple[int, ...]) -> None:
    assert reason(tokens=tokens) is Reason.TOKENS_AFTER_EOS


@pytest.mark.parametrize("length", [1, 5])
def test_stopping_early_without_an_end(length: int) -> None:
    assert reason(tokens=(4,) * length) is Reason.UNFINISHED


@pytest.mark.parametrize("count", [0, 4, 6])
def test_missing_or_extra_logprobs(count: int) -> None:
    assert reason(logprobs=[-0.5] * count) is Reason.WRONG_LOGPROB_COUNT


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.01, MAX_LOGPROB * 1.01])
def test_a_logprob_that_is_no_logprob(value: float) -> None:
    assert reason(logprobs=[-0.5] * 4 + [value]) is Reason.LOGPROB_NOT_FINITE


@pytest.mark.parametrize("value", [0.0, -0.0, MAX_LOGPROB, -80.0])
def test_a_certain_token_rounded_above_zero_is_honest(value: float) -> None:
    check_rollouts([rollout(0), rollout(1, logprobs=[value] * 5)], expected=EXPECTED, spec=SPEC)


# Segments.


@pytest.mark.parametrize(
    ("versions", "lengths"),
    [((7,), (5,)), ((9,), (5,)), ((7, 8), (1, 4)), ((7, 9), (4, 1)), ((8, 9), (2, 3)), ((7, 8, 9), (1, 1, 3))],
)
def test_policies_within_the_lead_may_take_turns(versions: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    honest = rollout(1, versions=versions, lengths=lengths)
    check_rollouts([rollout(0), honest], expected=EXPECTED, spec=SPEC)
    ends = [segment.end for segment in honest.segments]
    assert [segment.version for segment in honest.segments] == list(versions)
    assert ends[-1] == 5
    assert [segment.start for segment in honest.segments] == [0, *ends[:-1]]


@pytest.mark.parametrize(
    ("versions", "lengths"),
    [
        ((), ()),
        ((), (5,)),
        ((7,), ()),
        ((7, 8), (5,)),
        ((7,), (2, 3)),
        ((7, 8, 9, 10), (1, 1, 1, 2)),
        ((7, 7, 8, 8, 9), (1, 1, 1, 1, 1)),
    ],
    ids=["none", "no versions", "no lengths", "a length short", "a length over", "too many", "one for each token"],
)
def test_segments_that_are_no_segments(versions: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    assert reason(versions=versions, lengths=lengths) is Reason.WRONG_SEGMENTS


@pytest.mark.parametrize(
    "lengths",
    [(0, 5), (5, 0), (-1, 6), (2, 2), (2, 4), (5, 5), (2**31 - 1, 5 - 2**31 + 1), (2**63 - 1, 2**63 - 1)],
    ids=["first empty", "last empty", "negative", "too few", "too many", "twice", "cancels out", "sum beyond 64 bits"],
)
def test_lengths_that_are_not_the_completions(lengths: tuple[int, ...]) -> None:
    """A token that belongs to no segment would be measured under no policy."""
    assert reason(versions=(7, 8), lengths=lengths, proofs=[bytes(18)] * 2) is Reason.WRONG_SEGMENTS


@pytest.mark.parametrize(
    "versions", [(8, 7), (7, 7), (9, 8), (6, 7), (7, 10), (-1, 7), (-(2**63), 7), (7, 2**63 - 1), (2**63 - 1, 7)]
)
def test_versions_that_do_not_rise_or_are_outside_of_the_lead(versions: tuple[int, ...]) -> None:
    """Older than leased is stale work; newer than the lead is more choice than the run grants."""
    assert reason(versions=versions, lengths=(2, 3)) is Reason.WRONG_SEGMENTS


def test_without_a_lead_only_the_leased_policy_draws() -> None:
    spec = msgspec.structs.replace(SPEC, sampling=msgspec.structs.replace(SPEC.sampling, max_version_lead=0))
    check_rollouts([rollout(0), rollout(1)], expected=EXPECTED, spec=spec)
    for versions, lengths in (((8,), (5,)), ((7, 8), (2, 3))):
        with pytest.raises(Refusal) as caught:
            check_rollouts([rollout(0), rollout(1, versions=versions, lengths=lengths)], expected=EXPECTED, spec=spec)
        assert caught.value.reason is Reason.WRONG_SEGMENTS


@pytest.mark.parametrize(
    ("versions", "known", "missing"),
    [((7, 8), (7, 9), 8), ((7, 9), (7, 8), 9), ((7, 8, 9), (7,), 8), ((7,), (), 7)],
    ids=["passed over", "newer than the newest", "several to come", "none so far"],
)
def test_a_version_that_was_not_published_is_named(
    versions: tuple[int, ...], known: tuple[int, ...], missing: int
) -> None:
    """Nobody honest has such a policy: one is in the log before any worker can hear of it."""
    lengths = (1, 1, 3) if len(versions) == 3 else (2, 3) if len(versions) == 2 else (5,)
    group = [rollout(1, versions=versions, lengths=lengths), rollout(0)]
    caught = refusal(*group, expected=replace(EXPECTED, published=known, seeds=SEEDS[::-1]))
    assert caught.reason is Reason.WRONG_SEGMENTS
    assert caught.detail == f"Row 0: policy {missing} was not published."


def test_a_worker_that_does_not_know_what_is_published_checks_the_rest() -> None:
    unknown = replace(EXPECTED, published=None)
    check_rollouts([rollout(0), rollout(1, versions=(7, 9), lengths=(2, 3))], expected=unknown, spec=SPEC)
    assert refusal(rollout(0), rollout(1, versions=(6,)), expected=unknown).reason is Reason.WRONG_SEGMENTS


def test_chunks_begin_anew_at_a_segment() -> None:
    """Five tokens in chunks of four are two proofs; cut after one and after two they are two and three."""
    for lengths, count in (((5,), 2), ((1, 4), 2), ((2, 3), 2), ((1, 1, 3), 3)):
        versions = (7, 8, 9)[: len(lengths)]
        good = rollout(1, versions=versions, lengths=lengths)
        assert len(good.proofs) == count
        for wrong in (count - 1, count + 1):
            bad = msgspec.structs.replace(good, proofs=[bytes(18)] * wrong)
            assert refusal(rollout(0), bad).reason is Reason.WRONG_PROOF_COUNT


def test_segments_are_where_the_tokens_are() -> None:
    assert rollout(0, versions=(7, 9), lengths=(2, 3)).segments == [Segment(7, 0, 2), Segment(9, 2, 5)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_missing_or_extra_proofs(count: int) -> None:
    """Fewer proofs must never mean fewer checks."""
    assert reason(proofs=[bytes(18)] * count) is Reason.WRONG_PROOF_COUNT


@pytest.mark.parametrize("size", [0, 1, 17, 19, 4096])
def test_a_proof_of_another_size(size: int) -> None:
    assert reason(proofs=[bytes(18), bytes(size)]) is Reason.MALFORMED_PROOF


# Each change breaks one check and, because all are applied together, hides behind every earlier one.
IN_ORDER = [
    (Reason.WRONG_PROMPT, {"prompt_ids": [9]}),
    (Reason.WRONG_SEED, {"seed": b"x"}),
    (Reason.EMPTY_COMPLETION, {"completion_ids": []}),
    (Reason.TOO_LONG, {"completion_ids": [99, EOS] + [4] * 6}),
    (Reason.TOKEN_OUT_OF_RANGE, {"completion_ids": [EOS, 99]}),
    (Reason.TOKENS_AFTER_EOS, {"completion_ids": [EOS, 4]}),
    (Reason.UNFINISHED, {"completion_ids": [4]}),
    (Reason.WRONG_LOGPROB_COUNT, {"logprobs": [math.nan]}),
    (Reason.LOGPROB_NOT_FINITE, {"logprobs": [math.nan] * 5}),
    (Reason.WRONG_SEGMENTS, {"segment_tokens": [1, 1]}),
    (Reason.WRONG_PROOF_COUNT, {"proofs": [b""]}),
    (Reason.MALFORMED_PROOF, {"proofs": [b"", b""]}),
]


def test_the_first_reason_is_the_one_of_the_document() -> None:
    """Two verifiers must name the same reason for a file that is wrong in many ways."""
    for at in range(len(IN_ORDER)):
        changes: dict = {}
        for _, change in reversed(IN_ORDER[at:]):
            changes |= change
        assert reason(**changes) is IN_ORDER[at][0]


def test_the_order_is_the_enums() -> None:
    ranks = [list(Reason).index(reason) for reason, _ in IN_ORDER]
    assert ranks == sorted(ranks)


def test_rows_are_judged_one_after_the_other() -> None:
    assert refusal(rollout(0, proofs=[]), rollout(1, prompt_ids=[9])).reason is Reason.WRONG_PROOF_COUNT


def test_a_refusal_names_the_row_and_what_to_do() -> None:
    text = str(refusal(rollout(0), rollout(1, tokens=(4, 99, EOS))))
    assert text.startswith("token_out_of_range: Row 1 has token id 99 at position 1.")


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [((1,), 1), ((31,), 1), ((32,), 1), ((33,), 2), ((64,), 2), ((65,), 3), ((32, 32), 2), ((1, 64), 3), ((31, 33), 3)],
)
def test_the_last_shorter_chunk_of_each_segment_is_proved_too(tokens: tuple[int, ...], chunks: int) -> None:
    assert chunk_count(tokens, chunk_tokens=32) == chunks


SIZES = {"toploc/1": (258, 258, 258), "sketch/1": (4, 124, 128), "toploc/1+sketch/1": (262, 382, 386)}


@pytest.mark.parametrize("scheme", SIZES)
def test_a_proof_has_toplocs_258_bytes_and_four_for_each_token_of_a_sketch(scheme: Scheme) -> None:
    sizes = tuple(proof_bytes(ProofSpec(scheme=scheme), tokens=tokens) for tokens in (1, 31, 32))
    assert sizes == SIZES[scheme]


@pytest.mark.parametrize("scheme", ["sketch/1", "toploc/1+sketch/1"])
def test_the_last_shorter_chunk_has_a_shorter_sketch(scheme: Scheme) -> None:
    """A full-sized one would be a place to hide bytes in, a shorter one a token without a proof."""
    proofs = ProofSpec(scheme=scheme, chunk_tokens=4, top_k=8)
    spec = msgspec.structs.replace(SPEC, proofs=proofs)
    sizes = [[proof_bytes(proofs, tokens=4), proof_bytes(proofs, tokens=1)], [proof_bytes(proofs, tokens=2)]]
    good = [
        rollout(0, proofs=[bytes(size) for size in sizes[0]]),
        rollout(1, (4, EOS), proofs=[bytes(size) for size in sizes[1]]),
    ]
    check_rollouts(good, expected=EXPECTED, spec=spec)
    for index, more in ((0, -4), (1, 12), (1, -1), (1, -4)):
        wrong = [bytes(size + more * (place == index)) for place, size in enumerate(sizes[0])]
        with pytest.raises(Refusal) as caught:
            check_rollouts([rollout(0, proofs=wrong), good[1]], expected=EXPECTED, spec=spec)
        assert caught.value.reason is Reason.MALFORMED_PROOF
        assert f"proof {index} " in caught.value.detail


def test_the_chunks_of_each_segment_are_counted_by_themselves() -> None:
    assert chunk_sizes([4, 9, 1], chunk_tokens=4) == [4, 4, 4, 1, 1]
