"""Measurements of a submission, kept beside its verdict for the submission's page.

Informative only: neither auditors nor training use them, so they may be truncated, rounded or missing. A blob is zstd
over MessagePack, with per-token values in float16. What exceeds `EvidenceLimits` is cut from the end of each
completion.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
import zstandard
from msgspec import Meta

from coordinator.errors import StorageFault
from node.protocol import turns
from node.protocol.evidence import sketch_value
from node.protocol.submission import Rollout, chunk_sizes

if TYPE_CHECKING:
    from node.verification.deviations import Deviations

MAX_BLOB_BYTES: Final = 1024 * 1024
MAX_DECODED_BYTES: Final = 16 * 1024 * 1024
MAX_PIECE_CHARACTERS: Final = 64
MAX_PROMPT_CHARACTERS: Final = 20_000
MAX_REPLY_CHARACTERS: Final = 500
MAX_CHUNKS: Final = 8192
MAX_SEGMENTS: Final = 64
MAX_ID: Final = 2**32 - 1
MAX_HALF: Final = 65504.0
_LEVEL: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLimits:
    """Limits of one submission's evidence: tokens of all completions together (0: keep none), and bytes of the blob."""

    tokens: int = 16_384
    bytes: int = 256 * 1024


DEFAULT_EVIDENCE_LIMITS = EvidenceLimits()


class ChunkEvidence(msgspec.Struct, frozen=True, array_like=True):
    """The distances of one proof chunk, `tokens` tokens from `start` on; None if the run's proofs lack the kind."""

    start: int
    tokens: int
    exponent_mismatches: float | None = None
    mantissa_mean: float | None = None
    mantissa_median: float | None = None
    sketch_distance: float | None = None


class RowEvidence(msgspec.Struct, frozen=True):
    """One completion of `tokens` tokens, of which the first len(pieces) are kept.

    `ids` (uint32) and `pieces` (text) are per token, and so, if the row was measured, `margins` and `errors` of the
    log-probability (float16); `chunks` are its proofs. Otherwise these three are empty. `segments` are (version,
    tokens); `replies` the environment's, (completion tokens before it, truncated text).
    """

    tokens: int
    ids: bytes
    pieces: list[str]
    margins: bytes
    errors: bytes
    chunks: list[ChunkEvidence]
    segments: list[tuple[int, int]]
    replies: Annotated[list[tuple[int, str]], Meta(max_length=128)] = []

    @property
    def is_measured(self) -> bool:
        return bool(self.margins)


class Evidence(msgspec.Struct, frozen=True, tag_field="v", tag=1):
    """The evidence of one submission; `prompt` is the text of its `prompt_tokens` tokens, truncated."""

    prompt: str
    prompt_tokens: int
    rows: Annotated[list[RowEvidence], Meta(max_length=1024)]


def encode_evidence(
    rollouts: Sequence[Rollout],
    deviations: Mapping[int, Deviations] | None,
    *,
    prompt: str,
    pieces: Sequence[Sequence[str]],
    replies: Sequence[Sequence[tuple[int, str]]] = (),
    chunk_tokens: int,
    limits: EvidenceLimits = DEFAULT_EVIDENCE_LIMITS,
) -> bytes | None:
    """Encode a blob within `limits`, or return None if they keep nothing.

    `deviations` are the measurements by row, `pieces` each completion's tokens as text (at least those kept), and
    `replies` the environment's replies in each completion, () if unknown.
    """
    tokens = limits.tokens
    while tokens >= len(rollouts) > 0:
        most = tokens // len(rollouts)
        rows = [
            _row(
                rollout,
                (deviations or {}).get(row),
                own,
                replies[row] if replies else (),
                most=most,
                chunk_tokens=chunk_tokens,
                rows=len(rollouts),
            )
            for row, (rollout, own) in enumerate(zip(rollouts, pieces, strict=True))
        ]
        evidence = Evidence(prompt=prompt[:MAX_PROMPT_CHARACTERS], prompt_tokens=len(rollouts[0].prompt_ids), rows=rows)
        blob = zstandard.compress(msgspec.msgpack.encode(evidence), _LEVEL)
        if len(blob) <= min(limits.bytes, MAX_BLOB_BYTES):
            return blob
        tokens //= 2
    return None


def kept_tokens(limits: EvidenceLimits, *, rows: int) -> int:
    """Return how many tokens are kept at most of each of `rows` completions."""
    return limits.tokens // max(1, rows)


def decode_evidence(blob: bytes) -> Evidence:
    """Decode a blob of `encode_evidence` within bounded memory; raises StorageFault."""
    if len(blob) > MAX_BLOB_BYTES:
        raise StorageFault(f"evidence exceeds {MAX_BLOB_BYTES} bytes")
    try:
        data = zstandard.ZstdDecompressor().decompress(blob, max_output_size=MAX_DECODED_BYTES)
        return msgspec.msgpack.decode(data, type=Evidence)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageFault("evidence cannot be read") from error


def halves(data: bytes) -> list[float]:
    """Unpack float16 values, as in `RowEvidence.margins`."""
    return list(struct.unpack(f"<{len(data) // 2}e", data[: len(data) // 2 * 2]))


def token_ids(data: bytes) -> list[int]:
    """Unpack `RowEvidence.ids`."""
    return list(struct.unpack(f"<{len(data) // 4}I", data[: len(data) // 4 * 4]))


def _row(
    rollout: Rollout,
    measured: Deviations | None,
    pieces: Sequence[str],
    replies: Sequence[tuple[int, str]],
    *,
    most: int,
    chunk_tokens: int,
    rows: int,
) -> RowEvidence:
    kept = min(most, len(pieces), len(rollout.completion_ids))
    return RowEvidence(
        tokens=len(rollout.completion_ids),
        ids=_ids(rollout.completion_ids[:kept]),
        pieces=[piece[:MAX_PIECE_CHARACTERS] for piece in pieces[:kept]],
        margins=b"" if measured is None else _halves(measured.margins[:kept]),
        errors=b"" if measured is None else _halves(measured.errors[:kept]),
        chunks=[] if measured is None else _chunks(rollout, measured, replies, chunk_tokens)[: MAX_CHUNKS // rows],
        # Unvalidated in a rejected submission, so their lengths may differ.
        segments=list(zip(rollout.segment_versions, rollout.segment_tokens, strict=False))[:MAX_SEGMENTS],
        replies=[(before, said[:MAX_REPLY_CHARACTERS]) for before, said in replies if before < kept],
    )


def _ids(values: Sequence[int]) -> bytes:
    # What `clip` does; that looks up the limits of the type at each call, which takes longer than all else here.
    ids: bytes = np.minimum(np.maximum(np.array(values, np.int64), 0), MAX_ID).astype("<u4").tobytes()
    return ids


def _halves(values: Sequence[float]) -> bytes:
    numbers = np.array(values, np.float64)
    # Values beyond float16 exceed every limit.
    return np.where(np.abs(numbers) <= MAX_HALF, numbers, math.inf).astype("<f2").tobytes()


def _chunks(
    rollout: Rollout, measured: Deviations, replies: Sequence[tuple[int, str]], chunk_tokens: int
) -> list[ChunkEvidence]:
    found, start = [], 0
    cut = turns.pieces(rollout.segment_tokens, [(before, ()) for before, _ in replies])
    for index, size in enumerate(chunk_sizes(cut, chunk_tokens=chunk_tokens)):
        sketches = measured.sketch_distances[start : start + size]
        found.append(
            ChunkEvidence(
                start=start,
                tokens=size,
                exponent_mismatches=_at(measured.exponent_mismatches, index),
                mantissa_mean=_at(measured.mantissa_means, index),
                mantissa_median=_at(measured.mantissa_medians, index),
                sketch_distance=_typical(sketches) if sketches else None,
            )
        )
        start += size
    return found


def _typical(distances: Sequence[float]) -> float:
    """Return the typical sketch distance of one chunk, as `Figures.sketch_distance` is of a row."""
    return math.exp(sum(map(sketch_value, distances)) / len(distances))


def _at(values: Sequence[float], index: int) -> float | None:
    return float(values[index]) if index < len(values) else None
