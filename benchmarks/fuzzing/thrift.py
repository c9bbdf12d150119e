"""Just enough of Thrift's compact protocol to take a Parquet footer or page header apart and put it together wrongly.

A struct is a list of fields [id, type, value], a list is [item type, items], both as Python lists, so that they can be
edited in place. Types and encodings: thrift/doc/specs/thrift-compact-protocol.md.
"""

from __future__ import annotations

from random import Random
from typing import Any

from benchmarks.fuzzing.mutation import scramble

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
_INTEGERS = frozenset({I16, I32, I64})
_FIXED = {BYTE: 1, DOUBLE: 8}
_EDGES = (0, 1, -1, 2, 5, 127, 128, 255, 2**15, 2**20, 2**26, 2**31 - 1, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63))


def decode(data: bytes, at: int = 0) -> tuple[list[Any], int]:
    """The struct at `at`, and where it ends. Raises IndexError or ValueError for what is none."""
    fields: list[Any] = []
    number = 0
    while (head := data[at]) != 0:
        at += 1
        kind, step = head & 0x0F, head >> 4
        if step:
            number += step
        else:
            raw, at = _varint(data, at)
            number = _unzigzag(raw)
        value, at = _value(data, at, kind)
        fields.append([number, kind, value])
    return fields, at + 1


def encode(fields: list[Any]) -> bytes:
    """The bytes of a struct; ids may come in any order, and twice."""
    out = bytearray()
    before = 0
    for number, kind, value in fields:
        step = number - before
        if 0 < step <= 15:
            out.append(step << 4 | kind)
        else:
            out.append(kind)
            out += _zigzag(number)
        out += _bytes(kind, value)
        before = number
    return bytes(out) + b"\0"


def field(fields: list[Any], number: int) -> list[Any] | None:
    """The field [id, type, value] with this id."""
    return next((one for one in fields if one[0] == number), None)


def edit(rng: Random, fields: list[Any]) -> None:
    """Change a few values: numbers to edge values, texts, flags; fields and items lost, twice, or of another type."""
    for _ in range(1 + int(rng.expovariate(0.8))):
        holders: list[tuple[list[Any], int, int]] = []
        _collect(fields, holders)
        if not holders:
            return
        container, index, kind = rng.choice(holders)
        _change(rng, container, index, kind)


def _collect(fields: list[Any], holders: list[tuple[list[Any], int, int]]) -> None:
    """Every place: a field in its struct (kind 0), and every value with its type."""
    for index, entry in enumerate(fields):
        holders.append((fields, index, 0))
        _, kind, value = entry
        holders.append((entry, 2, kind))
        if kind == STRUCT:
            _collect(value, holders)
        elif kind in (LIST, SET):
            item_kind, items = value
            for at, item in enumerate(items):
                holders.append((items, at, item_kind))
                if item_kind == STRUCT:
                    _collect(item, holders)


def _change(rng: Random, container: list[Any], index: int, kind: int) -> None:
    value = container[index]
    if kind == 0:
        roll = rng.randrange(5)
        if roll == 0:
            del container[index]
        elif roll == 1:
            container.insert(index, list(value))
        elif roll == 2:
            value[0] += rng.choice((-1, 1, 100))
        elif roll == 3:
            container.insert(rng.randint(0, len(container)), _new_field(rng))
        else:
            container.append(container.pop(index))
    elif kind in _INTEGERS:
        container[index] = rng.choice((rng.choice(_EDGES), value + rng.choice((-1, 1, 8)), value * 2))
    elif kind == BINARY:
        container[index] = scramble(rng, value)
    elif kind in (LIST, SET) and value[1]:
        at = rng.randrange(len(value[1]))
        value[1][at : at + 1] = [value[1][at]] * rng.choice((0, 2, 2, 200))
    elif kind in (TRUE, FALSE):
        container[index - 1] = TRUE + FALSE - kind


def _new_field(rng: Random) -> list[Any]:
    """A field that parquet.thrift may know of, and that the file has not: encryption, indexes, other statistics."""
    number = rng.randint(1, 20)
    inner = [[rng.randint(1, 3), STRUCT, [[1, BINARY, b"x"]]], [3, BINARY, b"key"]]
    return rng.choice(([number, STRUCT, inner], [number, I32, rng.choice(_EDGES)], [number, BINARY, b"x" * 9]))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _zigzag(value: int) -> bytes:
    value = value << 1 if value >= 0 else (-value << 1) - 1
    return _unsigned(value)


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (LIST, SET):
        return _list(data, at)
    return decode(data, at) if kind == STRUCT else _scalar(data, at, kind)


def _scalar(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind in (TRUE, FALSE):
        return None, at
    if kind in _INTEGERS:
        raw, at = _varint(data, at)
        return _unzigzag(raw), at
    if kind not in (BYTE, DOUBLE, BINARY):
        raise ValueError(f"a field of type {kind}")
    size, at = _varint(data, at) if kind == BINARY else (_FIXED[kind], at)
    return data[at : at + size], at + size


def _list(data: bytes, at: int) -> tuple[list[Any], int]:
    head = data[at]
    at += 1
    kind, size = head & 0x0F, head >> 4
    if size == 15:
        size, at = _varint(data, at)
    items = []
    for _ in range(size):
        # Flags in a list take a byte each.
        item, at = (data[at], at + 1) if kind in (TRUE, FALSE) else _value(data, at, kind)
        items.append(item)
    return [kind, items], at


def _bytes(kind: int, value: Any) -> bytes:
    if kind in (LIST, SET):
        return _list_bytes(*value)
    return encode(value) if kind == STRUCT else _scalar_bytes(kind, value)


def _scalar_bytes(kind: int, value: Any) -> bytes:
    if kind in (TRUE, FALSE):
        return b""
    if kind in _INTEGERS:
        return _zigzag(value)
    return (_unsigned(len(value)) if kind == BINARY else b"") + bytes(value)


def _list_bytes(kind: int, items: list[Any]) -> bytes:
    size = len(items)
    head = bytes([size << 4 | kind]) if size < 15 else bytes([0xF0 | kind]) + _unsigned(size)
    flags = kind in (TRUE, FALSE)
    return head + b"".join(bytes([item & 0xFF]) if flags else _bytes(kind, item) for item in items)
