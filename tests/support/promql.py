"""Which metrics and labels a PromQL expression names: as much of the language as dashboards and alerts need."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<duration>\[[^\]]*\])
      | (?P<number>\d+(?:\.\d+)?(?:[a-z]+)?)
      | (?P<variable>\$\w+)
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>@])""",
    re.VERBOSE,
)
_CLAUSES = frozenset(("by", "without", "on", "ignoring", "group_left", "group_right"))
_WORDS = frozenset(("and", "or", "unless", "offset", "bool", "inf", "nan", "start", "end"))


def named(expression: str) -> tuple[dict[str, set[str]], set[str]]:
    """Each metric of `expression` with the labels that it is matched by, and all labels that are grouped by.

    Raises ValueError for what is no PromQL.
    """
    tokens = list(_tokens(expression))
    found: dict[str, set[str]] = defaultdict(set)
    grouped: set[str] = set()
    at = 0
    while at < len(tokens):
        kind, text = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name" or text in _WORDS:
            continue
        if text in _CLAUSES:
            if following == "(":
                labels, at = _names_until(tokens, at + 1, ")")
                grouped |= labels
        elif following == "{":
            labels, at = _names_until(tokens, at + 1, "}")
            found[text] |= labels
        elif following != "(" and following not in _CLAUSES:
            found[text] |= set()
    return dict(found), grouped


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(expression)
    while at < end:
        if expression[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(expression, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"no PromQL from character {at} on: {expression[at:]!r}")
        yield match.lastgroup, match[0]
        at = match.end()


def _names_until(tokens: list[tuple[str, str]], at: int, last: str) -> tuple[set[str], int]:
    labels = set()
    while tokens[at][1] != last:
        kind, text = tokens[at]
        if kind == "name":
            labels.add(text)
        at += 1
    return labels, at + 1
