"""Submission files: parsed here as the child process does it, under its limits, and through the reader and its child.

This module must not import torch: the child's limit of address space is in force.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzzing import thrift
from benchmarks.fuzzing.mutation import MAX_INPUT_BYTES, bytes_mutator, mixed, scramble
from benchmarks.fuzzing.target import Harness, Mutator, Target
from benchmarks.fuzzing.trees import edit_values
from node.parquet import METADATA, SCHEMA, write_rollouts
from node.parquet_child import limit_process, parse
from node.parquet_footer import Levels, check_columns
from node.parquet_frames import Shape
from node.parquet_reader import ChildLimits, ParquetReader
from node.protocol.reasons import Refusal
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout

ROWS = 3
SPEC = RunSpec(
    name="fuzz",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=ROWS, max_prompt_tokens=16, max_new_tokens=32, max_version_lead=1),
)
SHAPE = Shape(rows=ROWS, prompt_tokens=48, completion_tokens=80, segments=20, proofs=20, proof_bytes=532)
ROOM_BYTES = 64 * 1024 * 1024
GROUP = [
    Rollout(
        seed=bytes([row]) * 16,
        prompt_ids=[5, 6, 7],
        completion_ids=list(range(8 + row)),
        logprobs=[-1.5] * (8 + row),
        segment_versions=[3, 4],
        segment_tokens=[5, 3 + row],
        proofs=[bytes(range(256)) + b"\x00\x01", bytes(258)],
    )
    for row in range(ROWS)
]
COLUMNS: dict[str, Any] = {"sample": list(range(ROWS))} | {
    name: [getattr(rollout, name) for rollout in GROUP] for name in SCHEMA.names[1:]
}

# Ids of Parquet's Thrift fields (parquet.thrift): of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
ROW_GROUPS, CHUNKS, META_DATA, COMPRESSED_SIZE, DATA_PAGE_OFFSET = 4, 1, 3, 7, 9

_DELTA = dict.fromkeys(("sample", "prompt_ids.list.element", "completion_ids.list.element"), "DELTA_BINARY_PACKED")
_BYTES = {"seed": "DELTA_BYTE_ARRAY", "proofs.list.element": "DELTA_BYTE_ARRAY"}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"compression": "none"},
    {"compression": "none", "data_page_version": "2.0"},
    {"compression": "snappy", "use_dictionary": True},
    {"compression": "zstd", "use_dictionary": True, "data_page_version": "2.0"},
    {"compression": "none", "column_encoding": _DELTA | _BYTES},
    {"compression": "none", "column_encoding": _DELTA | _BYTES | {"proofs.list.element": "DELTA_LENGTH_BYTE_ARRAY"}},
    {"compression": "none", "column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"}},
    {"compression": "none", "write_page_checksum": True, "write_page_index": True},
    {"compression": "none", "data_page_size": 1, "write_batch_size": 1},
)
REFUSED_OPTIONS: tuple[dict[str, Any], ...] = ({"compression": "gzip"}, {"compression": "lz4"}, {"store_schema": True})


def written(columns: dict[str, Any], **options: Any) -> bytes:
    """A file with these columns, written as an honest worker does but for `options`."""
    sink = pa.BufferOutputStream()
    settings = {"compression": "zstd", "store_schema": False, "write_statistics": False, "use_dictionary": False}
    with pq.ParquetWriter(sink, SCHEMA, **settings | options) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
        writer.add_key_value_metadata(METADATA)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def bomb() -> bytes:
    """Few bytes that are many zeros: for a footer that says otherwise."""
    return written(COLUMNS | {"completion_ids": [[0] * 1_000_000] * ROWS})


# Mutations that leave the file readable up to what they change.


def split_file(data: bytes) -> tuple[bytes, list[Any]] | None:
    """Everything before the footer, and the footer; None where there is none."""
    size = int.from_bytes(data[-8:-4], "little")
    if size > len(data) - 12:
        return None
    try:
        footer, _ = thrift.decode(data[len(data) - 8 - size : -8])
    except (IndexError, ValueError, RecursionError):
        return None
    return data[: len(data) - 8 - size], footer


def join_file(front: bytes, footer: bytes) -> bytes:
    return front + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _footer(rng: Random, data: bytes) -> bytes:
    parts = split_file(data)
    if parts is None:
        return scramble(rng, data)
    front, footer = parts
    thrift.edit(rng, footer)
    return join_file(front, thrift.encode(footer))


def _footer_bytes(rng: Random, data: bytes) -> bytes:
    parts = split_file(data)
    return scramble(rng, data) if parts is None else join_file(parts[0], scramble(rng, thrift.encode(parts[1])))


def _pages(rng: Random, data: bytes) -> bytes:
    """One column's first page header or data changed, and the footer made to fit again."""
    parts = split_file(data)
    if parts is None:
        return scramble(rng, data)
    try:
        return _changed_page(rng, *parts)
    except (IndexError, ValueError, TypeError, RecursionError):
        return scramble(rng, data)  # an earlier change left a tree that is no footer


def _changed_page(rng: Random, front: bytes, footer: list[Any]) -> bytes:
    metadata = column_metadata(footer)
    chosen = rng.choice(metadata)
    start = thrift.field(chosen, DATA_PAGE_OFFSET)[2]  # type: ignore[index]
    header, end = thrift.decode(front, start)
    size = thrift.field(chosen, COMPRESSED_SIZE)
    stop = start + size[2] if size is not None else len(front)
    page = front[end:stop]
    if rng.random() < 0.5:
        thrift.edit(rng, header)
    else:
        page = scramble(rng, page)
    replaced = thrift.encode(header) + page
    _shift(metadata, after=start, by=len(replaced) - (stop - start))
    if size is not None and rng.random() < 0.8:
        size[2] = len(replaced)
    return join_file(front[:start] + replaced + front[stop:], thrift.encode(footer))


def column_metadata(footer: list[Any]) -> list[list[Any]]:
    """The ColumnMetaData of each column of the first row group. Raises TypeError or IndexError without one."""
    group = thrift.field(footer, ROW_GROUPS)[2][1][0]  # type: ignore[index]
    chunks = thrift.field(group, CHUNKS)[2][1]  # type: ignore[index]
    return [thrift.field(chunk, META_DATA)[2] for chunk in chunks]  # type: ignore[index]


def _shift(metadata: list[list[Any]], *, after: int, by: int) -> None:
    """Move the pages of later columns."""
    for column in metadata:
        offset = thrift.field(column, DATA_PAGE_OFFSET)
        if offset is not None and offset[2] > after:
            offset[2] += by


def _values(rng: Random, _corpus: Sequence[bytes]) -> bytes:
    """A well-formed file of other values: longer lists, other numbers, other bytes."""
    columns = edit_values(rng, COLUMNS)
    try:
        return written(columns, **rng.choice((*OPTIONS, {})))[:MAX_INPUT_BYTES]
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, OverflowError, AttributeError):
        return scramble(rng, write_rollouts(GROUP))


def _of_one(change: Any) -> Mutator:
    return lambda rng, corpus: change(rng, rng.choice(corpus))[:MAX_INPUT_BYTES]


MUTATE = mixed(
    (4, _of_one(_footer)), (1, _of_one(_footer_bytes)), (4, _of_one(_pages)), (2, _values), (1, bytes_mutator(b"PAR1"))
)


def _hostile() -> list[bytes]:
    metadata = write_rollouts(GROUP).replace(b"rollouts/2", b"rollouts/1")
    return [*(written(COLUMNS, **options) for options in REFUSED_OPTIONS), bomb(), metadata]


def _seeds() -> list[bytes]:
    return [write_rollouts(GROUP), *(written(COLUMNS, **options) for options in OPTIONS)]


def _footer_alone(_: ExitStack) -> Harness:
    """What Python reads of a footer before the library describes it."""
    flat, of_lists, proofs = Levels(0, 0, is_bytes=False), Levels(1, 1, is_bytes=False), Levels(1, 1, is_bytes=True)

    def run(data: bytes) -> None:
        check_columns(data, levels=[flat, flat, *[of_lists] * 5, proofs])

    def change(rng: Random, data: bytes) -> bytes:
        try:
            fields, _ = thrift.decode(data)
        except (IndexError, ValueError, RecursionError):
            return scramble(rng, data)
        thrift.edit(rng, fields)
        return thrift.encode(fields)

    seeds = [thrift.encode(parts[1]) for parts in map(split_file, _seeds()) if parts is not None]
    nested = b"\x19\x19" * 2000
    mutate = mixed((2, _of_one(change)), (1, bytes_mutator(nested, b"\xff" * 10, b"\x1c" * 50, b"\xf9\xff\xff\x7f")))
    return Harness(seeds, run, (Refusal,), mutate)


def _file(_: ExitStack) -> Harness:
    """What the child process does with a file."""

    def limit() -> None:
        room = ChildLimits().address_space_bytes + 16 * SPEC.limits.max_submission_bytes
        limit_process(address_space_bytes=room)

    def run(data: bytes) -> int:
        rows = parse(data, shape=SHAPE)
        rollouts = msgspec.convert(rows, list[Rollout])
        assert len(rollouts) == ROWS
        again = msgspec.convert(parse(write_rollouts(rollouts), shape=SHAPE), list[Rollout])
        # As MessagePack, in which a NaN equals itself.
        assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(rollouts), "it is written as other values"
        return sum(len(rollout.completion_ids) for rollout in rollouts)

    return Harness(_seeds(), run, (Refusal,), MUTATE, hostile=_hostile(), limit=limit)


def _reader(stack: ExitStack) -> Harness:
    """The verifier's way to a file. VerifierFailed would leave a hostile submission without a verdict."""
    reader = stack.enter_context(ParquetReader())

    def run(data: bytes) -> None:
        assert len(reader.read(data, spec=SPEC)) == ROWS

    return Harness(_seeds(), run, (Refusal,), MUTATE, hostile=_hostile())


# In the child its own limits are the budget: 4 s of processor time and 1 GiB.
TARGETS = (
    Target(name="parquet.footer", sender="any key, to the verifier", share=60, prepare=_footer_alone),
    Target(
        name="parquet.file",
        sender="any key, to the verifier",
        share=120,
        prepare=_file,
        cpu_ms=4000.0,
        memory_mib=1024,
        hang_seconds=4.0,
    ),
    Target(name="parquet.reader", sender="any key, to the verifier", share=25, prepare=_reader, hang_seconds=3.0),
)
