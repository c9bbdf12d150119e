"""Canonical values, digests and derivations (sections 1.1 to 1.4)."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from blake3 import blake3

MAX_INTEGER = 2**53 - 1
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class Refused(Exception):
    """What was read breaks a rule of the protocol. `code` says which, `detail` what was found."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


def digest(data: bytes) -> str:
    """Return the BLAKE3 digest of `data` in hex (1.3)."""
    return blake3(data).hexdigest()


def derive(context: str, *parts: bytes) -> bytes:
    """Return 32 bytes derived from `parts` under `context` (1.4)."""
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return blake3(framed, derive_key_context=context).digest()


def u32(number: int) -> bytes:
    """Return `number` as four big-endian bytes."""
    return number.to_bytes(4, "big")


def u64(number: int) -> bytes:
    """Return `number` as eight big-endian bytes."""
    return number.to_bytes(8, "big")


# Types. `conform` returns the value with its fields in the page's order, or raises Refused("bad_value").


@dataclass(frozen=True)
class Scalar:
    """A JSON string, number or boolean for which `accepts` is true."""

    accepts: Callable[[Any], bool]

    def conform(self, value: Any, where: str) -> Any:
        if not self.accepts(value):
            raise Refused("bad_value", where)
        return value


@dataclass(frozen=True)
class OrNull:
    """A value of type `of`, or null."""

    of: Any

    def conform(self, value: Any, where: str) -> Any:
        return None if value is None else self.of.conform(value, where)


@dataclass(frozen=True)
class ArrayOf:
    """`least` to `most` values of type `of`."""

    of: Any
    most: int
    least: int = 0

    def conform(self, value: Any, where: str) -> Any:
        if not isinstance(value, list) or not self.least <= len(value) <= self.most:
            raise Refused("bad_value", where)
        return [self.of.conform(item, f"{where}[{index}]") for index, item in enumerate(value)]


@dataclass(frozen=True)
class ObjectOf:
    """An object whose keys are free, in the order of the writer."""

    of: Any

    def conform(self, value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise Refused("bad_value", where)
        return {key: self.of.conform(item, f"{where}.{key}") for key, item in value.items()}


@dataclass(frozen=True)
class Record:
    """An object with exactly these fields in this order; those in `left_out` are not there where they have no value."""

    fields: dict[str, Any]
    left_out: frozenset[str] = field(default_factory=frozenset)

    def conform(self, value: Any, where: str = "") -> Any:
        if not isinstance(value, dict) or not set(value) <= set(self.fields):
            raise Refused("bad_value", where or "not an object of these fields")
        ordered = {}
        for name, of in self.fields.items():
            if name in value:
                ordered[name] = of.conform(value[name], f"{where}.{name}")
            elif name not in self.left_out:
                raise Refused("bad_value", f"{where}.{name} is missing")
        return ordered


@dataclass(frozen=True)
class OneOf:
    """A record chosen by its first field, the tag."""

    tag: str
    records: dict[str, Record]

    def conform(self, value: Any, where: str = "") -> Any:
        record = self.records.get(value.get(self.tag)) if isinstance(value, dict) else None
        if record is None:
            raise Refused("bad_value", f"{where}: unknown {self.tag}")
        return record.conform(value, where)


def matching(pattern: str) -> Scalar:
    """A string that `pattern` matches as a whole."""
    compiled = re.compile(pattern, re.ASCII | re.DOTALL)
    return Scalar(lambda value: isinstance(value, str) and compiled.fullmatch(value) is not None)


def one_of(*texts: str) -> Scalar:
    """One of these strings."""
    return Scalar(lambda value: isinstance(value, str) and value in texts)


def text(least: int, most: int) -> Scalar:
    """A string of `least` to `most` characters."""
    return Scalar(lambda value: isinstance(value, str) and least <= len(value) <= most)


def integer(least: int, most: int) -> Scalar:
    """An integer from `least` to `most`."""
    return Scalar(lambda value: type(value) is int and least <= value <= most)


def number(least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf, below: float = math.inf):
    """A finite float within these bounds; `above` and `below` are open ones."""
    return Scalar(
        lambda value: type(value) is float and math.isfinite(value) and least <= value <= most and above < value < below
    )


def is_base64(value: Any, most_bytes: int) -> bool:
    """Return whether `value` is standard base64 with padding, in its only spelling."""
    if not isinstance(value, str) or len(value) > 4 * ((most_bytes + 2) // 3):
        return False
    try:
        raw = base64.b64decode(value, validate=True)
    except ValueError:
        return False
    return len(raw) <= most_bytes and base64.b64encode(raw).decode() == value


def binary(most_bytes: int) -> Scalar:
    """At most so many bytes, in base64."""
    return Scalar(lambda value: is_base64(value, most_bytes))


BOOLEAN = Scalar(lambda value: type(value) is bool)
FLOAT = number()
STRING = text(0, MAX_INTEGER)
TEXT = text(0, 200)
COUNT = integer(0, MAX_INTEGER)
DIGEST = matching("[0-9a-f]{64}")
PUBLIC_KEY = DIGEST
NONCE = matching("[0-9a-f]{32}")
URL = Scalar(lambda value: isinstance(value, str) and re.fullmatch(r"https?://\S{1,500}", value) is not None)
PLAIN_URL = Scalar(
    lambda value: (
        isinstance(value, str)
        and len(value) <= 500
        and re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]+)?(/[A-Za-z0-9._~/-]*)?", value) is not None
    )
)


def write_string(value: str) -> str:
    """Return `value` as rule 3 of 1.1 writes it."""
    escaped = (ESCAPES.get(char) or (f"\\u{ord(char):04x}" if char < " " else char) for char in value)
    return '"' + "".join(escaped) + '"'


def write_float(value: float) -> str:
    """Return `value` as rule 5 of 1.1 writes it."""
    if not math.isfinite(value):
        raise Refused("bad_value", "a float is not finite")
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    if value == 0:
        return sign + "0.0"
    # repr is the shortest decimal that reads back, and of several the closest.
    parts = Decimal(repr(abs(value))).as_tuple()
    digits = "".join(map(str, parts.digits))
    p = len(digits) + int(parts.exponent)
    digits = digits.rstrip("0")
    if -5 < p <= 16:
        whole = digits[:p].ljust(p, "0") if p > 0 else "0"
        fraction = digits[p:] if p > 0 else "0" * -p + digits
        return f"{sign}{whole}.{fraction or '0'}"
    point = "." + digits[1:] if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{point}e{p - 1}"


def write(value: Any) -> str:
    """Return the canonical text of a value whose fields are in order."""
    if value is None or type(value) is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) is int:
        return str(value)
    if type(value) is float:
        return write_float(value)
    if isinstance(value, str):
        return write_string(value)
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return "{" + ",".join(f"{write_string(key)}:{write(item)}" for key, item in value.items()) + "}"


def encode(kind: Any, value: Any) -> bytes:
    """Return the canonical bytes of `value`, which must be of type `kind`."""
    return write(kind.conform(value, "")).encode()


def _whole(digits: str) -> int:
    if len(digits) > 17:
        raise ValueError("an integer is too large")
    return int(digits)


def _never(name: str) -> Any:
    raise ValueError(f"{name} does not exist")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def decode(kind: Any, data: bytes, *, max_bytes: int) -> Any:
    """Return the value of type `kind` that `data` is the one encoding of.

    Raises Refused: `oversized` before anything is parsed, `bad_value`, or `not_canonical`.
    """
    if len(data) > max_bytes:
        raise Refused("oversized", f"{len(data)} bytes, at most {max_bytes}")
    try:
        raw = json.loads(data.decode(), parse_int=_whole, parse_constant=_never, object_pairs_hook=_unique)
        value = kind.conform(raw, "")
        same = write(value).encode() == data
    except (ValueError, RecursionError) as error:
        raise Refused("bad_value", str(error)) from None
    if not same:
        raise Refused("not_canonical")
    return value
