"""Read an untrusted submission: sizes first, then one zstd frame, then strictly typed MessagePack.

Nothing is decompressed before the frame header has declared its size, and no array is unpacked before its size is
checked, so the run's rules bound the cost of any file (`Bounds`). Checks 1 to 3 of docs/protocol.md, section 6.3; the
values are checked by `node.protocol.submission.check_rollouts`.

Not guaranteed: that neither libzstd nor msgspec has a bug that a file can exploit; both run in this process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from node.errors import NodeError
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout, chunk_count, proof_bytes
from node.submission.writer import Row, Submission

MAX_WINDOW_BYTES: Final = 8 * 1024 * 1024
"""The window that RFC 8878 recommends every decoder to support."""
MAX_EXPANSION: Final = 16
"""Maximum ratio of the content to `limits.max_submission_bytes`."""

_MAGIC = zstandard.FRAME_HEADER
_SLACK_BYTES = 256  # a row's names, types and lengths take 128; each proof's up to 5 more
_decode = msgspec.msgpack.Decoder(Submission).decode
_encode = msgspec.msgpack.Encoder().encode


class VerifierFailed(NodeError):
    """The verifier could not decide, for reasons of its own: the submission is indeterminate, never rejected."""

    code = "verifier_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of a file, in items per row unless named otherwise.

    Twice what the run's rules allow, and a little: a completion one token too long is a decision for
    `node.protocol.submission`, with its own reason.
    """

    rows: int
    prompt_tokens: int
    completion_tokens: int
    segments: int
    proofs: int
    proof_bytes: int
    file_bytes: int

    @property
    def content_bytes(self) -> int:
        """The maximum decompressed size."""
        row = 4 * self.prompt_tokens + 8 * self.completion_tokens + 12 * self.segments
        row += (5 + self.proof_bytes) * self.proofs + _SLACK_BYTES
        return min(self.rows * row + _SLACK_BYTES, MAX_EXPANSION * self.file_bytes)


def bounds_of(spec: RunSpec) -> Bounds:
    """Return the bounds that follow from a run's rules (docs/protocol.md, section 6.1)."""
    sampling = spec.sampling
    # Every piece after the first may leave one more chunk unfilled.
    proofs = chunk_count([sampling.max_new_tokens], chunk_tokens=spec.proofs.chunk_tokens) + spec.most_pieces - 1
    return Bounds(
        rows=sampling.group_size,
        prompt_tokens=2 * sampling.max_prompt_tokens + 16,
        completion_tokens=2 * sampling.max_new_tokens + 16,
        segments=2 * (sampling.max_version_lead + 1) + 16,
        proofs=2 * proofs + 16,
        proof_bytes=2 * proof_bytes(spec.proofs, tokens=spec.proofs.chunk_tokens) + 16,
        file_bytes=spec.limits.max_submission_bytes,
    )


def read_rollouts(body: bytes | Path, *, spec: RunSpec) -> list[Rollout]:
    """Return the rollouts in `body`, in sample order.

    Raises Refusal (MALFORMED_SUBMISSION, WRONG_SCHEMA or WRONG_GROUP_SIZE, in that order of precedence) if the file is
    at fault, VerifierFailed if this machine is. The values are not checked further than their types and sizes: see
    `node.protocol.submission.check_rollouts`.
    """
    bounds = bounds_of(spec)
    content = _decompressed(_load(body, max_bytes=bounds.file_bytes), max_bytes=bounds.content_bytes)
    rows = _rows(content)
    for index, row in enumerate(rows):
        _check_sizes(index, row, bounds)
    if len(rows) != bounds.rows:
        raise Refusal(Reason.WRONG_GROUP_SIZE, f"{len(rows)} rows where {bounds.rows} were leased.")
    return [_rollout(row) for row in rows]


def _load(body: bytes | Path, *, max_bytes: int) -> bytes:
    if isinstance(body, Path):
        try:
            with body.open("rb") as file:
                body = file.read(max_bytes + 1)
        except OSError as error:
            raise VerifierFailed(f"the submission cannot be read: {error}") from error
    if len(body) > max_bytes:
        raise Refusal(Reason.MALFORMED_SUBMISSION, f"It has more than {max_bytes} bytes.")
    return body


def _decompressed(body: bytes, *, max_bytes: int) -> bytes:
    """Decompress the single frame in `body`; an oversized header is refused before allocation."""
    if not body.startswith(_MAGIC):  # skippable frames and formats before RFC 8878 have others
        raise Refusal(Reason.MALFORMED_SUBMISSION, f"{len(body)} bytes that are not a zstd frame.")
    try:
        header = zstandard.get_frame_parameters(body)
        if header.content_size == zstandard.CONTENTSIZE_UNKNOWN or not 0 < header.content_size <= max_bytes:
            raise Refusal(Reason.MALFORMED_SUBMISSION, f"Its frame does not state a size from 1 to {max_bytes} bytes.")
        if header.window_size > max(MAX_WINDOW_BYTES, header.content_size):
            raise Refusal(Reason.MALFORMED_SUBMISSION, f"Its frame wants a window of {header.window_size} bytes.")
        if header.dict_id or header.has_checksum:
            raise Refusal(Reason.MALFORMED_SUBMISSION, "Its frame has a dictionary or a checksum.")
        decompressor = zstandard.ZstdDecompressor()
        return decompressor.decompress(body, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refusal(Reason.MALFORMED_SUBMISSION, "It is not one whole zstd frame.") from error


def _rows(content: bytes) -> list[Row]:
    # These errors' messages may quote the file, and a refusal's detail is logged publicly: left out.
    try:
        submission = _decode(content)
    except msgspec.ValidationError as error:
        raise Refusal(Reason.WRONG_SCHEMA, "Its fields or their types are not those of section 6.1.") from error
    # msgspec lets the codec's own error through where a string is not UTF-8.
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(Reason.MALFORMED_SUBMISSION, "Its content is not one MessagePack value.") from error
    # Fields in another order or twice, and longer forms of lengths.
    if _encode(submission) != content:
        raise Refusal(Reason.WRONG_SCHEMA, "Its content is not in the one encoding that section 6.1 allows.")
    return submission.rows


def _check_sizes(index: int, row: Row, bounds: Bounds) -> None:
    """Raise Refusal (WRONG_SCHEMA) unless every array has whole items, and no more than `bounds`."""
    arrays = (
        ("prompt_ids", row.prompt_ids, 4, bounds.prompt_tokens),
        ("completion_ids", row.completion_ids, 4, bounds.completion_tokens),
        ("logprobs", row.logprobs, 4, bounds.completion_tokens),
        ("segment_versions", row.segment_versions, 8, bounds.segments),
        ("segment_tokens", row.segment_tokens, 4, bounds.segments),
    )
    for name, array, item_bytes, most in arrays:
        if len(array) % item_bytes or len(array) > most * item_bytes:
            raise Refusal(
                Reason.WRONG_SCHEMA,
                f"Row {index}: {name} has {len(array)} bytes, not up to {most} items of {item_bytes}.",
            )
    if len(row.proofs) > bounds.proofs or any(len(proof) > bounds.proof_bytes for proof in row.proofs):
        raise Refusal(
            Reason.WRONG_SCHEMA, f"Row {index} has more than {bounds.proofs} proofs, or of {bounds.proof_bytes} bytes."
        )


def _rollout(row: Row) -> Rollout:
    return Rollout(
        seed=row.seed,
        prompt_ids=_numbers("<i4", row.prompt_ids),
        completion_ids=_numbers("<i4", row.completion_ids),
        logprobs=_numbers("<f4", row.logprobs),
        segment_versions=_numbers("<i8", row.segment_versions),
        segment_tokens=_numbers("<i4", row.segment_tokens),
        proofs=row.proofs,
    )


def _numbers(dtype: str, array: bytes) -> list[Any]:
    numbers: list[Any] = np.frombuffer(array, dtype).tolist()
    return numbers
