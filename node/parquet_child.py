"""The process that parses strangers' Parquet files: `python -m node.parquet_child ADDRESS_SPACE_BYTES CPU_SECONDS`.

It holds no secret, opens no file, and answers on its standard output (see `node.parquet_frames`). Its address
space, processor time per file and file descriptors are limited before it reads the first byte. Everything
that can be checked from a file's metadata is checked before any data is decoded; metadata can lie, and then
the limits end the process, not the machine. A parser bug that yields control of this process yields the
submissions that pass through it, and nothing else of the verifier.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from itertools import pairwise
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from node.parquet import METADATA, SCHEMA, SEED_BYTES, write_columns
from node.parquet_footer import Levels, check_columns
from node.parquet_frames import MAX_DETAIL, READY, Answer, Shape, receive_frame, send_frame
from node.protocol.reasons import Reason, Refusal


class _WithoutPandas:
    """Where pandas is installed, pyarrow imports it: a second, and more address space than a parser is granted."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)


if __name__ == "__main__":
    sys.meta_path.insert(0, _WithoutPandas)

MAGIC = b"PAR1"
MIN_FILE_BYTES = 12
MAX_FOOTER_BYTES = 64 * 1024
MAX_THRIFT_ITEMS = 16 * 1024
MAX_FILE_DESCRIPTORS = 16
MAX_BODY_BYTES = 2**31 - 1
MAX_SHAPE_BYTES = 1024
PAGE_SLACK_BYTES = 64 * 1024

_EXPECTED_METADATA = {key.encode(): value.encode() for key, value in METADATA.items()}
_SAMPLE = write_columns(
    {
        "sample": [0],
        "seed": [bytes(SEED_BYTES)],
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3]],
        "logprobs": [[-1.0]],
        "segment_versions": [[0]],
        "segment_tokens": [[1]],
        "proofs": [[b"proof"]],
    }
)
_SAMPLE_SHAPE = Shape(rows=1, prompt_tokens=2, completion_tokens=1, segments=1, proofs=1, proof_bytes=5)
_EXPECTED_COLUMNS = pq.read_metadata(pa.BufferReader(_SAMPLE)).schema
_EXPECTED_LEAVES = [_EXPECTED_COLUMNS.column(index) for index in range(len(_EXPECTED_COLUMNS.names))]
_EXPECTED_PATHS = [leaf.path for leaf in _EXPECTED_LEAVES]
_EXPECTED_LEVELS = [
    Levels(leaf.max_repetition_level, leaf.max_definition_level, leaf.physical_type == "BYTE_ARRAY")
    for leaf in _EXPECTED_LEAVES
]


def parse(body: bytes, *, shape: Shape) -> list[dict[str, Any]]:
    """The rows of `body` as dictionaries with the fields of a Rollout; raise Refusal."""
    footer = _check_frame(body)
    try:
        # Pre-buffering and threads would read ahead of the checks below, and outside of this thread.
        file = pq.ParquetFile(
            pa.BufferReader(body),
            pre_buffer=False,
            arrow_extensions_enabled=False,
            thrift_string_size_limit=MAX_FOOTER_BYTES,
            thrift_container_size_limit=MAX_THRIFT_ITEMS,
        )
        _check_metadata(file, shape=shape)
        check_columns(footer, levels=_EXPECTED_LEVELS)
        _check_columns(file.metadata.row_group(0), shape=shape)
        table = file.read(use_threads=False)
        table.validate(full=True)
        return _rows(table, shape=shape)
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        # The message may quote the file; the type may not.
        raise Refusal(Reason.NOT_PARQUET, f"Reading it ends in {type(error).__name__}.") from error


def _check_frame(body: bytes) -> bytes:
    """Magic at both ends, and a footer that is present and small, which is returned."""
    if len(body) < MIN_FILE_BYTES or body[:4] != MAGIC or body[-4:] != MAGIC:
        raise Refusal(Reason.NOT_PARQUET, f"{len(body)} bytes that do not begin and end with PAR1.")
    footer_bytes = int.from_bytes(body[-8:-4], "little")
    if footer_bytes > min(MAX_FOOTER_BYTES, len(body) - MIN_FILE_BYTES):
        raise Refusal(Reason.NOT_PARQUET, f"A footer of {footer_bytes} bytes in a file of {len(body)}.")
    return body[-8 - footer_bytes : -8]


def _check_metadata(file: pq.ParquetFile, *, shape: Shape) -> None:
    """Everything that the footer says about the file, before any page of it is looked at."""
    metadata = file.metadata
    schema = metadata.schema
    paths = [schema.column(index).path for index in range(len(schema.names))]
    # Parquet's own comparison sees physical types and repetition but only the leaves' names; Arrow's sees the
    # whole tree. Neither alone is enough.
    same = paths == _EXPECTED_PATHS and schema.equals(_EXPECTED_COLUMNS)
    if not same or not file.schema_arrow.equals(SCHEMA, check_metadata=False):
        raise Refusal(Reason.WRONG_SCHEMA, f"It has {len(paths)} columns, not exactly those of section 6.")
    if metadata.metadata != _EXPECTED_METADATA:
        raise Refusal(Reason.WRONG_SCHEMA, "Its key-value metadata is not exactly veriswarm = rollouts/2.")
    if metadata.num_rows != shape.rows:
        raise Refusal(Reason.WRONG_GROUP_SIZE, f"{metadata.num_rows} rows where {shape.rows} were leased.")
    if metadata.num_row_groups != 1:
        raise Refusal(Reason.NOT_PARQUET, f"It has {metadata.num_row_groups} row groups; write one.")


def _check_columns(group: pq.RowGroupMetaData, *, shape: Shape) -> None:
    if group.num_rows != shape.rows:
        raise Refusal(Reason.NOT_PARQUET, f"{group.num_rows} rows in a group of {shape.rows}.")
    for index, items in enumerate(_items_per_row(shape)):
        column = group.column(index)
        # An empty list still takes one entry.
        most = shape.rows * max(1, items)
        if not 0 <= column.num_values <= most:
            raise Refusal(Reason.NOT_PARQUET, f"Column {index} has {column.num_values} values; at most {most} fit.")
        room = most * (16 + shape.proof_bytes) + PAGE_SLACK_BYTES
        if not 0 <= column.total_uncompressed_size <= room:
            raise Refusal(Reason.NOT_PARQUET, f"Column {index} declares {column.total_uncompressed_size} bytes.")


def _items_per_row(shape: Shape) -> tuple[int, ...]:
    """The bound on each column's items per row, in column order."""
    tokens, segments = shape.completion_tokens, shape.segments
    return (1, 1, shape.prompt_tokens, tokens, tokens, segments, segments, shape.proofs)


def _rows(table: pa.Table, *, shape: Shape) -> list[dict[str, Any]]:
    """Python values of a table whose metadata was right; what was declared is checked against what came."""
    if table.num_rows != shape.rows:
        raise Refusal(Reason.NOT_PARQUET, f"{table.num_rows} rows came out of {shape.rows}.")
    samples = table.column("sample").to_pylist()
    if samples != list(range(shape.rows)):
        raise Refusal(Reason.WRONG_GROUP_SIZE, "The rows are not samples 0, 1, 2, … in order.")
    lists = {
        name: _lists(table.column(name), name=name, most=most)
        for name, most in zip(SCHEMA.names[2:], _items_per_row(shape)[2:], strict=True)
    }
    if any(len(proof) > shape.proof_bytes for proofs in lists["proofs"] for proof in proofs):
        raise Refusal(Reason.NOT_PARQUET, f"A proof has more than {shape.proof_bytes} bytes.")
    seeds = table.column("seed").to_pylist()
    return [{"seed": seed, **{name: values[row] for name, values in lists.items()}} for row, seed in enumerate(seeds)]


def _lists(column: pa.ChunkedArray, *, name: str, most: int) -> list[list[Any]]:
    """A column of lists as Python lists of at most `most` items; fails before it makes longer ones."""
    lists: list[list[Any]] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_pylist()
        if any(end - start > most for start, end in pairwise(offsets)):
            raise Refusal(Reason.NOT_PARQUET, f"A list in {name} is longer than {most}.")
        binary = pa.types.is_binary(chunk.values.type)
        values = chunk.values.to_pylist() if binary else chunk.values.to_numpy().tolist()
        lists.extend(values[start:end] for start, end in pairwise(offsets))
    return lists


def limit_process(*, address_space_bytes: int) -> None:
    """Give up what parsing does not need, for good."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; its end closes our input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILE_DESCRIPTORS, MAX_FILE_DESCRIPTORS))
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes, address_space_bytes))


def grant_cpu(seconds: int) -> None:
    """Allow `seconds` of processor time from now; SIGXCPU ends the process after that."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def serve(requests: IO[bytes], answers: IO[bytes], *, cpu_seconds: int) -> None:
    """Answer until the requests end."""
    decode_shape = msgspec.msgpack.Decoder(Shape).decode
    encode = msgspec.msgpack.Encoder().encode
    send_frame(answers, READY)
    while True:
        try:
            shape = decode_shape(receive_frame(requests, max_bytes=MAX_SHAPE_BYTES))
        except EOFError:
            return
        body = receive_frame(requests, max_bytes=MAX_BODY_BYTES)
        grant_cpu(cpu_seconds)
        try:
            answer: Answer[dict[str, Any]] = Answer(rows=parse(body, shape=shape))
        except Refusal as refusal:
            answer = Answer(rows=[], reason=refusal.reason, detail=refusal.detail[:MAX_DETAIL])
        send_frame(answers, encode(answer))


def main() -> None:
    """Take the limits from the command line, and serve on standard input and output.

    A file known to be good is read first: limits under which not even that works must show at the start, as
    this machine's failure, and not later as a fault of somebody's file.
    """
    address_space_bytes, cpu_seconds = (int(argument) for argument in sys.argv[1:3])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    limit_process(address_space_bytes=address_space_bytes)
    parse(_SAMPLE, shape=_SAMPLE_SHAPE)
    serve(sys.stdin.buffer, answers, cpu_seconds=cpu_seconds)


if __name__ == "__main__":
    main()
