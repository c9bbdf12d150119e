"""Write a slot's submission: one zstd frame of MessagePack (docs/protocol.md, section 6.1).

Reading such a file from a stranger is `node.submission.reader`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import zstandard
from msgspec import Meta

from node.protocol.run import RunSpec
from node.protocol.submission import Rollout, chunk_count, proof_bytes

FORMAT: Final = "swarmproof/rollouts/3"
"""Format tag and version of the file."""
SEED_BYTES: Final = 16
_ROW_BYTES: Final = 160
"""A row's seed, names, types and lengths, those of its proofs aside."""
_FILE_BYTES: Final = 64
"""Around all rows, and of the frame around the content."""
_LEVEL: Final = 1  # proofs and log-probabilities are noise: higher levels take longer and save less than 1 %


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Rollout on the wire: arrays of little-endian items.

    Token ids and lengths are int32, log-probabilities float32, versions int64.
    """

    seed: Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
    prompt_ids: bytes
    completion_ids: bytes
    logprobs: bytes
    segment_versions: bytes
    segment_tokens: bytes
    proofs: list[bytes]


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag=FORMAT):
    """The content of a submission's file: the rows of one slot, in sample order."""

    rows: list[Row]


def write_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """Return the submission of one slot: `rollouts` in sample order.

    Raises struct.error or OverflowError for numbers that do not fit their type.
    """
    return compress(msgspec.msgpack.encode(Submission([_row(rollout) for rollout in rollouts])))


def compress(content: bytes) -> bytes:
    """Return `content` as the one zstd frame that section 6.1 allows: with its size, without checksum or dictionary."""
    compressor = zstandard.ZstdCompressor(
        level=_LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    return compressor.compress(content)


def full_group_bytes(spec: RunSpec) -> int:
    """Return the most bytes that a group of honest work takes, each completion as long as the run allows.

    Nothing is assumed to compress: proofs and log-probabilities do not, and how far ids do depends on the vocabulary.
    """
    sampling = spec.sampling
    tokens, segments = sampling.max_new_tokens, sampling.max_version_lead + 1
    proofs = chunk_count([tokens], chunk_tokens=spec.proofs.chunk_tokens) + spec.most_pieces - 1
    proofs = min(proofs, tokens)  # a chunk has a token
    row = 4 * sampling.max_prompt_tokens + 8 * tokens + 12 * segments + _ROW_BYTES
    # A sketch is as long as its tokens; the rest of a proof is as long for one token as for a whole chunk.
    row += 5 * proofs + proof_bytes(spec.proofs, tokens=tokens) + (proofs - 1) * proof_bytes(spec.proofs, tokens=0)
    content = sampling.group_size * row + _FILE_BYTES
    return content + content // 256 + _FILE_BYTES


def _row(rollout: Rollout) -> Row:
    return Row(
        seed=rollout.seed,
        prompt_ids=_packed("i", rollout.prompt_ids),
        completion_ids=_packed("i", rollout.completion_ids),
        logprobs=_packed("f", rollout.logprobs),
        segment_versions=_packed("q", rollout.segment_versions),
        segment_tokens=_packed("i", rollout.segment_tokens),
        proofs=rollout.proofs,
    )


def _packed(kind: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)
