"""Export a run's rollouts as Parquet files, one row per completion, for people and their tools.

Memory is bounded: one group, and as many rows as make a row group, are held at a time. The folder is written beside its
name and renamed, so that there is never half of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.parquet as pq

from coordinator.errors import CorruptRead, StorageFault
from coordinator.run.home import Home
from coordinator.storage.rollouts import JudgedRow, judged
from coordinator.training.export import written_folder
from coordinator.training.group_size import max_group_bytes
from coordinator.training.groups import decode_group
from node.protocol.admission import Outcome
from node.protocol.reasons import Refusal
from node.submission.reader import read_rollouts

ROW_GROUP_TOKENS: Final = 2**18
FILE_BYTES: Final = 256 * 1024 * 1024
"""A file that has grown to this size is closed, and the next one begun."""

_SEGMENTS = pa.list_(pa.struct([("version", pa.int64()), ("tokens", pa.int32())]))
_REPLIES = pa.list_(pa.struct([("after", pa.int32()), ("ids", pa.list_(pa.int32()))]))
SCHEMA = pa.schema(
    [
        ("submission", pa.string()),
        ("node", pa.string()),
        ("version", pa.int64()),
        ("slot", pa.int64()),
        ("sample", pa.int32()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("recheck", pa.string()),
        ("step", pa.int64()),
        ("reward", pa.float64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("segments", _SEGMENTS),
        ("replies", _REPLIES),
    ]
)

Row = dict[str, Any]


@dataclass(slots=True)
class ExportedRollouts:
    """What was written; `unreadable` submissions were rejected because their files cannot be read, and those of
    `expired` ones are removed after a time, as the operator wants it.
    """

    files: int = 0
    submissions: int = 0
    rollouts: int = 0
    unreadable: int = 0
    expired: int = 0
    missing: int = 0
    """Submissions whose blobs are gone or damaged."""


def export_rollouts(
    home: Home, folder: Path, *, rejected: bool = False, file_bytes: int = FILE_BYTES
) -> ExportedRollouts:
    """Write the rollouts that `home` has admitted, and with `rejected` those that it has not, to `folder`.

    The run may go on meanwhile. Raises ExportError, OSError.
    """
    outcomes = (Outcome.ADMITTED, Outcome.REJECTED) if rejected else (Outcome.ADMITTED,)
    done = ExportedRollouts()
    with written_folder(folder) as partial, _Files(partial, file_bytes=file_bytes) as files:
        for one in judged(home.database, outcomes):
            if one.is_expired:
                done.expired += 1
                continue
            try:
                rows = list(_rows(home, one))
            except (StorageFault, CorruptRead):
                done.missing += 1
            except Refusal:
                done.unreadable += 1
            else:
                files.add(rows)
                done.submissions += 1
                done.rollouts += len(rows)
        files.close()
        done.files = files.count
    return done


def _rows(home: Home, one: JudgedRow) -> Iterator[Row]:
    """Yield one row per completion. Raises StorageFault, Refusal."""
    known: Row = {
        "submission": one.submission,
        "node": one.node,
        "version": one.version,
        "slot": one.slot,
        "outcome": one.outcome,
        "reason": one.reason,
        "recheck": one.recheck,
        "step": one.step,
    }
    found = _admitted(home, one, one.blob) if one.blob is not None else _submitted(home, one)
    for sample, row in enumerate(found):
        yield known | {"sample": sample} | row


def _admitted(home: Home, one: JudgedRow, blob: str) -> Iterator[Row]:
    """Yield what the trainer gets: with rewards, and the verifier's log-probabilities where it measured any."""
    group = decode_group(home.blobs.get(blob, max_bytes=max_group_bytes(home.spec)))
    for reward, rollout in zip(group.rewards, group.rollouts, strict=True):
        segments = rollout.segments or ((one.version, len(rollout.completion_ids)),)
        yield {
            "reward": reward,
            "prompt_ids": rollout.prompt_ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": rollout.logprobs,
            "segments": [{"version": version, "tokens": tokens} for version, tokens in segments],
            "replies": [{"after": after, "ids": ids} for after, ids in rollout.replies],
        }


def _submitted(home: Home, one: JudgedRow) -> Iterator[Row]:
    """Yield what the worker sent, of which nothing is known to be true."""
    body = home.blobs.get(one.body, max_bytes=home.spec.limits.max_submission_bytes)
    for rollout in read_rollouts(body, spec=home.spec):
        segments = zip(rollout.segment_versions, rollout.segment_tokens, strict=False)  # a worker may send any
        yield {
            "reward": None,
            "prompt_ids": rollout.prompt_ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": rollout.logprobs,
            "segments": [{"version": version, "tokens": tokens} for version, tokens in segments],
            "replies": None,
        }


class _Files:
    """Rows into `rollouts-00000.parquet` and so on; at least one file, if only with a schema."""

    def __init__(self, folder: Path, *, file_bytes: int) -> None:
        self.count = 0
        self._folder = folder
        self._file_bytes = file_bytes
        self._rows: list[Row] = []
        self._tokens = 0
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def add(self, rows: list[Row]) -> None:
        """Take rows, and write a row group once there are enough."""
        self._rows += rows
        self._tokens += sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
        if self._tokens >= ROW_GROUP_TOKENS:
            self._flush()
            if self._path.stat().st_size >= self._file_bytes:
                self._writer.close()
                self._begin()

    def close(self) -> None:
        """Write what is left."""
        if self._rows:
            self._flush()
        self._writer.close()

    def _begin(self) -> None:
        self._path = self._folder / f"rollouts-{self.count:05}.parquet"
        self._writer = pq.ParquetWriter(self._path, SCHEMA, compression="zstd")
        self.count += 1

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._tokens = [], 0
