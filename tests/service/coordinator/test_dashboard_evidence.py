"""The evidence that a verifier keeps for people: bounded whatever was submitted, and never a reason to fail."""

from __future__ import annotations

import math

import msgspec
import pytest
import zstandard

from coordinator.errors import StorageFault
from coordinator.verifier.evidence import (
    MAX_DECODED_BYTES,
    MAX_PIECE_CHARACTERS,
    EvidenceLimits,
    decode_evidence,
    encode_evidence,
    halves,
    token_ids,
)
from node.protocol.submission import Rollout
from node.verification.deviations import Deviations


def rollout(tokens: int = 70, **changes: object) -> Rollout:
    values = {
        "seed": bytes(32),
        "prompt_ids": [1, 2, 3],
        "completion_ids": list(range(tokens)),
        "logprobs": [-1.0] * tokens,
        "segment_versions": [4],
        "segment_tokens": [tokens],
        "proofs": [b""],
    }
    return Rollout(**(values | changes))


def measured(tokens: int = 70, *, margin: float = 0.001) -> Deviations:
    chunks = -(-tokens // 32)
    return Deviations(
        exponent_mismatches=[float(chunk) for chunk in range(chunks)],
        mantissa_means=[0.25] * chunks,
        mantissa_medians=[0.125] * chunks,
        sketch_distances=[0.7] * tokens,
        margins=[margin] * tokens,
        errors=[1e-5] * tokens,
    )


def pieces(tokens: int = 70) -> list[str]:
    return [f"t{at} " for at in range(tokens)]


def test_what_was_measured_comes_back_by_token_and_by_chunk() -> None:
    rollouts = [rollout(), rollout(40)]
    blob = encode_evidence(rollouts, {0: measured()}, prompt="Q", pieces=[pieces(), pieces(40)], chunk_tokens=32)
    assert blob is not None
    found = decode_evidence(blob)
    assert (found.prompt, found.prompt_tokens) == ("Q", 3)
    first, second = found.rows
    assert token_ids(first.ids) == list(range(70))
    assert first.pieces == pieces()
    assert halves(first.margins) == pytest.approx([0.001] * 70, rel=1e-3)
    assert [(one.start, one.tokens, one.exponent_mismatches) for one in first.chunks] == [
        (0, 32, 0.0),
        (32, 32, 1.0),
        (64, 6, 2.0),
    ]
    assert first.chunks[0].sketch_distance == pytest.approx(1.0)  # as Figures.sketch_distance: a logarithm of d + 0.3
    assert (second.is_measured, second.chunks, second.margins) == (False, [], b"")


def test_a_long_completion_is_cut_to_the_limit_and_says_so() -> None:
    limits = EvidenceLimits(tokens=64)
    blob = encode_evidence(
        [rollout(500), rollout(500)], None, prompt="", pieces=[pieces(500)] * 2, chunk_tokens=32, limits=limits
    )
    assert blob is not None
    for row in decode_evidence(blob).rows:
        assert (row.tokens, len(row.pieces)) == (500, 32)


def test_evidence_that_would_be_too_large_is_halved_until_it_fits() -> None:
    texts = [chr(0x4E00 + (at * 7919) % 20_000) * 20 for at in range(4096)]
    limits = EvidenceLimits(tokens=4096, bytes=2048)
    blob = encode_evidence([rollout(4096)], None, prompt="", pieces=[texts], chunk_tokens=32, limits=limits)
    assert blob is not None
    assert len(blob) <= 2048
    assert 0 < len(decode_evidence(blob).rows[0].pieces) < 4096


def test_a_verifier_that_is_to_keep_nothing_keeps_nothing() -> None:
    limits = EvidenceLimits(tokens=0)
    assert encode_evidence([rollout()], None, prompt="", pieces=[[]], chunk_tokens=32, limits=limits) is None


def test_tokens_and_segments_that_no_model_has_do_not_stop_the_verifier() -> None:
    hostile = rollout(3, completion_ids=[-5, 2**60, 7], segment_versions=[1, 2, 3], segment_tokens=[10**9])
    blob = encode_evidence([hostile], None, prompt="x" * 10**6, pieces=[["a" * 10**6, "", "b"]], chunk_tokens=32)
    assert blob is not None
    (row,) = decode_evidence(blob).rows
    assert token_ids(row.ids) == [0, 2**32 - 1, 7]
    assert row.pieces[0] == "a" * MAX_PIECE_CHARACTERS
    assert row.segments == [(1, 10**9)]


@pytest.mark.parametrize("margin", [math.nan, math.inf, 1e308, 70_000.0])
def test_a_margin_that_is_not_finite_stays_beyond_every_limit(margin: float) -> None:
    blob = encode_evidence([rollout()], {0: measured(margin=margin)}, prompt="", pieces=[pieces()], chunk_tokens=32)
    assert blob is not None
    assert all(math.isinf(value) for value in halves(decode_evidence(blob).rows[0].margins))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"PAR1",
        zstandard.compress(b"\xc1"),
        zstandard.compress(msgspec.msgpack.encode({"v": 2, "prompt": "", "prompt_tokens": 0, "rows": []})),
        zstandard.compress(bytes(MAX_DECODED_BYTES + 1)),
    ],
)
def test_a_blob_that_is_no_evidence_is_one_typed_error(blob: bytes) -> None:
    with pytest.raises(StorageFault):
        decode_evidence(blob)


def test_a_decompression_bomb_takes_no_more_memory_than_evidence_may() -> None:
    bomb = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(4 * MAX_DECODED_BYTES))
    with pytest.raises(StorageFault):
        decode_evidence(bomb)


def test_what_the_environment_said_is_kept_where_it_said_it_and_chunks_begin_anew_there() -> None:
    """Who looks at a completion of several turns would otherwise see tokens that answer nothing."""
    blob = encode_evidence(
        [rollout(), rollout(40)],
        {0: measured()},
        prompt="Q",
        pieces=[pieces(), pieces(40)],
        replies=[[(10, "=7\n"), (69, "x" * 5000)], []],
        chunk_tokens=32,
        limits=EvidenceLimits(tokens=2 * 69),
    )
    assert blob is not None
    first, second = decode_evidence(blob).rows
    assert first.replies == [(10, "=7\n")], "what comes behind the kept tokens is not kept"
    assert second.replies == []
    assert [(one.start, one.tokens) for one in first.chunks] == [(0, 10), (10, 32), (42, 27), (69, 1)]
