"""Datasets: the file, its problems, and the id under which it travels (sections 5.4, 5.5 and 10.2)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .messages import SIGNED
from .values import (
    BOOLEAN,
    FLOAT,
    STRING,
    ArrayOf,
    ObjectOf,
    OrNull,
    Record,
    Refused,
    Scalar,
    decode,
    derive,
    digest,
    encode,
    integer,
    is_base64,
    matching,
    one_of,
    text,
)

MAGIC = b"SWPDATA1"
MAX_HEADER = 64 * 1024
MAX_ROW = 2**20
HEADER = Record(
    {
        "name": matching("[a-z0-9][a-z0-9._-]{0,63}"),
        "grader": Record({"kind": one_of("exact/1"), "ignore_case": BOOLEAN}),
        "system": text(0, 16384),
        "rows": integer(1, 2**20),
        "held_out": integer(0, 2**20),
        "columns": Record(
            {
                "prompt": OrNull(text(1, 200)),
                "messages": OrNull(text(1, 200)),
                "answer": text(1, 200),
                "metadata": ArrayOf(text(1, 200), 64),
            }
        ),
        "salt": Scalar(lambda value: is_base64(value, 32) and len(value) == 44),
    },
    frozenset({"salt"}),
)
VALUE = Scalar(lambda value: value is None or any(of.accepts(value) for of in (STRING, SIGNED, FLOAT, BOOLEAN)))
MESSAGE = Record({"role": one_of("system", "user", "assistant", "tool"), "content": STRING})
ROW = Record(
    {
        "prompt": OrNull(text(1, MAX_ROW)),
        "messages": OrNull(ArrayOf(MESSAGE, 256, 1)),
        "answer": text(1, MAX_ROW),
        "metadata": ObjectOf(VALUE),
    },
    frozenset({"answer"}),
)


@dataclass(frozen=True)
class Problem:
    """What a row asks, and where requests are inserted into its text."""

    prompt: str
    opening: int
    answer: str | None


@dataclass(frozen=True)
class DatasetFile:
    """A verified file."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]

    def problem(self, index: int) -> Problem:
        """Return the problem of row `index`."""
        row, system = self.rows[index], self.header["system"]
        contents = [row["prompt"]] if row["messages"] is None else [one["content"] for one in row["messages"]]
        before = f"{system}\n\n" if system else ""
        return Problem(before + "\n\n".join(contents), len(before), row.get("answer"))

    def reward(self, answer: str, completion: str) -> float:
        """Return what `completion` earns by `exact/1`."""
        given, expected = (one.strip(" \t\n\v\f\r") for one in (completion.rpartition("</think>")[2], answer))
        if self.header["grader"]["ignore_case"]:
            given, expected = (re.sub("[A-Z]", lambda letter: letter[0].lower(), one) for one in (given, expected))
        return float(given == expected)


def read_dataset(data: bytes, spec: dict[str, Any]) -> DatasetFile:
    """Read a file that the run's rules name; raises Refused."""
    if (len(data), digest(data)) != (spec["bytes"], spec["digest"]):
        raise Refused("dataset_changed")
    if data[:8] != MAGIC:
        raise Refused("dataset_malformed")
    end = 12 + int.from_bytes(data[8:12], "little")
    header = decode(HEADER, data[12:end], max_bytes=MAX_HEADER)
    count, start = header["rows"], end + 8 * (header["rows"] + 1)
    at = [int.from_bytes(data[end + 8 * row : end + 8 * row + 8], "little") for row in range(count + 1)]
    if header["held_out"] >= count or at[0] != 0 or at != sorted(at) or start + at[-1] != len(data):
        raise Refused("dataset_malformed")
    rows = [decode(ROW, data[start + at[row] : start + at[row + 1]], max_bytes=MAX_ROW) for row in range(count)]
    if any((row["prompt"] is None) == (row["messages"] is None) for row in rows):
        raise Refused("dataset_malformed")
    if len({"answer" in row for row in rows}) != 1 or any(row["metadata"] for row in rows if "answer" not in row):
        raise Refused("dataset_malformed")
    if "salt" in header and "answer" not in rows[0]:
        raise Refused("dataset_malformed")
    return DatasetFile(header, rows)


def prompts_of(file: DatasetFile) -> bytes:
    """Return the file of prompts that follows from a file of answers."""
    header = encode(HEADER, {key: value for key, value in file.header.items() if key != "salt"})
    rows = [encode(ROW, {"prompt": row["prompt"], "messages": row["messages"], "metadata": {}}) for row in file.rows]
    at = accumulate(map(len, rows), initial=0)
    table = b"".join(each.to_bytes(8, "little") for each in at)
    return MAGIC + len(header).to_bytes(4, "little") + header + table + b"".join(rows)


def is_held_out(row: dict[str, Any], share: float) -> bool:
    """Return whether a `share` of all rows that is held out has this one."""
    asked = json.dumps([row["prompt"], row["messages"]], ensure_ascii=False, separators=(",", ":")).encode()
    return int.from_bytes(derive("swarmproof/1 dataset question", asked)[:8], "big") < share * 2**64


def content_id(run_id: str, dataset: str) -> str:
    """Return the run id that the manifest of a dataset names."""
    return derive("shardcast/1 content", bytes.fromhex(run_id), bytes.fromhex(dataset)).hex()
