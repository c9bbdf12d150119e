"""A slot's submission as a Parquet file (docs/protocol.md, section 6): the schema, and how a worker writes it.

Reading such a file from a stranger is another matter: see `node.parquet_reader`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:  # the child process that parses strangers' files imports this module and little else
    from node.protocol.submission import Rollout

SEED_BYTES = 16
METADATA = {"veriswarm": "rollouts/2"}
"""The file's whole key-value metadata: what it is, and the version of its rules."""


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_required("element", kind))


SCHEMA = pa.schema(
    [
        _required("sample", pa.int32()),
        _required("seed", pa.binary(SEED_BYTES)),
        _required("prompt_ids", _list_of(pa.int32())),
        _required("completion_ids", _list_of(pa.int32())),
        _required("logprobs", _list_of(pa.float32())),
        _required("segment_versions", _list_of(pa.int64())),
        _required("segment_tokens", _list_of(pa.int32())),
        _required("proofs", _list_of(pa.binary())),
    ]
)
"""One row per completion, in sample order 0 .. group_size - 1. Nothing may be null."""


def write_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """The submission of one slot: `rollouts` in sample order, as one row group, compressed with zstd.

    Raises pyarrow.ArrowInvalid (a ValueError) for values that the schema cannot hold.
    """
    return write_columns(
        {
            "sample": list(range(len(rollouts))),
            "seed": [rollout.seed for rollout in rollouts],
            "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts],
            "segment_versions": [rollout.segment_versions for rollout in rollouts],
            "segment_tokens": [rollout.segment_tokens for rollout in rollouts],
            "proofs": [rollout.proofs for rollout in rollouts],
        }
    )


def write_columns(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """As `write_rollouts`, from the values of each column."""
    sink = pa.BufferOutputStream()
    # Without store_schema the file describes itself by its Parquet schema alone, so a reader has no second,
    # embedded description to parse or to believe.
    # Statistics and dictionaries take more room than they save in so few rows.
    with pq.ParquetWriter(
        sink, SCHEMA, compression="zstd", store_schema=False, write_statistics=False, use_dictionary=False
    ) as writer:
        writer.write_table(pa.table(dict(columns), schema=SCHEMA))
        writer.add_key_value_metadata(METADATA)
    body: bytes = sink.getvalue().to_pybytes()
    return body
