r"""Expressions from tokens to exact values, by recursive descent (docs/protocol.md, section 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, factorial
from typing import Final

from node.graders.math.algebra import MAX_FACTORIAL, Algebra, Value, as_rational, rational
from node.graders.math.numbers import OutsideGrammarError
from node.graders.math.tokens import FUNCTIONS

MAX_DEPTH: Final = 32
MAX_NUMBER_CHARS: Final = 400
_CLOSING: Final = {"(": ")", "[": "]", "{": "}"}
# fmt: off
_GREEK: Final = frozenset({
    r"\alpha", r"\beta", r"\gamma", r"\delta", r"\epsilon", r"\varepsilon", r"\zeta", r"\eta", r"\theta",
    r"\vartheta", r"\iota", r"\kappa", r"\lambda", r"\mu", r"\nu", r"\xi", r"\pi", r"\rho", r"\sigma", r"\tau",
    r"\phi", r"\varphi", r"\chi", r"\psi", r"\omega", r"\Gamma", r"\Delta", r"\Theta", r"\Lambda", r"\Xi", r"\Pi",
    r"\Sigma", r"\Phi", r"\Psi", r"\Omega", r"\ell", r"\hbar",
})
# fmt: on
_FUNCTION_TOKENS: Final = frozenset("\\" + name for name in FUNCTIONS)
_INVERSES: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}


class ExpressionParser:
    """Reads one expression from tokens, and works its value out as it reads, from the left."""

    def __init__(self, tokens: Sequence[str], algebra: Algebra) -> None:
        self._tokens, self._algebra = list(tokens), algebra
        self._at = 0
        self._depth = 0

    def expression(self) -> Value:
        """Return the value of all tokens; raises OutsideGrammarError."""
        value = self._sum()
        if self._at < len(self._tokens):
            raise OutsideGrammarError(f"unexpected {self._next()!r}")
        return value

    def _next(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def _skip(self, *tokens: str) -> None:
        for current in tokens:
            if self._next() != current:
                raise OutsideGrammarError(f"{current!r} is missing")
            self._at += 1

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise OutsideGrammarError("nested too deep")

    def _sum(self) -> Value:
        self._deeper()
        total = self._signed()
        while self._next() in ("+", "-"):
            sign = self._next()
            self._at += 1
            term = self._product()
            total = self._algebra.add(total, self._algebra.negate(term) if sign == "-" else term)
        self._depth -= 1
        return total

    def _signed(self) -> Value:
        if self._next() in ("+", "-"):
            sign = self._next()
            self._at += 1
            term = self._product()
            return self._algebra.negate(term) if sign == "-" else term
        return self._product()

    def _product(self) -> Value:
        total = self._power()
        while True:
            current = self._next()
            if current in ("*", "/"):
                self._at += 1
                factor = self._signed_power()
                total = self._algebra.divide(total, factor) if current == "/" else self._algebra.multiply(total, factor)
            elif self._begins_factor(current):
                total = self._algebra.multiply(total, self._power())
            else:
                return total

    def _signed_power(self) -> Value:
        if self._next() != "-":
            return self._power()
        self._at += 1
        return self._algebra.negate(self._power())

    def _begins_factor(self, current: str) -> bool:
        """Return whether a factor without a sign of multiplication follows; a number cannot be one."""
        return (
            current in ("(", "{", "[", r"\frac", r"\sqrt", r"\binom") or is_name(current) or current in _FUNCTION_TOKENS
        )

    def _power(self) -> Value:
        self._deeper()
        base = self._postfixed()
        if self._next() == "^":
            self._at += 1
            base = self._algebra.power(base, self._signed_power())
        self._depth -= 1
        return base

    def _postfixed(self) -> Value:
        value = self._primary()
        if self._next() == "!":
            self._at += 1
            if self._next() == "!":
                raise OutsideGrammarError("a double factorial")
            value = self._factorial(value)
        elif self._next() == "%":
            self._at += 1
            value = self._algebra.divide(value, rational(100))
        return value

    def _primary(self) -> Value:
        current = self._next()
        if _is_number(current):
            return self._number()
        if current in _CLOSING:
            return self._bracketed()
        if current == "|":
            self._at += 1
            value = self._sum()
            self._skip("|")
            number = as_rational(value)
            return self._algebra.function("abs", value) if number is None else rational(abs(number))
        if is_name(current):
            return self._algebra.variable(self._name())
        # Arguments without braces, as in \sqrt\sqrt 2, nest without a sum or a power between them.
        self._deeper()
        value = self._application() if current in _FUNCTION_TOKENS else self._command()
        self._depth -= 1
        return value

    def _command(self) -> Value:
        current = self._next()
        self._at += 1
        if current == r"\frac":
            upper = self._argument()
            return self._algebra.divide(upper, self._argument())
        if current == r"\sqrt":
            return self._radical()
        if current == r"\binom":
            return self._binomial(self._argument(), self._argument())
        raise OutsideGrammarError(f"unexpected {current!r}")

    def _bracketed(self) -> Value:
        closing = _CLOSING[self._next()]
        self._at += 1
        value = self._sum()
        self._skip(closing)
        return value

    def _number(self) -> Value:
        """Read a number: whole, decimal, recurring (`0.1\\overline{6}`) or mixed (`3\\frac{1}{2}`, `3 1/2`)."""
        current = self._next()
        self._at += 1
        if _is_whole(current):
            if self._next() == "." and self._next(1) == r"\overline":
                self._at += 1
                return self._recurring(current + ".")
            if self._next() == r"\frac" and (part := self._plain_fraction()) is not None:
                return rational(int(current) + part)
            if _is_whole(self._next()) and self._next(1) == "/" and _is_whole(self._next(2)) and int(self._next(2)):
                part = Fraction(int(self._next()), int(self._next(2)))
                self._at += 3
                return rational(int(current) + part)
        elif self._next() == r"\overline":
            return self._recurring(current)
        if len(current) > MAX_NUMBER_CHARS:
            raise OutsideGrammarError("a number of too many digits")
        return rational(Fraction(current))

    def _recurring(self, begin: str) -> Value:
        self._skip(r"\overline", "{")
        digits = self._next()
        if not _is_whole(digits) or not _is_whole(begin.replace(".", "")):
            raise OutsideGrammarError("an overline over what is not digits")
        self._at += 1
        self._skip("}")
        places = len(begin.partition(".")[2])
        period = Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        return rational(Fraction(begin + "0") + period)

    def _plain_fraction(self) -> Fraction | None:
        r"""Go past `\frac{1}{2}` with digits only, and return it if it is less than 1; None leaves all as it is."""
        begin = self._at
        self._at += 1
        parts = []
        for _ in range(2):
            if self._next() == "{" and self._next(2) == "}":
                parts.append(self._next(1))
                self._at += 3
            elif _is_whole(self._next()):
                parts.append(self._digit())
        if len(parts) == 2 and all(_is_whole(part) for part in parts) and int(parts[0]) < int(parts[1]):
            return Fraction(int(parts[0]), int(parts[1]))
        self._at = begin
        return None

    def _digit(self) -> str:
        """Take one digit of a number without braces, as LaTeX does."""
        current = self._next()
        self._tokens[self._at : self._at + 1] = list(current)
        self._at += 1
        return current[0]

    def _argument(self) -> Value:
        """Read what stands in braces after a command, or its next character."""
        if self._next() == "{":
            return self._bracketed()
        if _is_whole(self._next()):
            return rational(int(self._digit()))
        return self._primary()

    def _name(self) -> str:
        """Read a variable with its index, if it has one."""
        name = self._next()
        self._at += 1
        if self._next() != "_":
            return name
        self._at += 1
        index = [self._next()]
        self._at += 1
        if index == ["{"]:
            index = []
            while self._next() not in ("}", ""):
                index.append(self._next())
                self._at += 1
            self._skip("}")
        if not index or not all(_is_number(part) or is_name(part) for part in index):
            raise OutsideGrammarError("an index that is no name or number")
        return f"{name}_{''.join(index)}"

    def _radical(self) -> Value:
        degree = rational(2)
        if self._next() == "[":
            degree = self._bracketed()
        inside = self._bracketed() if self._next() in ("{", "(") else self._primary()
        return self._algebra.power(inside, self._algebra.divide(rational(1), degree))

    def _application(self) -> Value:
        r"""Read a function with what it is of: `\sin^{2} x`, `\log_{2}(8)`, `\ln 3x`."""
        name = self._next()[1:]
        self._at += 1
        base, exponent = None, None
        while self._next() in ("_", "^"):
            mark = self._next()
            self._at += 1
            value = self._bracketed() if self._next() == "{" else self._primary()
            base, exponent = (value, exponent) if mark == "_" else (base, value)
        if self._next() in _CLOSING:
            argument = self._bracketed()
        else:
            argument = self._power()
            while is_name(self._next()):
                argument = self._algebra.multiply(argument, self._power())
        if exponent is not None and name in _INVERSES and as_rational(exponent) == -1:
            name, exponent = _INVERSES[name], None
        value = self._applied(name, base, argument)
        return value if exponent is None else self._algebra.power(value, exponent)

    def _applied(self, name: str, base: Value | None, argument: Value) -> Value:
        if base is not None and name != "log":
            raise OutsideGrammarError("an index of a function")
        if name == "exp":
            return self._algebra.power(self._algebra.variable("e"), argument)
        if name == "ln":
            return self._algebra.logarithm(argument)
        if name == "log":
            below = self._algebra.logarithm(rational(10) if base is None else base)
            return self._algebra.divide(self._algebra.logarithm(argument), below)
        if name in ("sin", "cos", "tan"):
            return self._algebra.trigonometric(name, argument)
        return self._algebra.function(name, argument)

    def _factorial(self, value: Value) -> Value:
        number = as_rational(value)
        if number is None:
            return self._algebra.function("!", value)
        if number.denominator != 1 or not 0 <= number <= MAX_FACTORIAL:
            raise OutsideGrammarError("a factorial that is too large")
        return rational(factorial(int(number)))

    def _binomial(self, upper: Value, lower: Value) -> Value:
        first, second = as_rational(upper), as_rational(lower)
        if first is None or second is None:
            return self._algebra.function("binom", upper, lower)
        if first.denominator != 1 or second.denominator != 1 or not 0 <= second <= first <= MAX_FACTORIAL:
            raise OutsideGrammarError("a binomial coefficient that is too large")
        return rational(comb(int(first), int(second)))


def _is_whole(current: str) -> bool:
    return bool(current) and all("0" <= character <= "9" for character in current)


def _is_number(current: str) -> bool:
    return bool(current) and current != "." and current[0] in ".0123456789"


def is_name(current: str) -> bool:
    """Return whether a token is a variable: a letter a-z or A-Z, or a Greek one."""
    return (len(current) == 1 and current.isascii() and current.isalpha()) or current in _GREEK
