"""Answers of more than one expression: sets, tuples, intervals, equations and inequalities, and when two are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

from node.graders.math.algebra import Algebra, Value, as_rational
from node.graders.math.numbers import OutsideGrammarError
from node.graders.math.parser import MAX_DEPTH, ExpressionParser, is_name

MAX_ITEMS: Final = 64
_OPENING: Final = frozenset({"(", "[", "{", r"\{"})
_CLOSING: Final = frozenset({")", "]", "}", r"\}"})
_RELATIONS: Final = frozenset({"=", "<", ">", r"\le", r"\ge", r"\ne"})
_TURNED: Final = {">": "<", r"\ge": r"\le"}
_UNORDERED: Final = frozenset({"set", "union"})
_MATRICES: Final = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "array"})


@dataclass(frozen=True, slots=True)
class Collection:
    """Several answers: `kind` is `set`, `union`, `matrix`, `row`, or the two brackets of a tuple or interval."""

    kind: str
    items: tuple[MathAnswer, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality of two expressions, `=`, `<`, `\\le` or `\\ne`; `named`: that side is a name."""

    sign: str
    left: Value
    right: Value
    named: bool
    right_named: bool


@dataclass(frozen=True, slots=True)
class Infinity:
    """An end of an interval; nothing can be computed with it."""

    negative: bool


MathAnswer = Value | Collection | Relation | Infinity


class AnswerReader:
    """Reads answers, and compares them, within one Algebra."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra

    # -- reading

    def read(self, tokens: Sequence[str], depth: int = 0) -> MathAnswer:
        """Return what the tokens of a whole answer say; raises OutsideGrammarError."""
        if tokens[:1] == ["="]:  # "\\approx 5" and "= 5" are 5
            tokens = tokens[1:]
        if tokens[1:2] == [r"\in"] and is_name(tokens[0]):
            tokens = tokens[2:]
        if depth > MAX_DEPTH or not tokens:
            raise OutsideGrammarError("nothing, or nested too deep")
        for kind, separators in (("union", (r"\cup",)), ("set", (",", ";"))):
            parts = _split(tokens, separators)
            if len(parts) > 1:
                return self._collection(kind, parts, depth)
        if list(tokens) in ([r"\emptyset"], [r"\{", r"\}"]):
            return Collection("set", ())
        if tokens[0] == r"\begin":
            return self._matrix(tokens, depth)
        if _is_enclosed(tokens):
            inside = _split(tokens[1:-1], (",", ";"))
            if tokens[0] == r"\{":
                return self._collection("set", inside, depth)
            if tokens[0] in "([" and len(inside) > 1:
                return self._collection(tokens[0] + tokens[-1], inside, depth)
        return self._statement(tokens, depth)

    def _collection(self, kind: str, parts: Sequence[Sequence[str]], depth: int) -> Collection:
        if len(parts) > MAX_ITEMS:
            raise OutsideGrammarError("too many items")
        items = [self.read(part, depth + 1) for part in parts]
        if kind == "set":
            # The items of "\pm 2, 3" are three.
            items = [
                inner
                for item, part in zip(items, parts, strict=True)
                for inner in (item.items if _is_set(item) and r"\pm" in part else (item,))
            ]
            items = [item for at, item in enumerate(items) if not any(self.equal(item, other) for other in items[:at])]
        return Collection(kind, tuple(items))

    def _matrix(self, tokens: Sequence[str], depth: int) -> Collection:
        end = len(tokens) - 1 - list(reversed(tokens)).index(r"\end") if r"\end" in tokens else 0
        begin = list(tokens).index("}") + 1 if "}" in tokens else 0
        name = tokens[1:begin]
        if "".join(name[1:-1]) not in _MATRICES or list(tokens[end + 1 :]) != list(name):
            raise OutsideGrammarError("an environment that is no matrix")
        rows = [row for row in _split(tokens[begin:end], ("\\\\",)) if row]
        return Collection(
            "matrix", tuple(self._collection("row", _split(row, ("&",)), depth + 1) for row in rows[: MAX_ITEMS + 1])
        )

    def _statement(self, tokens: Sequence[str], depth: int) -> MathAnswer:
        signs = [token for token in _outer(tokens) if token in _RELATIONS]
        parts = _split(tokens, tuple(_RELATIONS))
        if not signs:
            return self._plain(tokens, depth)
        if len(signs) > 1 and set(signs) == {"="}:
            # "x = 1/2 = 0.5" says what x is in its last part.
            parts, signs = [parts[0], parts[-1]], ["="]
        interval = self._interval(parts, signs, depth)
        if interval is not None:
            return interval
        if len(parts) != 2:
            raise OutsideGrammarError("a chain of relations")
        if signs == ["="] and r"\pm" in parts[1] and _is_label(parts[0]):
            return self._plain(parts[1], depth)
        if signs[0] in _TURNED:
            parts, signs = [parts[1], parts[0]], [_TURNED[signs[0]]]
        right = self.read(parts[1], depth + 1)
        if not isinstance(right, tuple):  # x = (1, 2), or A = {1, 2}
            if signs != ["="] or not _is_label(parts[0]):
                raise OutsideGrammarError("a relation of what is no expression")
            return right
        named = _is_label(parts[0])
        left = self._algebra.variable("".join(parts[0])) if named else self._expression(parts[0])
        return Relation(signs[0], left, right, named, _is_label(parts[1]))

    def _interval(self, parts: Sequence[Sequence[str]], signs: Sequence[str], depth: int) -> Collection | None:
        """Return the interval that `1 < x \\le 2` or `x > 3` says; None if it is something else."""
        if not (set(signs) <= {"<", r"\le"} or set(signs) <= {">", r"\ge"}):
            return None
        if signs[0] in _TURNED:
            parts, signs = parts[::-1], [_TURNED[sign] for sign in signs[::-1]]
        names = [at for at, part in enumerate(parts) if len(part) == 1 and is_name(part[0])]
        if len(names) != 1 or len(parts) > 3 or (len(parts) == 3 and names != [1]):
            return None
        low = self.read(parts[names[0] - 1], depth + 1) if names[0] else Infinity(negative=True)
        high = self.read(parts[names[0] + 1], depth + 1) if names[0] + 1 < len(parts) else Infinity(negative=False)
        opening = "[" if names[0] and signs[0] == r"\le" else "("
        closing = "]" if names[0] + 1 < len(parts) and signs[-1] == r"\le" else ")"
        return Collection(opening + closing, (low, high))

    def _plain(self, tokens: Sequence[str], depth: int) -> MathAnswer:
        if list(tokens) in ([r"\infty"], ["+", r"\infty"], ["-", r"\infty"]):
            return Infinity(negative=tokens[0] == "-")
        if list(tokens).count(r"\pm") == 1:
            at = list(tokens).index(r"\pm")
            both = [[*tokens[:at], sign, *tokens[at + 1 :]] for sign in ("+", "-")]
            return self._collection("set", both, depth)
        return self._expression(tokens)

    def _expression(self, tokens: Sequence[str]) -> Value:
        return ExpressionParser(tokens, self._algebra).expression()

    # -- comparing

    def equal(self, left: MathAnswer, right: MathAnswer) -> bool:
        """Return whether two answers are one: an equation that says what a name is stands for that."""
        left, right = _single(left), _single(right)
        if isinstance(left, Relation) and isinstance(right, Relation):
            return self._equal_relations(left, right)
        left, right = self.stated(left), self.stated(right)
        if isinstance(left, Value) and isinstance(right, Value):
            return self._algebra.equal(left, right)
        if isinstance(left, Collection) and isinstance(right, Collection):
            return self._equal_collections(left, right)
        return isinstance(left, Infinity) and left == right

    def stated(self, answer: MathAnswer) -> MathAnswer:
        """Return the value of `x = 5`, of `5 = x` and of `2 + 3 = 5`; other answers as they are."""
        answer = _single(answer)
        if not isinstance(answer, Relation) or answer.sign != "=":
            return answer
        if not answer.named and answer.right_named:
            return answer.left
        return answer.right if answer.named or as_rational(answer.left) is not None else answer

    def _equal_relations(self, left: Relation, right: Relation) -> bool:
        if left.sign != right.sign:
            return False
        sides = [self._algebra.add(one.left, self._algebra.negate(one.right)) for one in (left, right)]
        ratio = self._algebra.proportional(*sides)
        return ratio is not None and (ratio > 0 or left.sign in ("=", r"\ne"))

    def _equal_collections(self, left: Collection, right: Collection) -> bool:
        if left.kind != right.kind or len(left.items) != len(right.items):
            return False
        if left.kind not in _UNORDERED:
            return all(self.equal(one, other) for one, other in zip(left.items, right.items, strict=True))
        missing = list(right.items)
        for item in left.items:
            found = next((at for at, other in enumerate(missing) if self.equal(item, other)), None)
            if found is None:
                return False
            del missing[found]
        return True


def _single(answer: MathAnswer) -> MathAnswer:
    """Return the only item of a set; another answer as it is."""
    return answer.items[0] if _is_set(answer) and len(answer.items) == 1 else answer


def _is_set(answer: MathAnswer) -> TypeGuard[Collection]:
    return isinstance(answer, Collection) and answer.kind == "set"


def _is_label(tokens: Sequence[str]) -> bool:
    """Return whether tokens name something: `x`, `x_1`, `f(x)`, or a Greek letter."""
    if not tokens or not is_name(tokens[0]):
        return False
    rest = list(tokens[1:])
    return not rest or rest[0] == "_" or (len(rest) == 3 and rest[0] == "(" and is_name(rest[1]) and rest[2] == ")")


def _levels(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each token with the number of brackets around it."""
    depth = 0
    for token in tokens:
        depth -= token in _CLOSING
        yield token, depth
        depth += token in _OPENING


def _outer(tokens: Sequence[str]) -> list[str]:
    return [token for token, depth in _levels(tokens) if depth == 0]


def _split(tokens: Sequence[str], separators: Sequence[str]) -> list[list[str]]:
    """Split at separators that stand in no bracket."""
    parts: list[list[str]] = [[]]
    for token, depth in _levels(tokens):
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _is_enclosed(tokens: Sequence[str]) -> bool:
    """Return whether the first token is a bracket that the last one closes."""
    outside = [at for at, (_, depth) in enumerate(_levels(tokens)) if depth == 0]
    return len(tokens) > 1 and tokens[0] in _OPENING and tokens[-1] in _CLOSING and outside == [0, len(tokens) - 1]
