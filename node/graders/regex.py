"""The grader `regex/1`: regular expressions that take bounded time on every text.

Python's `re` backtracks: a pattern that looks innocent takes minutes on a text made for it. Here a pattern becomes a
position automaton (Glushkov), whose sets of positions are the bits of an integer. A character takes one step, which
costs at most one table look-up for each eight positions; steps that were taken before are remembered. Characters that
no class of the pattern tells apart are one kind of character, so that a text of many characters costs no more.

The language has what is regular: characters, `.`, classes, `\\d \\w \\s`, groups, `|`, and the quantifiers
`* + ? {m} {m,} {m,n}`. Letters, digits and white space are those of ASCII.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from operator import xor
from typing import Final

from node.graders.errors import BadAnswer
from node.graders.text import lower
from node.protocol.grading import RegexGrader

MAX_PATTERN_CHARS: Final = 1000
MAX_POSITIONS: Final = 512
MAX_REGEX_TEXT_CHARS: Final = 8_192
_MAX_NESTING: Final = 32
_MAX_REPEAT: Final = 256
_MAX_REMEMBERED: Final = 4096

Ranges = tuple[tuple[int, int], ...]

_LAST: Final = 0x10FFFF
_DIGITS: Final[Ranges] = ((48, 57),)
_WORD: Final[Ranges] = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Final[Ranges] = ((9, 13), (32, 32))
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_SPECIAL: Final = frozenset("\\.[]{}()*+?|^$")


class BadPattern(ValueError):
    """A pattern outside the language, or too large."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a pattern: whether it matches nothing, and the positions where its matches begin and end."""

    empty: bool
    first: int
    last: int


_NOTHING: Final = Part(empty=True, first=0, last=0)


def grade_regex(spec: RegexGrader, answer: str, text: str) -> float:
    """Return 1 if the pattern `answer` matches the whole text."""
    if len(text) > MAX_REGEX_TEXT_CHARS:
        return 0.0
    try:
        automaton = compile_pattern(answer, ignore_case=spec.ignore_case)
    except BadPattern:
        return 0.0
    return float(automaton.matches(lower(text) if spec.ignore_case else text))


def check_regex(spec: RegexGrader, answer: str) -> None:
    """Raise BadAnswer for a pattern outside the language."""
    try:
        compile_pattern(answer, ignore_case=spec.ignore_case)
    except BadPattern as error:
        raise BadAnswer(f"pattern {answer[:40]!r}: {error}", code="bad_regex") from error


@dataclass(slots=True)
class Automaton:
    """Positions 0 .. n - 1 of a pattern's characters, and which may follow which; bit n is the beginning."""

    classes: list[Ranges]
    follow: list[int]
    final: int
    begins: list[int]
    """The first character of each kind, ascending."""

    holding: list[int]
    """The positions that hold a character of each kind."""

    remembered: dict[tuple[int, int], int] = field(default_factory=dict)
    followers: dict[tuple[int, int], int] = field(default_factory=dict)

    def matches(self, text: str) -> bool:
        """Return whether the pattern matches all of `text`."""
        state = 1 << len(self.classes)
        for character in text:
            state = self._step(state, bisect_right(self.begins, ord(character)) - 1)
            if not state:
                return False
        return bool(state & self.final)

    def _step(self, state: int, kind: int) -> int:
        known = self.remembered.get((state, kind))
        if known is not None:
            return known
        reached = 0
        for at, byte in enumerate(state.to_bytes(len(self.follow) // 8 + 1, "little")):
            if byte:
                reached |= self._after(at, byte)
        reached &= self.holding[kind]
        if len(self.remembered) < _MAX_REMEMBERED:
            self.remembered[state, kind] = reached
        return reached

    def _after(self, at: int, byte: int) -> int:
        """Return what may follow the positions in byte `at` of a state."""
        known = self.followers.get((at, byte))
        if known is None:
            known = 0
            for bit in range(8):
                if byte >> bit & 1:
                    known |= self.follow[8 * at + bit]
            self.followers[at, byte] = known
        return known


@lru_cache(maxsize=16)
def compile_pattern(pattern: str, *, ignore_case: bool) -> Automaton:
    """Build the automaton of a pattern; raises BadPattern."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadPattern(f"longer than {MAX_PATTERN_CHARS} characters")
    parser = _Parser(pattern, ignore_case=ignore_case)
    whole = parser.alternatives(0)
    if parser.at < len(pattern):
        raise BadPattern(f"character {parser.at}: {pattern[parser.at]!r} closes nothing")
    start = 1 << len(parser.classes)
    final = whole.last | (start if whole.empty else 0)
    return Automaton(parser.classes, [*parser.follow, whole.first], final, *_kinds(parser.classes))


def _kinds(classes: list[Ranges]) -> tuple[list[int], list[int]]:
    """Return the first character of each kind, and the positions that hold that kind."""
    positions: dict[Ranges, int] = {}
    for at, ranges in enumerate(classes):
        positions[ranges] = positions.get(ranges, 0) | 1 << at
    changes = {0: 0}
    for ranges, held in positions.items():
        # Twice without is the union, in which no two ranges meet: a position begins and ends once at a character.
        for low, high in _without(_without(ranges)):
            changes[low] = changes.get(low, 0) ^ held
            changes[high + 1] = changes.get(high + 1, 0) ^ held
    begins = sorted(changes)
    return begins, list(accumulate((changes[begin] for begin in begins), xor))


class _Parser:
    """Reads a pattern by recursive descent, and collects its positions."""

    def __init__(self, pattern: str, *, ignore_case: bool) -> None:
        self._pattern, self._ignore_case = pattern, ignore_case
        self.at = 0
        self.classes: list[Ranges] = []
        self.follow: list[int] = []

    def alternatives(self, depth: int) -> Part:
        if depth > _MAX_NESTING:
            raise BadPattern(f"nested deeper than {_MAX_NESTING}")
        part = self._sequence(depth)
        while self._next() == "|":
            self.at += 1
            other = self._sequence(depth)
            part = Part(part.empty or other.empty, part.first | other.first, part.last | other.last)
        return part

    def _sequence(self, depth: int) -> Part:
        part = _NOTHING
        while self._next() not in ("", "|", ")"):
            part = self._then(part, self._repeated(depth))
        return part

    def _repeated(self, depth: int) -> Part:
        begin = len(self.classes)
        part = self._atom(depth)
        low, high = self._quantifier()
        if (low, high) == (1, 1):
            return part
        if self._next() in ("*", "+", "?", "{"):
            raise BadPattern(f"character {self.at}: a quantifier of a quantifier")

        # Each repetition has positions of its own. They are copied: to read it again costs time without a limit where
        # it has many empty alternatives, which have no positions.
        classes, follow, first = self.classes[begin:], self.follow[begin:], part
        whole = _NOTHING
        for number in range(max(low, 1) if high is None else high):
            if number:
                shift = number * len(classes)
                self._add(classes, [after << shift for after in follow])
                part = Part(first.empty, first.first << shift, first.last << shift)
            if high is None and number == max(low, 1) - 1:
                self._connect(part.last, part.first)
            whole = self._then(whole, part if number < low else Part(empty=True, first=part.first, last=part.last))
        return whole

    def _add(self, classes: list[Ranges], follow: list[int]) -> None:
        """Add positions and what follows them; raises BadPattern where they are too many."""
        if len(self.classes) + len(classes) > MAX_POSITIONS:
            raise BadPattern(f"more than {MAX_POSITIONS} characters, repetitions counted")
        self.classes += classes
        self.follow += follow

    def _then(self, left: Part, right: Part) -> Part:
        self._connect(left.last, right.first)
        return Part(
            left.empty and right.empty,
            left.first | (right.first if left.empty else 0),
            right.last | (left.last if right.empty else 0),
        )

    def _connect(self, last: int, first: int) -> None:
        while last:
            lowest = last & -last
            self.follow[lowest.bit_length() - 1] |= first
            last ^= lowest

    def _next(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _take(self, what: str) -> str:
        """Return the next character and go past it; raise BadPattern at the end, where `what` was expected."""
        character = self._next()
        if not character:
            raise BadPattern(f"ends where {what} was expected")
        self.at += 1
        return character

    def _quantifier(self) -> tuple[int, int | None]:
        """Read a quantifier as least and most; (1, 1) where there is none."""
        sign = self._next()
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if sign in simple:
            self.at += 1
            return simple[sign]
        if sign != "{":
            return 1, 1
        inside, brace, _ = self._pattern[self.at + 1 :].partition("}")
        low, comma, high = inside.partition(",")
        numbers = [part for part in (low, high) if part]
        if not brace or not low or not all(len(part) <= 3 and set(part) <= set("0123456789") for part in numbers):
            raise BadPattern(f"character {self.at}: a brace that is no quantifier; write \\{{ for the character")
        self.at += len(inside) + 2
        least = int(low)
        most = (int(high) if high else None) if comma else least
        if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise BadPattern(f"a repetition is at most {_MAX_REPEAT}, its least before its most")
        return least, most

    def _atom(self, depth: int) -> Part:
        character = self._take("a character")
        if character == "(":
            return self._group(depth)
        if character in "*+?{":
            raise BadPattern(f"character {self.at - 1}: {character!r} repeats nothing")
        if character in "^$":
            raise BadPattern(f"{character!r} is not needed: a pattern matches the whole text")
        if character in "]}":
            raise BadPattern(f"character {self.at - 1}: {character!r} closes nothing")
        if character == "[":
            return self._position(self._class())
        if character == ".":
            return self._position(_without(((10, 10),)))
        return self._position(self._folded(self._escaped() if character == "\\" else _one(character)))

    def _group(self, depth: int) -> Part:
        if self._pattern.startswith("?:", self.at):
            self.at += 2
        elif self._next() == "?":
            raise BadPattern("a group is (...) or (?:...)")
        positions = len(self.classes)
        part = self.alternatives(depth + 1)
        if self._take(")") != ")" or len(self.classes) == positions:
            raise BadPattern("a group does not end, or holds no character")
        return part

    def _position(self, ranges: Ranges) -> Part:
        self._add([ranges], [0])
        bit = 1 << (len(self.classes) - 1)
        return Part(empty=False, first=bit, last=bit)

    def _class(self) -> Ranges:
        negated = self._next() == "^"
        self.at += negated
        ranges: Ranges = ()
        while (character := self._take("]")) != "]" or not ranges:
            if character in "[]":
                raise BadPattern(f"character {self.at - 1}: write \\{character} in a class")
            found = self._escaped() if character == "\\" else _one(character)
            if self._next() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                end = self._take("a character")
                found = _between(found, self._escaped() if end == "\\" else _one(end))
            ranges += found
        ranges = self._folded(ranges)
        return _without(ranges) if negated else ranges

    def _escaped(self) -> Ranges:
        character = self._take("a character")
        if character in _CLASSES:
            return _CLASSES[character]
        if lower(character) in _CLASSES:
            return _without(_CLASSES[lower(character)])
        if character in _CONTROLS:
            return _one(_CONTROLS[character])
        if character in _SPECIAL or character in "-/ ":
            return _one(character)
        raise BadPattern(f"\\{character} is not in the language")

    def _folded(self, ranges: Ranges) -> Ranges:
        """Return what the ranges hold of a text whose letters A-Z were made lower."""
        if not self._ignore_case:
            return ranges
        upper = ((max(low, 65), min(high, 90)) for low, high in ranges)
        return ranges + tuple((low + 32, high + 32) for low, high in upper if low <= high)


def _one(character: str) -> Ranges:
    return ((ord(character), ord(character)),)


def _between(first: Ranges, last: Ranges) -> Ranges:
    """Return the characters from one to another."""
    if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1]:
        raise BadPattern("a range begins and ends with one character")
    if first[0][0] > last[0][0]:
        raise BadPattern("a range ends before it begins")
    return ((first[0][0], last[0][0]),)


def _without(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    kept: list[tuple[int, int]] = []
    at = 0
    for low, high in sorted(ranges):
        if at < low:
            kept.append((at, low - 1))
        at = max(at, high + 1)
    if at <= _LAST:
        kept.append((at, _LAST))
    return tuple(kept)
