"""The submission file: what a worker writes is what the verifier judges."""

from __future__ import annotations

import os
import struct

import msgspec
import pytest
import zstandard

from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout, proof_bytes
from node.submission.reader import VerifierFailed, bounds_of, read_rollouts
from node.submission.writer import write_rollouts

SPEC = RunSpec(
    name="submissions",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=3, max_prompt_tokens=8, max_new_tokens=40, max_version_lead=2),
)


def a_rollout(row: int, *, tokens: int = 5, **changes: object) -> Rollout:
    good = Rollout(
        seed=bytes([row]) * 16,
        prompt_ids=[1, 2, 3],
        completion_ids=list(range(tokens)),
        logprobs=[-0.5 * token for token in range(tokens)],
        segment_versions=[7],
        segment_tokens=[tokens],
        proofs=[bytes([row]) * 258] * -(-tokens // 32),
    )
    return msgspec.structs.replace(good, **changes)


GROUP = [
    a_rollout(0, tokens=1),
    a_rollout(1, tokens=33),
    a_rollout(2, tokens=40, segment_versions=[7, 9], segment_tokens=[3, 37], proofs=[bytes(258)] * 3),
]


def read(group: list[Rollout]) -> list[Rollout]:
    return read_rollouts(write_rollouts(group), spec=SPEC)


def test_what_a_worker_writes_is_what_the_verifier_reads():
    assert read(GROUP) == GROUP


def test_a_body_is_read_from_a_file_too(tmp_path):
    path = tmp_path / "body"
    path.write_bytes(write_rollouts(GROUP))
    assert read_rollouts(path, spec=SPEC) == GROUP


def test_any_messagepack_reader_can_read_a_submission():
    """Auditors and contributors look at evidence with their own tools."""
    content = msgspec.msgpack.decode(zstandard.decompress(write_rollouts(GROUP)))
    assert content["format"] == "swarmproof/rollouts/3"
    assert [row["seed"] for row in content["rows"]] == [rollout.seed for rollout in GROUP]
    assert struct.unpack("<33i", content["rows"][1]["completion_ids"]) == tuple(GROUP[1].completion_ids)


def test_equal_rollouts_make_equal_bytes():
    """A worker that sends its file again after a lost reply is recognised by the file's digest."""
    assert write_rollouts(GROUP) == write_rollouts(list(GROUP))


@pytest.mark.parametrize("level", [-5, 3, 19])
def test_other_writers_may_choose_any_level(level):
    content = zstandard.decompress(write_rollouts(GROUP))
    body = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(content)
    assert read_rollouts(body, spec=SPEC) == GROUP


def test_a_number_that_does_not_fit_is_not_written():
    """Cut to 32 bits, an engine's bug would become another token."""
    for changes in ({"completion_ids": [2**31]}, {"completion_ids": [1.5]}, {"logprobs": [1e300]}):
        with pytest.raises((struct.error, OverflowError)):
            write_rollouts([a_rollout(0, **changes)])


@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [float("-inf")], [1.0]])
def test_a_bad_logprob_reaches_the_check_that_names_it(values):
    """The reader passes values on, so that a worker is told `logprob_not_finite` and not something about its file."""
    (first, *_) = read([a_rollout(row, tokens=1, logprobs=values) for row in range(3)])
    assert repr(first.logprobs) == repr(values)


def test_a_completion_one_token_too_long_reaches_the_check_that_names_it():
    cap = SPEC.sampling.max_new_tokens
    assert len(read([a_rollout(row, tokens=cap + 1) for row in range(3)])[0].completion_ids) == cap + 1


BOUNDS = bounds_of(SPEC)


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("prompt_ids", 2 * 8 + 16),
        ("completion_ids", 2 * 40 + 16),
        ("logprobs", 2 * 40 + 16),
        ("segment_versions", 2 * 3 + 16),
        ("segment_tokens", 2 * 3 + 16),
    ],
)
def test_a_list_at_twice_what_the_run_allows_and_a_little_is_read_and_one_longer_is_not(field, most):
    """Too long a list reaches the check that names it; one without end does not reach it."""
    rows = read([a_rollout(row, **{field: [1] * most}) for row in range(3)])
    assert [len(getattr(row, field)) for row in rows] == [most] * 3
    with pytest.raises(Refusal, match=f"Row 2: {field}") as caught:
        read([*GROUP[:2], a_rollout(2, **{field: [1] * (most + 1)})])
    assert caught.value.reason == Reason.WRONG_SCHEMA


def test_proofs_are_read_up_to_twice_their_number_and_size_and_a_little_and_no_further():
    most, size = 2 * (2 + 2) + 16, 2 * proof_bytes(SPEC.proofs, tokens=SPEC.proofs.chunk_tokens) + 16
    assert read([a_rollout(row, proofs=[bytes(size)] * most) for row in range(3)])[1].proofs == [bytes(size)] * most
    for proofs in ([b""] * (most + 1), [bytes(size + 1)]):
        with pytest.raises(Refusal) as caught:
            read([*GROUP[:2], a_rollout(2, proofs=proofs)])
        assert caught.value.reason == Reason.WRONG_SCHEMA


def test_everything_at_its_bound_fits_the_bound_of_the_content():
    """Otherwise the bound of a list would be one that no list can come to."""
    group = [
        a_rollout(
            row,
            prompt_ids=[1] * BOUNDS.prompt_tokens,
            completion_ids=[1] * BOUNDS.completion_tokens,
            logprobs=[0.0] * BOUNDS.completion_tokens,
            segment_versions=[1] * BOUNDS.segments,
            segment_tokens=[1] * BOUNDS.segments,
            proofs=[bytes(BOUNDS.proof_bytes)] * BOUNDS.proofs,
        )
        for row in range(3)
    ]
    assert read(group) == group


def test_versions_of_64_bits_arrive_whole():
    """Cut to 32 bits, a version that does not exist would become one that does."""
    versions = [-(2**63), -1, 2**32 + 7, 2**63 - 1]
    group = [a_rollout(row, segment_versions=versions, segment_tokens=[-(2**31), 2**31 - 1]) for row in range(3)]
    assert read(group) == group


def test_the_proofs_of_the_most_segments_that_a_run_allows_are_read():
    """Each switch may leave a chunk unfilled, so a completion can need one more proof for each."""
    group = [
        a_rollout(row, tokens=40, segment_versions=[7, 8, 9], segment_tokens=[1, 1, 38], proofs=[bytes(258)] * 4)
        for row in range(3)
    ]
    assert read(group) == group


def test_a_body_at_the_byte_limit_is_read_and_one_byte_more_is_not(tmp_path):
    group = [a_rollout(row, tokens=1, proofs=[os.urandom(258)] * 18) for row in range(3)]
    body = write_rollouts(group)
    for body_limit, refused in ((len(body), False), (len(body) - 1, True)):
        spec = RunSpec(
            name="small",
            environments=SPEC.environments,
            sampling=SPEC.sampling,
            limits=LimitsSpec(max_submission_bytes=body_limit),
        )
        (tmp_path / "body").write_bytes(body)
        for source in (body, tmp_path / "body"):
            if refused:
                with pytest.raises(Refusal, match=f"more than {body_limit} bytes"):
                    read_rollouts(source, spec=spec)
            else:
                assert read_rollouts(source, spec=spec) == group


def test_a_submission_that_is_no_longer_on_disk_blames_nobody(tmp_path):
    with pytest.raises(VerifierFailed):
        read_rollouts(tmp_path / "gone", spec=SPEC)
