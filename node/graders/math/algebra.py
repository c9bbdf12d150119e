"""Exact algebra of expressions: two are equal where they have one normal form (docs/protocol.md, section 5.4).

A value is a quotient of sums. A sum maps monomials to rational coefficients; a monomial is a product of generators with
rational exponents. Generators are variables, pi and e among them; i, with i^2 = -1; prime numbers under a root; roots
of sums; powers with variables in the exponent; and functions of a value, of which nothing is known but that equal
arguments give equal values. Roots of different primes are linearly independent over the rationals (Besicovitch, 1940),
so numbers with square roots, cube roots and so on are told apart exactly, without floating point.

Everything is counted, so that no expression costs much: see the limits here and in `node.graders.math.numbers`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd
from typing import Final, NamedTuple

from node.graders.math.numbers import OutsideGrammarError, check_size, factors_of, rational_power

MAX_PRODUCTS: Final = 10_000
"""Products of two terms, over all of one comparison."""

MAX_TERMS: Final = 256
MAX_GENERATORS: Final = 16
"""In one term: without a limit, 10,000 products of terms of 75 variables take seconds."""

MAX_SUM_POWER: Final = 32
MAX_FACTORIAL: Final = 200

Generator = tuple[str, int, int]
Monomial = tuple[tuple[Generator, Fraction], ...]
Sum = dict[Monomial, Fraction]

IMAGINARY: Final[Generator] = ("i", 0, 0)
_ONE: Final[Sum] = {(): Fraction(1)}
_POSITIVE: Final = ("\\pi", "e")
_SQUARES_OF_SINES: Final = {
    Fraction(0): Fraction(0),
    Fraction(1, 6): Fraction(1, 4),
    Fraction(1, 4): Fraction(1, 2),
    Fraction(1, 3): Fraction(3, 4),
    Fraction(1, 2): Fraction(1),
}


class Value(NamedTuple):
    """A quotient of sums; the lower one is not zero."""

    upper: Sum
    lower: Sum


def rational(number: Fraction | int) -> Value:
    """Return a number as a value."""
    exact = Fraction(number)
    check_size(exact)
    return Value({(): exact} if exact else {}, _ONE)


@dataclass(slots=True)
class Algebra:
    """The arithmetic of one comparison: what it has named so far, and how many products it may still form."""

    products_left: int = MAX_PRODUCTS
    named: dict[Hashable, int] = field(default_factory=dict)
    bases: dict[int, Sum] = field(default_factory=dict)

    # -- values

    def variable(self, name: str) -> Value:
        """Return the value of a variable or constant; `i` is the imaginary unit."""
        generator = IMAGINARY if name == "i" else ("v", self._number_of(name), 0)
        return Value({((generator, Fraction(1)),): Fraction(1)}, _ONE)

    def function(self, name: str, *arguments: Value) -> Value:
        """Return an application of which nothing is known but its name and arguments."""
        generator = ("f", self._number_of((name, tuple(self._key(argument) for argument in arguments))), 0)
        return Value({((generator, Fraction(1)),): Fraction(1)}, _ONE)

    def add(self, left: Value, right: Value) -> Value:
        if left.lower == right.lower:
            return self._quotient(_added(left.upper, right.upper), left.lower)
        upper = _added(self._times(left.upper, right.lower), self._times(right.upper, left.lower))
        return self._quotient(upper, self._times(left.lower, right.lower))

    def negate(self, value: Value) -> Value:
        return Value({monomial: -number for monomial, number in value.upper.items()}, value.lower)

    def multiply(self, left: Value, right: Value) -> Value:
        return self._quotient(self._times(left.upper, right.upper), self._times(left.lower, right.lower))

    def divide(self, left: Value, right: Value) -> Value:
        return self.multiply(left, self._inverse(right))

    def equal(self, left: Value, right: Value) -> bool:
        """Return whether two values are one."""
        return self._times(left.upper, right.lower) == self._times(right.upper, left.lower)

    def proportional(self, left: Value, right: Value) -> Fraction | None:
        """Return the rational number by which `right` has to be multiplied to be `left`; None if there is none."""
        first, second = self._times(left.upper, right.lower), self._times(right.upper, left.lower)
        if not first or first.keys() != second.keys():
            return None
        ratios = {first[monomial] / second[monomial] for monomial in first}
        return ratios.pop() if len(ratios) == 1 else None

    def power(self, base: Value, exponent: Value) -> Value:
        number = as_rational(exponent)
        if number is None:
            return self._symbolic_power(base, exponent)
        if not base.upper:
            if number <= 0:
                raise OutsideGrammarError("zero to the power of what is not positive")
            return base
        if number < 0:
            return self._inverse(self.power(base, rational(-number)))
        if number.denominator == 1:
            return Value(self._whole_power(base.upper, int(number)), self._whole_power(base.lower, int(number)))
        return self.divide(self._root(base.upper, number), self._root(base.lower, number))

    def logarithm(self, value: Value) -> Value:
        """Return the natural logarithm: of a positive rational number the sum over its primes, else a function."""
        number = as_rational(value)
        if number is None or number <= 0:
            return rational(1) if self.equal(value, self.variable("e")) else self.function("ln", value)
        total = rational(0)
        for whole, sign in ((number.numerator, 1), (number.denominator, -1)):
            for prime, count in factors_of(whole):
                total = self.add(total, self.multiply(rational(sign * count), self.function("ln", rational(prime))))
        return total

    def trigonometric(self, name: str, argument: Value) -> Value:
        """Return sin, cos or tan: exactly at multiples of pi/6 and pi/4, else as a function."""
        turn = as_rational(self.divide(argument, self.variable("\\pi")))
        if turn is None or 12 % turn.denominator or turn.denominator == 12:
            return self.function(name, argument)
        sine, cosine = self._sine(turn), self._sine(turn + Fraction(1, 2))
        return {"sin": sine, "cos": cosine}.get(name) or self.divide(sine, cosine)

    def _sine(self, turn: Fraction) -> Value:
        """Return sin(turn * pi) for a turn whose denominator is 1, 2, 3, 4 or 6."""
        turn %= 2
        sign, turn = (-1, turn - 1) if turn >= 1 else (1, turn)
        square = _SQUARES_OF_SINES[min(turn, 1 - turn)]
        return (
            rational(0)
            if not square
            else Value(self._times(rational(sign).upper, self._number_root(square, Fraction(1, 2)).upper), _ONE)
        )

    # -- sums

    def _times(self, left: Sum, right: Sum) -> Sum:
        if right == _ONE:
            return left
        self.products_left -= len(left) * len(right)
        if self.products_left < 0:
            raise OutsideGrammarError("too many products")
        result: Sum = {}
        for first, many in left.items():
            for second, more in right.items():
                _accumulate(result, self._reduced(many * more, first + second))
        return result

    def _reduced(self, number: Fraction, factors: Monomial) -> Sum:
        """Return a product of generators in normal form."""
        exponents: dict[Generator, Fraction] = {}
        for generator, exponent in factors:
            exponents[generator] = exponents.get(generator, Fraction(0)) + exponent
        roots: list[tuple[Sum, int]] = []
        for generator, exponent in exponents.items():
            whole = exponent.numerator // exponent.denominator
            if generator[0] == "p":
                number *= rational_power(Fraction(generator[1]), whole)
                exponents[generator] = exponent - whole
            elif generator == IMAGINARY:
                number *= -1 if whole // 2 % 2 else 1
                exponents[generator] = exponent % 2
            elif generator[0] == "r" and whole:
                exponents[generator] = exponent - whole
                roots.append((self.bases[generator[1]], whole))
        check_size(number)
        monomial = tuple(sorted((generator, exponent) for generator, exponent in exponents.items() if exponent))
        if len(monomial) > MAX_GENERATORS:
            raise OutsideGrammarError("a term of too many factors")
        result: Sum = {monomial: number} if number else {}
        for base, whole in roots:
            result = self._times(result, self._whole_power(base, whole))
        return result

    def _whole_power(self, base: Sum, exponent: int) -> Sum:
        if len(base) == 1:
            ((monomial, number),) = base.items()
            raised = tuple((generator, count * exponent) for generator, count in monomial)
            return self._reduced(rational_power(number, exponent), raised)
        if exponent > MAX_SUM_POWER:
            raise OutsideGrammarError("a sum to a high power")
        result = _ONE
        for _ in range(exponent):
            result = self._times(base, result)
        return result

    def _quotient(self, upper: Sum, lower: Sum) -> Value:
        if not lower:
            raise OutsideGrammarError("division by zero")
        if lower == _ONE or len(lower) > 1:
            return Value(upper, lower)
        ((monomial, number),) = lower.items()
        if any(generator[0] == "r" for generator, _ in monomial):
            return Value(upper, lower)
        inverse = self._reduced(1 / number, tuple((generator, -exponent) for generator, exponent in monomial))
        return Value(self._times(inverse, upper), _ONE)

    def _inverse(self, value: Value) -> Value:
        if not value.upper:
            raise OutsideGrammarError("division by zero")
        return self._quotient(value.lower, value.upper)

    # -- roots and powers

    def _root(self, base: Sum, exponent: Fraction) -> Value:
        """Return a sum to the power of a positive fraction."""
        if len(base) == 1:
            ((monomial, number),) = base.items()
            positive = all(self._is_positive(generator) for generator, _ in monomial)
            alone = len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0][0] in ("v", "f", "E")
            if positive or (alone and number > 0):
                raised = Value(
                    self._reduced(Fraction(1), tuple((one, many * exponent) for one, many in monomial)), _ONE
                )
                return self.multiply(self._number_root(number, exponent), raised)
        content = _content(base)
        rest = {monomial: number / content for monomial, number in base.items()}
        simpler = self._denested(rest) if exponent.denominator == 2 else None
        if simpler is not None:
            return self.multiply(
                self._number_root(content, exponent), self.power(simpler, rational(exponent.numerator))
            )
        name = self._number_of(frozenset(rest.items()))
        self.bases[name] = rest
        root = self._reduced(Fraction(1), ((("r", name, 0), exponent),))
        return self.multiply(self._number_root(content, exponent), Value(root, _ONE))

    def _denested(self, base: Sum) -> Value | None:
        """Return the square root of a + b, a > 0 rational and b^2 rational, as a sum of two roots if it is one."""
        number, others = base.get(()), [monomial for monomial in base if monomial]
        if number is None or number <= 0 or len(others) != 1 or any(one[0] != "p" for one, _ in others[0]):
            return None
        square = self._reduced(base[others[0]] ** 2, others[0] + others[0])
        inner = number**2 - square[()] if square.keys() == {()} else Fraction(-1)
        if inner < 0 or any(
            count % 2 for part in (inner.numerator, inner.denominator) for _, count in factors_of(part)
        ):
            return None
        root = self._number_root(inner, Fraction(1, 2)).upper.get((), Fraction(0)) if inner else Fraction(0)
        first, second = (
            self._number_root(half, Fraction(1, 2)) if half else rational(0)
            for half in ((number + root) / 2, (number - root) / 2)
        )
        return self.add(first, second if base[others[0]] > 0 else self.negate(second))

    def _is_positive(self, generator: Generator) -> bool:
        return generator[0] == "p" or any(generator == ("v", self.named.get(name), 0) for name in _POSITIVE)

    def _number_root(self, number: Fraction, exponent: Fraction) -> Value:
        sign = _ONE
        if number < 0:
            if exponent.denominator % 2:
                sign = rational((-1) ** (exponent.numerator % 2)).upper
            elif exponent.denominator == 2:
                sign = self._reduced(Fraction(1), ((IMAGINARY, Fraction(exponent.numerator)),))
            else:
                raise OutsideGrammarError("an even root of a negative number")
        factors = [(prime, count) for prime, count in factors_of(abs(number.numerator))]
        factors += [(prime, -count) for prime, count in factors_of(number.denominator)]
        primes = tuple((("p", prime, 0), count * exponent) for prime, count in factors)
        return Value(self._times(sign, self._reduced(Fraction(1), primes)), _ONE)

    def _symbolic_power(self, base: Value, exponent: Value) -> Value:
        """Return a power whose exponent has variables: one generator for each base and each term of the exponent."""
        if exponent.lower != _ONE or base.lower != _ONE or not base.upper:
            return self.function("^", base, exponent)
        constant = exponent.upper.get(())
        result = self.power(base, rational(constant)) if constant else rational(1)
        for monomial, number in exponent.upper.items():
            if monomial:
                result = self.multiply(result, Value(self._generators_of_power(base.upper, monomial, number), _ONE))
        return result

    def _generators_of_power(self, base: Sum, exponent: Monomial, times: Fraction) -> Sum:
        term = self._number_of(exponent)
        if len(base) > 1:
            return self._reduced(Fraction(1), ((("E", self._number_of(frozenset(base.items())), term), times),))
        ((monomial, number),) = base.items()
        bases: list[tuple[Hashable, Fraction]] = [(generator, many) for generator, many in monomial]
        bases += [(prime, Fraction(count)) for prime, count in factors_of(abs(number.numerator))]
        bases += [(prime, Fraction(-count)) for prime, count in factors_of(number.denominator)]
        bases += [(-1, Fraction(1))] * (number < 0)
        factors = tuple((("E", self._number_of(("base", one)), term), many * times) for one, many in bases)
        return self._reduced(Fraction(1), factors)

    # -- names

    def _number_of(self, thing: Hashable) -> int:
        return self.named.setdefault(thing, len(self.named))

    def _key(self, value: Value) -> Hashable:
        """Return what values of one normal form share; a quotient is scaled to the coefficient of its first term."""
        scale = value.lower[min(value.lower)]
        return tuple(frozenset((monomial, number / scale) for monomial, number in part.items()) for part in value)


def as_rational(value: Value) -> Fraction | None:
    """Return the number that a value is; None if it has anything else in it."""
    if not value.upper:
        return Fraction(0)
    if value.lower != _ONE or value.upper.keys() != {()}:
        return None
    return value.upper[()]


def _added(left: Sum, right: Sum) -> Sum:
    result = dict(left)
    _accumulate(result, right)
    return result


def _accumulate(result: Sum, other: Sum) -> None:
    """Add `other` to `result`, in place."""
    for monomial, number in other.items():
        total = result.get(monomial, Fraction(0)) + number
        check_size(total)
        if total:
            result[monomial] = total
        else:
            result.pop(monomial, None)
    if len(result) > MAX_TERMS:
        raise OutsideGrammarError("a sum of too many terms")


def _content(base: Sum) -> Fraction:
    """Return the greatest common divisor of the coefficients: of numerators, over the common denominator."""
    upper, lower = 0, 1
    for number in base.values():
        upper = gcd(upper, number.numerator)
        lower = lower * number.denominator // gcd(lower, number.denominator)
    content = Fraction(upper, lower)
    check_size(content)
    return content
