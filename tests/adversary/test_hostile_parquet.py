"""Submission files made to crash, stall, exhaust or deceive the verifier.

Whatever arrives, the reader returns rollouts or a Refusal, in bounded time and memory, and reads the next file.
"""

from __future__ import annotations

import io
import os
import random
import struct
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from node.parquet import METADATA, SCHEMA, write_columns, write_rollouts
from node.parquet_reader import ParquetReader
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout

ROWS = 4
SPEC = RunSpec(
    name="hostile",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=ROWS, max_prompt_tokens=16, max_new_tokens=48),
)
GROUP = [
    Rollout(
        seed=bytes([row]) * 16,
        prompt_ids=[5, 6, 7],
        completion_ids=list(range(10 + row)),
        logprobs=[-1.5] * (10 + row),
        segment_versions=[3],
        segment_tokens=[10 + row],
        proofs=[bytes(range(256)) + b"\x00\x01"],
    )
    for row in range(ROWS)
]
VALID = write_rollouts(GROUP)
MAX_SECONDS = 20.0
MAX_CHILD_BYTES = 1200 * 1024 * 1024

Columns = dict[str, Any]


@pytest.fixture(scope="module")
def reader() -> Iterator[ParquetReader]:
    with ParquetReader() as reader:
        yield reader


def refusal_of(reader: ParquetReader, body: bytes) -> Refusal:
    """The refusal of `body`; also: it came soon, the child stayed small, and the next honest file is read."""
    began = time.monotonic()
    with pytest.raises(Refusal) as caught:
        reader.read(body, spec=SPEC)
    assert time.monotonic() - began < MAX_SECONDS
    assert reader.read(VALID, spec=SPEC) == GROUP
    assert peak_bytes(reader) < MAX_CHILD_BYTES
    assert len(caught.value.detail) <= 200
    return caught.value


def peak_bytes(reader: ParquetReader) -> int:
    assert reader._child is not None
    status = Path(f"/proc/{reader._child.pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmPeak")))


def columns_of(group: list[Rollout]) -> Columns:
    return {
        "sample": list(range(len(group))),
        "seed": [one.seed for one in group],
        "prompt_ids": [one.prompt_ids for one in group],
        "completion_ids": [one.completion_ids for one in group],
        "logprobs": [one.logprobs for one in group],
        "segment_versions": [one.segment_versions for one in group],
        "segment_tokens": [one.segment_tokens for one in group],
        "proofs": [one.proofs for one in group],
    }


def file_of(table: pa.Table, *, metadata: dict[str, str] | None = None, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    settings = {"compression": "zstd", "store_schema": False} | options
    row_group_size = settings.pop("row_group_size", None)
    with pq.ParquetWriter(sink, table.schema, **settings) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata(METADATA if metadata is None else metadata)
    return sink.getvalue().to_pybytes()


def honest_table() -> pa.Table:
    return pa.table(columns_of(GROUP), schema=SCHEMA)


def replaced(field: pa.Field, values: list[Any]) -> pa.Table:
    """The honest table with the column of `field`'s name of another type."""
    index = SCHEMA.get_field_index(field.name)
    fields = [field if position == index else kept for position, kept in enumerate(SCHEMA)]
    return pa.table(columns_of(GROUP) | {field.name: values}, schema=pa.schema(fields))


def element(kind: pa.DataType, *, nullable: bool = False) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=nullable))


# Not Parquet at all.


def a_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rollouts", VALID)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"PAR1",
        b"PAR1PAR1",
        b"PAR1" + bytes(4) + b"PAR1",
        b"PAR1" + b"\xff" * 4 + b"PAR1",
        os.urandom(4096),
        b"PAR1" + os.urandom(4096) + struct.pack("<I", 4096) + b"PAR1",
        a_zip(),
        b'{"rollouts": []}',
        VALID[:-4] + b"PARE",
        b"PARE" + VALID[4:-4] + b"PARE",
        VALID + VALID[:-4],
        VALID[4:],
    ],
    ids=[
        "empty",
        "magic",
        "two magics",
        "no footer",
        "footer of 4 GiB",
        "random",
        "random footer",
        "zip",
        "json",
        "encrypted footer",
        "encrypted file",
        "trailing bytes",
        "beheaded",
    ],
)
def test_a_body_that_is_not_parquet(reader, body):
    assert refusal_of(reader, body).reason == Reason.NOT_PARQUET


def test_a_file_cut_short_anywhere(reader):
    for length in range(0, len(VALID), 97):
        with pytest.raises(Refusal) as caught:
            reader.read(VALID[:length], spec=SPEC)
        assert caught.value.reason == Reason.NOT_PARQUET


def test_a_file_cut_short_and_closed_with_the_magic_again(reader):
    for length in range(12, len(VALID) - 4, 97):
        with pytest.raises(Refusal) as caught:
            reader.read(VALID[:length] + VALID[-8:], spec=SPEC)
        assert caught.value.reason == Reason.NOT_PARQUET


# Another schema.

EXTRA = pa.field("reward", pa.float64(), nullable=False)
SCHEMAS: dict[str, Callable[[], pa.Table]] = {
    "a claimed reward": lambda: honest_table().append_column(EXTRA, pa.array([1.0] * ROWS)),
    "a column missing": lambda: honest_table().drop_columns(["proofs"]),
    "a column renamed": lambda: honest_table().rename_columns([*SCHEMA.names[:-1], "evidence"]),
    "a list renamed": lambda: honest_table().rename_columns(["sample", "seed", "prompts", *SCHEMA.names[3:]]),
    "columns swapped": lambda: honest_table().select(
        [*SCHEMA.names[:2], "completion_ids", "prompt_ids", *SCHEMA.names[4:]]
    ),
    "a column twice": lambda: honest_table().append_column(SCHEMA.field("seed"), honest_table().column("seed")),
    "wide integers": lambda: replaced(pa.field("sample", pa.int64(), nullable=False), list(range(ROWS))),
    "unsigned integers": lambda: replaced(pa.field("sample", pa.uint32(), nullable=False), list(range(ROWS))),
    "short seeds": lambda: replaced(pa.field("seed", pa.binary(15), nullable=False), [bytes(15)] * ROWS),
    "seeds of any length": lambda: replaced(pa.field("seed", pa.binary(), nullable=False), [bytes(16)] * ROWS),
    "text proofs": lambda: replaced(pa.field("proofs", element(pa.string()), nullable=False), [["x"]] * ROWS),
    "double logprobs": lambda: replaced(pa.field("logprobs", element(pa.float64()), nullable=False), [[-1.0]] * ROWS),
    "no segments": lambda: honest_table().drop_columns(["segment_versions", "segment_tokens"]),
    "short versions": lambda: replaced(pa.field("segment_versions", element(pa.int32()), nullable=False), [[3]] * ROWS),
    "wide lengths": lambda: replaced(pa.field("segment_tokens", element(pa.int64()), nullable=False), [[10]] * ROWS),
    "scalars for lists": lambda: replaced(pa.field("logprobs", pa.float32(), nullable=False), [-1.0] * ROWS),
    "lists of lists": lambda: replaced(
        pa.field("prompt_ids", element(element(pa.int32())), nullable=False), [[[1], [2]]] * ROWS
    ),
    "structs": lambda: replaced(
        pa.field("sample", pa.struct([pa.field("sample", pa.int32(), nullable=False)]), nullable=False),
        [{"sample": row} for row in range(ROWS)],
    ),
    "a null row": lambda: replaced(pa.field("sample", pa.int32()), [0, None, 2, 3]),
    "a null list": lambda: replaced(pa.field("logprobs", element(pa.float32())), [[-1.0], None, [], [-1.0]]),
    "a null in a list": lambda: replaced(
        pa.field("logprobs", element(pa.float32(), nullable=True), nullable=False), [[-1.0, None]] * ROWS
    ),
    "nullable without nulls": lambda: replaced(pa.field("sample", pa.int32()), list(range(ROWS))),
    "dates for integers": lambda: replaced(pa.field("sample", pa.date32(), nullable=False), list(range(ROWS))),
    "a thousand columns": lambda: pa.table({f"c{index}": [1] * ROWS for index in range(1000)}),
    "no columns": lambda: pa.table({}),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_another_schema(reader, name):
    refusal = refusal_of(reader, file_of(SCHEMAS[name]()))
    assert refusal.reason == (Reason.NOT_PARQUET if name == "a thousand columns" else Reason.WRONG_SCHEMA)


def test_an_embedded_arrow_schema_is_not_parsed_or_believed(reader):
    """A file's second description of itself can claim extension types, dictionaries and time zones."""
    assert refusal_of(reader, file_of(honest_table(), store_schema=True)).reason == Reason.WRONG_SCHEMA


@pytest.mark.parametrize(
    "metadata", [{}, {"veriswarm": "rollouts/1"}, {"veriswarm": "rollouts/3"}, {**METADATA, "reward": "1"}]
)
def test_metadata_that_is_missing_of_another_version_or_has_more(reader, metadata):
    assert refusal_of(reader, file_of(honest_table(), metadata=metadata)).reason == Reason.WRONG_SCHEMA


def test_giant_strings_in_the_metadata(reader):
    body = file_of(honest_table(), metadata={**METADATA, "x": "a" * 3_000_000})
    assert refusal_of(reader, body).reason == Reason.NOT_PARQUET


# Another number of rows.


def empty_rows(rows: int) -> bytes:
    """`rows` rows that cost next to nothing to send."""
    samples = [*range(min(rows, ROWS)), *[0] * (rows - ROWS)]
    empty = dict.fromkeys(SCHEMA.names[2:], [[]] * rows)
    return write_columns({"sample": samples, "seed": [bytes(16)] * rows} | empty)


@pytest.mark.parametrize("rows", [0, ROWS - 1, ROWS + 1, 3_000_000])
def test_more_or_fewer_rows_than_were_leased(reader, rows):
    assert refusal_of(reader, empty_rows(rows)).reason == Reason.WRONG_GROUP_SIZE


@pytest.mark.parametrize("samples", [[0, 1, 2, 2], [3, 2, 1, 0], [1, 2, 3, 4], [0, -1, 2, 3]])
def test_rows_that_are_not_the_samples_in_order(reader, samples):
    """Best of n by leaving out a sample and sending another one twice."""
    assert refusal_of(reader, write_columns(columns_of(GROUP) | {"sample": samples})).reason == Reason.WRONG_GROUP_SIZE


def test_rows_spread_over_many_row_groups(reader):
    assert refusal_of(reader, file_of(honest_table(), row_group_size=1)).reason == Reason.NOT_PARQUET


# Bombs.


@pytest.mark.parametrize("codec", ["gzip", "brotli", "lz4"])
def test_a_codec_that_the_protocol_does_not_name(reader, codec):
    assert refusal_of(reader, file_of(honest_table(), compression=codec)).reason == Reason.NOT_PARQUET


def proof_bomb(megabytes: int, **options: Any) -> bytes:
    column: list[list[bytes]] = [[bytes(megabytes * 1024 * 1024)], [], [], []]
    return file_of(pa.table(columns_of(GROUP) | {"proofs": column}, schema=SCHEMA), **options)


def varint(value: int, *, width: int = 0) -> bytes:
    """A zigzag varint of the Thrift compact protocol, padded to `width` bytes as decoders allow."""
    value = (value << 1 ^ value >> 63) & (2**64 - 1)
    digits = []
    while value or not digits:
        digits.append(value & 0x7F)
        value >>= 7
    digits += [0] * (width - len(digits))
    return bytes([digit | 0x80 for digit in digits[:-1]] + digits[-1:])


def with_footer_saying(body: bytes, *, true: int, claimed: int) -> bytes:
    """`body` whose footer has `claimed` wherever it had the number `true`."""
    at = len(body) - 8 - int.from_bytes(body[-8:-4], "little")
    old = varint(true)
    footer = body[at:]
    assert old in footer
    return body[:at] + footer.replace(old, varint(claimed, width=len(old)))


def test_a_decompression_bomb(reader):
    body = proof_bomb(128, use_dictionary=False)
    assert len(body) < 100_000
    assert "declares" in refusal_of(reader, body).detail


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_decompression_bomb_whose_footer_lies_about_its_size(reader, dictionary):
    body = proof_bomb(128, use_dictionary=dictionary)
    size = pq.read_metadata(pa.BufferReader(body)).row_group(0).column(7).total_uncompressed_size
    refusal = refusal_of(reader, with_footer_saying(body, true=size, claimed=1000))
    assert refusal.reason == Reason.NOT_PARQUET
    assert "declares" not in refusal.detail


@pytest.mark.parametrize("dictionary", [False, True])
def test_a_list_of_millions_of_tokens_whose_footer_lies_about_it(reader, dictionary):
    tokens = 30_000_000
    values = pa.ListArray.from_arrays(
        pa.array([0, tokens, tokens, tokens, tokens], pa.int32()),
        pa.array(np.zeros(tokens, dtype=np.int32)),
        type=SCHEMA.field("prompt_ids").type,
    )
    table = honest_table().set_column(2, SCHEMA.field("prompt_ids"), values)
    body = file_of(table, use_dictionary=dictionary, write_statistics=False)
    column = pq.read_metadata(pa.BufferReader(body)).row_group(0).column(2)
    assert "values; at most" in refusal_of(reader, body).detail
    body = with_footer_saying(body, true=column.num_values, claimed=12)
    body = with_footer_saying(body, true=column.total_uncompressed_size, claimed=1000)
    assert refusal_of(reader, body).reason == Reason.NOT_PARQUET


def test_a_million_rows_whose_footer_claims_the_leased_number(reader):
    """What is read is what is claimed; the rest is not looked at, and no memory is spent on it."""
    body = with_footer_saying(empty_rows(1_000_000), true=1_000_000, claimed=ROWS)
    try:
        rollouts = reader.read(body, spec=SPEC)
    except Refusal as refusal:
        assert refusal.reason == Reason.NOT_PARQUET
    else:
        assert len(rollouts) == ROWS
    assert peak_bytes(reader) < MAX_CHILD_BYTES


# Footers that no writer makes: the Thrift compact protocol by hand.


def file_with_footer(footer: bytes) -> bytes:
    return b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"


def unsigned(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def schema_footer(elements: list[bytes], *, claimed: int | None = None) -> bytes:
    """FileMetaData with version 1, these schema elements, `ROWS` rows and no row groups."""
    count = len(elements) if claimed is None else claimed
    return b"".join(
        [
            b"\x15" + varint(1),
            b"\x19" + (b"\xfc" + unsigned(count)),
            *elements,
            b"\x16" + varint(ROWS),
            b"\x19\x0c",
            b"\x00",
        ]
    )


def group_element(name: bytes, children: int) -> bytes:
    """A required group: repetition type (field 3), name (4), number of children (5)."""
    return b"\x35" + varint(0) + b"\x18" + unsigned(len(name)) + name + b"\x15" + varint(children) + b"\x00"


def int32_element(name: bytes) -> bytes:
    return b"\x15" + varint(1) + b"\x25" + varint(0) + b"\x18" + unsigned(len(name)) + name + b"\x00"


def test_the_hand_made_footers_are_well_formed():
    """Otherwise the tests below would only show that garbage is refused."""
    footer = schema_footer([group_element(b"schema", 1), int32_element(b"sample")])
    assert pq.read_metadata(pa.BufferReader(file_with_footer(footer))).schema.names == ["sample"]


@pytest.mark.parametrize("depth", [10, 500, 7000])
def test_a_schema_nested_to_exhaust_the_stack(reader, depth):
    elements = [*[group_element(b"a", 1)] * depth, int32_element(b"sample")]
    refusal = refusal_of(reader, file_with_footer(schema_footer(elements)))
    assert refusal.reason in {Reason.WRONG_SCHEMA, Reason.NOT_PARQUET}


@pytest.mark.parametrize("claimed", [2**20, 2**31 - 1, 2**32 + 1, 2**63])
def test_a_footer_that_announces_billions_of_columns(reader, claimed):
    footer = schema_footer([group_element(b"schema", 1), int32_element(b"sample")], claimed=claimed)
    assert refusal_of(reader, file_with_footer(footer)).reason == Reason.NOT_PARQUET


@pytest.mark.parametrize("children", [-1, 2, 2**31 - 1, -(2**31)])
def test_a_group_that_claims_children_it_has_not(reader, children):
    footer = schema_footer([group_element(b"schema", children), int32_element(b"sample")])
    assert refusal_of(reader, file_with_footer(footer)).reason == Reason.NOT_PARQUET


def test_a_column_that_claims_to_live_in_a_file_of_the_verifier(reader, tmp_path):
    (tmp_path / "valid").write_bytes(VALID)
    metadata = pq.read_metadata(tmp_path / "valid")
    metadata.set_file_path("/etc/passwd")
    metadata.write_metadata_file(tmp_path / "elsewhere")
    refusal = refusal_of(reader, (tmp_path / "elsewhere").read_bytes())
    assert "elsewhere" in refusal.detail


# Anything at all.


def mutations(body: bytes, *, count: int, seed: int) -> Iterator[bytes]:
    """Bytes changed, inserted, deleted or moved; more often in the footer, where one byte means most."""
    draw = random.Random(seed)
    footer_bytes = int.from_bytes(body[-8:-4], "little") + 8
    for _ in range(count):
        changed = bytearray(body)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            start = len(changed) - footer_bytes if draw.random() < 0.5 else 0
            at = draw.randrange(max(0, start), len(changed))
            kind = draw.randrange(5)
            if kind <= 1:
                changed[at] = draw.randrange(256)
            elif kind == 2:
                changed[at] ^= 1 << draw.randrange(8)
            elif kind == 3:
                changed[at : at + draw.randrange(1, 5)] = draw.randbytes(draw.randrange(0, 5))
            else:
                source = draw.randrange(len(changed))
                changed[at : at + 8] = changed[source : source + 8]
        yield bytes(changed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "use_dictionary": True, "data_page_version": "2.0"},
    ],
    ids=["as written", "plain", "dictionaries and snappy"],
)
def test_mutated_files(reader, options):
    body = file_of(honest_table(), **options)
    assert reader.read(body, spec=SPEC) == GROUP
    began = time.monotonic()
    reasons: Counter[Reason] = Counter()
    for changed in mutations(body, count=1000, seed=1):
        try:
            rollouts = reader.read(changed, spec=SPEC)
        except Refusal as refusal:
            reasons[refusal.reason] += 1
        else:
            assert len(rollouts) == ROWS
            assert all(isinstance(rollout, Rollout) for rollout in rollouts)
    assert reasons.total() > 100
    assert reasons.keys() <= {Reason.NOT_PARQUET, Reason.WRONG_SCHEMA, Reason.WRONG_GROUP_SIZE}
    assert reader.read(VALID, spec=SPEC) == GROUP
    assert time.monotonic() - began < 120
