"""The checks that need no model: each malformation has its own reason, decided in the documented order."""

from __future__ import annotations

import math

import msgspec
import pytest

from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import MAX_LOGPROB, Expected, Rollout, check_rollouts, chunk_count, proof_bytes

EOS = 1
SPEC = RunSpec(
    name="t",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=2, max_new_tokens=6),
    proofs=ProofSpec(chunk_tokens=4, top_k=8),
)
SEEDS = (bytes(16), bytes([1]) * 16)
EXPECTED = Expected(prompt_ids=(5, 6, 7), seeds=SEEDS, vocabulary=10, eos_ids=frozenset({EOS, 2}))


def rollout(row: int = 0, tokens: tuple[int, ...] = (4, 5, 6, 7, EOS), **changes: object) -> Rollout:
    good = Rollout(
        seed=SEEDS[row],
        prompt_ids=[5, 6, 7],
        completion_ids=list(tokens),
        logprobs=[-0.5] * len(tokens),
        proofs=[bytes(proof_bytes(8))] * chunk_count(len(tokens), chunk_tokens=4),
    )
    return msgspec.structs.replace(good, **changes)


def refusal(*rollouts: Rollout) -> Refusal:
    with pytest.raises(Refusal) as caught:
        check_rollouts(rollouts, expected=EXPECTED, spec=SPEC)
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


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_the_last_shorter_chunk_is_proved_too(tokens: int, chunks: int) -> None:
    assert chunk_count(tokens, chunk_tokens=32) == chunks


def test_a_default_proof_has_toplocs_258_bytes() -> None:
    assert proof_bytes(128) == 258
