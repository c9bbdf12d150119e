"""What a verifier saw in a submission, kept beside its verdict: for people who want to know why.

Nothing follows from it. An auditor measures again, and training has its groups; so it may be bounded, rounded and
missing. A blob is zstd over MessagePack, with numbers of each token in float16. What does not fit `EvidenceLimits` is
left out from the end of each completion, and the page says how much that is.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
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
    """How much is kept of one submission: tokens of all its completions together, and bytes of the blob.

    0 tokens keep nothing at all.
    """

    tokens: int = 16_384
    bytes: int = 256 * 1024


DEFAULT_EVIDENCE_LIMITS = EvidenceLimits()


class ChunkEvidence(msgspec.Struct, frozen=True, array_like=True):
    """One proof chunk of `tokens` tokens from `start` on: its distances, null where the run's scheme has no such."""

    start: int
    tokens: int
    exponent_mismatches: float | None = None
    mantissa_mean: float | None = None
    mantissa_median: float | None = None
    sketch_distance: float | None = None


class RowEvidence(msgspec.Struct, frozen=True):
    """One completion of `tokens` tokens, of which the first len(pieces) are kept.

    `ids` are their numbers (uint32), `pieces` their text. Of a row that was measured `margins` and `errors`, float16,
    say by how much each token lost against the forced one and by how much its log-probability differs, and `chunks`
    are its proofs; of others all three are empty. `segments` are (version, tokens). `replies` are what the environment
    said, (completion tokens before it, text), cut if it is long.
    """

    tokens: int
    ids: bytes
    pieces: list[str]
    margins: bytes
    errors: bytes
    chunks: list[ChunkEvidence]
    segments: list[tuple[int, int]]
    replies: Annotated[list[tuple[int, str]], Meta(max_length=64)] = []

    @property
    def is_measured(self) -> bool:
        return bool(self.margins)


class Evidence(msgspec.Struct, frozen=True, tag_field="v", tag=1):
    """What is kept of one submission; `prompt` is the text of its `prompt_tokens` first tokens, cut if it is long."""

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
    """The blob, or None if nothing is to be kept. `pieces` are each completion's tokens as text, as many as there are
    or as will be kept; `replies` what the environment said in each, () if nothing is known of that; `deviations` what
    was measured, by row."""
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
    """How many tokens of each of `rows` completions are kept at most."""
    return limits.tokens // max(1, rows)


def decode_evidence(blob: bytes) -> Evidence:
    """What `encode_evidence` wrote. Raises StorageFault for anything else, before it takes more memory than allowed."""
    if len(blob) > MAX_BLOB_BYTES:
        raise StorageFault("evidence is larger than any that was written")
    try:
        data = zstandard.ZstdDecompressor().decompress(blob, max_output_size=MAX_DECODED_BYTES)
        return msgspec.msgpack.decode(data, type=Evidence)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageFault("evidence cannot be read") from error


def halves(data: bytes) -> list[float]:
    """The values of a column of `RowEvidence`."""
    return list(struct.unpack(f"<{len(data) // 2}e", data[: len(data) // 2 * 2]))


def token_ids(data: bytes) -> list[int]:
    """The values of `RowEvidence.ids`."""
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
        ids=struct.pack(f"<{kept}I", *(max(0, min(token, MAX_ID)) for token in rollout.completion_ids[:kept])),
        pieces=[piece[:MAX_PIECE_CHARACTERS] for piece in pieces[:kept]],
        margins=b"" if measured is None else _halves(measured.margins[:kept]),
        errors=b"" if measured is None else _halves(measured.errors[:kept]),
        chunks=[] if measured is None else _chunks(rollout, measured, replies, chunk_tokens)[: MAX_CHUNKS // rows],
        # Of a submission that was refused they may be anything.
        segments=list(zip(rollout.segment_versions, rollout.segment_tokens, strict=False))[:MAX_SEGMENTS],
        replies=[(before, said[:MAX_REPLY_CHARACTERS]) for before, said in replies if before < kept],
    )


def _halves(values: Sequence[float]) -> bytes:
    # What float16 does not hold is infinite, and beyond every limit.
    return struct.pack(f"<{len(values)}e", *(value if abs(value) <= MAX_HALF else math.inf for value in values))


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
    """As `Figures.sketch_distance`, of one chunk."""
    return math.exp(sum(map(sketch_value, distances)) / len(distances))


def _at(values: Sequence[float], index: int) -> float | None:
    return float(values[index]) if index < len(values) else None
