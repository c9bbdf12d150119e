"""JSON values of strangers, read within limits and compared as the protocol says: the grader `json/1`."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any, Final, NoReturn

from node.graders.errors import BadAnswer
from node.graders.text import WHITE_SPACE

MAX_NESTING: Final = 32
_MAX_DIGITS: Final = 400
_MAX_EXPONENT: Final = 400
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKET: Final = re.compile(r"[\[{\]}]")
_FENCE: Final = "```"


class BadJson(ValueError):
    """A text that is not JSON within the limits."""


def grade_json(answer: str, text: str) -> float:
    """Return 1 if the text's last fenced block of JSON, or the text itself, is the expected value."""
    try:
        return float(read(_block(text)) == read(answer))
    except BadJson:
        return 0.0


def check_json(answer: str) -> None:
    """Raise BadAnswer unless the answer is JSON within the limits."""
    try:
        read(answer)
    except BadJson as error:
        raise BadAnswer(f"answer is not JSON within the limits: {error}", code="bad_json") from error


def read(text: str) -> object:
    """Return the value of a JSON text in a form that compares as the protocol says; raises BadJson.

    Numbers compare by value, and never equal `true` or `false`.
    """
    return _comparable(parse(text))


def parse(text: str, *, exact: bool = True) -> Any:
    """Return the value of a JSON text; raises BadJson beyond the limits, or for a key twice.

    Numbers are Fraction, or, if not `exact`, what Python reads: an int without a fraction and exponent, else a float.
    """
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_NESTING:
            raise BadJson(f"nested deeper than {MAX_NESTING}")
    whole, other = (_number, _number) if exact else (_int, _float)
    try:
        return json.loads(text, parse_int=whole, parse_float=other, parse_constant=_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadJson(str(error)) from error


def _block(text: str) -> str:
    """Return the last block between ```json, or ```, and ```; without one the text."""
    pieces = text.split(_FENCE)
    if len(pieces) < 3:
        return text
    # Pieces 1, 3, 5 ... stand inside; of an odd number of fences the last opens a block that does not end.
    inside = pieces[len(pieces) - 2 - (len(pieces) + 1) % 2]
    return inside.removeprefix("json").strip(WHITE_SPACE)


def _number(text: str) -> Fraction:
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > _MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > _MAX_EXPONENT:
        raise BadJson("a number is too long")
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


def _int(text: str) -> int:
    return int(_number(text))


def _float(text: str) -> float:
    _number(text)  # within the limits
    return float(text)


def _constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise BadJson("a key stands twice")
    return members


def _comparable(value: Any) -> object:
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    return value
