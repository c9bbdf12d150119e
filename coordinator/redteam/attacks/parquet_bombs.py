"""Files made to crash, stall or exhaust whoever reads them."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from coordinator.redteam.attack import Forged, SlotAttack
from coordinator.redteam.workshop import Work
from node.parquet import METADATA, SCHEMA, write_rollouts
from node.protocol.submission import Rollout

ROWS = 200_000
TOKENS = 2_000_000


def _file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(METADATA)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _columns(rollouts: list[Rollout]) -> dict[str, list[Any]]:
    names = SCHEMA.names[1:]
    return {"sample": list(range(len(rollouts))), **{name: [getattr(r, name) for r in rollouts] for name in names}}


def many_rows(rollouts: list[Rollout]) -> bytes:
    """Hundreds of thousands of rows in a few kilobytes."""
    columns = {name: values[:1] * ROWS for name, values in _columns(rollouts).items()}
    return _file(pa.table(columns, schema=SCHEMA))


def long_list(rollouts: list[Rollout]) -> bytes:
    """Millions of tokens in one row, which compress to nothing."""
    columns = _columns(rollouts)
    columns["completion_ids"] = [[7] * TOKENS, *columns["completion_ids"][1:]]
    return _file(pa.table(columns, schema=SCHEMA))


def claimed_reward(rollouts: list[Rollout]) -> bytes:
    """A column that does not belong there."""
    table = pa.table(_columns(rollouts), schema=SCHEMA)
    return _file(table.append_column("reward", pa.array([1.0] * len(rollouts))))


def left_out(rollouts: list[Rollout]) -> bytes:
    """A group without its worst draw."""
    return write_rollouts(rollouts[:-1])


def huge_footer(rollouts: list[Rollout]) -> bytes:
    """A footer that says that it has four gigabytes."""
    return write_rollouts(rollouts)[:-8] + struct.pack("<I", 0xFFFFFFFF) + b"PAR1"


def cut_short(rollouts: list[Rollout]) -> bytes:
    """The first half of a file, closed again."""
    body = write_rollouts(rollouts)
    return body[: len(body) // 2] + body[-8:]


def noise(rollouts: list[Rollout]) -> bytes:  # noqa: ARG001  (one of BOMBS)
    """Random bytes between the right marks."""
    return b"PAR1" + os.urandom(4096) + struct.pack("<I", 4096) + b"PAR1"


BOMBS: tuple[Callable[[list[Rollout]], bytes], ...] = (
    many_rows,
    long_list,
    claimed_reward,
    left_out,
    huge_footer,
    cut_short,
    noise,
)


class ParquetBombs(SlotAttack):
    """Whatever the file is, the next one must be read."""

    name = "parquet-bombs"
    about = "sends files made to crash, stall or exhaust their reader"
    stands_for = "Parquet bombs"
    stopped_by = frozenset({"not_parquet", "wrong_schema", "wrong_group_size", "too_long", "oversized_body"})

    def __init__(self) -> None:
        self._turn = itertools.cycle(BOMBS)

    async def forge(self, work: Work) -> Forged:
        """One bomb after the other."""
        bomb = next(self._turn)
        return Forged(bomb(await work.honest()), note=bomb.__name__)
