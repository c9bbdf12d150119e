"""Rational numbers within limits: their size, powers and factors."""

from __future__ import annotations

from fractions import Fraction
from typing import Final

MAX_BITS: Final = 2048
"""Of a coefficient's numerator and denominator each."""

MAX_DIVISOR: Final = 1000
"""Divisors that are tried to take a number apart under a root; what is left counts as a prime."""

_MAX_ROOT: Final = 64


class OutsideGrammarError(ValueError):
    """An expression beyond the grammar or its limits; its text is compared instead."""


def check_size(number: Fraction) -> None:
    """Raise OutsideGrammarError for a number of more than MAX_BITS."""
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise OutsideGrammarError("a number of too many digits")


def rational_power(number: Fraction, exponent: int) -> Fraction:
    """Return a power, or raise OutsideGrammarError; the size is estimated first, so that 9^387420489 costs nothing."""
    bits = max(abs(number.numerator), number.denominator).bit_length() - 1
    if bits * abs(exponent) > MAX_BITS:
        raise OutsideGrammarError("a number of too many digits")
    if abs(number) == 1:
        exponent %= 2
    return number**exponent


def factors_of(number: int) -> list[tuple[int, int]]:
    """Take a positive number apart into (prime, count), as far as small divisors and perfect powers go."""
    found: list[tuple[int, int]] = []
    divisor = 2
    while divisor <= MAX_DIVISOR and divisor * divisor <= number:
        count = 0
        while number % divisor == 0:
            number //= divisor
            count += 1
        if count:
            found.append((divisor, count))
        divisor += 1 if divisor == 2 else 2
    if number > 1:
        found.append(_perfect_power(number))
    return found


def _perfect_power(number: int) -> tuple[int, int]:
    """Return (b, k) with b^k = number, for the highest k."""
    if number <= MAX_DIVISOR**2:
        return number, 1  # a prime: no divisor up to its square root was found
    for exponent in range(_MAX_ROOT, 1, -1):
        root = _floor_root(number, exponent)
        if root**exponent == number:
            return root, exponent
    return number, 1


def _floor_root(number: int, exponent: int) -> int:
    low, high = 1, 1 << (number.bit_length() // exponent + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**exponent <= number:
            low = middle
        else:
            high = middle - 1
    return low
