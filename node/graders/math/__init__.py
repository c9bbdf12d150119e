"""The grader `math/1`: answers in LaTeX or plain text that are equal as mathematics (docs/protocol.md, section 5.4)."""

from __future__ import annotations

import re
from typing import Final

from node.graders.errors import BadAnswer
from node.graders.math.algebra import Algebra, Value, as_rational, rational
from node.graders.math.answers import AnswerReader, MathAnswer
from node.graders.math.numbers import OutsideGrammarError
from node.graders.math.tokens import BOLD, MAX_MATH_CHARS, MAX_TOKENS, has_long_words, is_words, tidy, tokenize
from node.graders.text import MARKUP, WHITE_SPACE, after_phrase, boxed, has_box, lower
from node.protocol.grading import MathGrader

_PLAIN: Final = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_ARGUMENT: Final = rf"(?:[0-9]|\{{ (?:[+-] )?{_PLAIN} \}})"
_EVALUATED: Final = re.compile(
    rf"(?:[+-] )?(?:{_PLAIN}(?: [.])?(?: \\overline \{{ [0-9]+ \}})?|(?:[0-9]+ )?{_PLAIN} / {_PLAIN}"
    rf"|(?:(?P<whole>[0-9]+) )?\\frac (?P<upper>{_ARGUMENT}) ?(?P<lower>{_ARGUMENT}))(?: %)?"
)
"""Tokens, with spaces between them, of a number of which nothing is left to work out."""

_NAME: Final = r"(?:[A-Za-z]|\\[A-Za-z]+)"
_NAMED: Final = re.compile(rf"(?:{_NAME}(?: _(?: [A-Za-z0-9]+| \{{ [^{{}}]* \}})+)?(?: \( {_NAME} \))? )?=")
"""Tokens of what may stand before a number: `=` alone, or behind a variable with an index or one argument."""

_BETWEEN: Final = WHITE_SPACE + ","
_ENDS_WITH_OR: Final = re.compile(r"(?<![a-z\\])or\Z")
_BEGINS_WITH_OR: Final = re.compile(r"or(?![a-z])")
_JOINTS: Final = frozenset({"", "or", "and"})

_PAIRS: Final = (["(", ")"], ["[", "]"], ["{", "}"], [r"\{", r"\}"])


def grade_math(spec: MathGrader, answer: str, text: str) -> float:
    """Return 1 if the answer that the text states equals `answer`."""
    expected, stated = tidy(boxed(answer) or answer), _stated(text)
    if not expected:
        return 0.0
    # "100,200" is a number, but may be two where two are expected.
    readings = dict.fromkeys([tidy(stated), tidy(stated, listed=True) if "," in expected else None])
    return float(any(_equal(spec, expected, given) for given in readings if given))


def check_math(answer: str) -> None:
    """Raise BadAnswer for an answer of which nothing is left to compare, or too much."""
    expected = tidy(boxed(answer) or answer)
    if expected is None:
        raise BadAnswer(f"the answer has more than {MAX_MATH_CHARS} characters", code="long_answer")
    if not tokenize(expected):
        raise BadAnswer(f"nothing of answer {answer[:40]!r} is left to compare", code="empty_answer")


def _stated(text: str) -> str:
    """Return what a text says is its answer: in the last box, else after `answer is`, else in its last line."""
    if has_box(text):
        return boxed(text) or ""
    text = BOLD.sub(r"\1", _in_one_line(text))
    line = (after_phrase(text) or text.rpartition("\n")[2]).strip(MARKUP)
    dollars = line.replace(r"\$", "").replace("$$", "$").split("$")
    for pieces in (dollars, _pieces(line, r"\(", r"\)"), _pieces(line, r"\[", r"\]")):
        if len(pieces) > 2:
            listed = _last_of(pieces)
            return line if listed is None else listed
    return line


def _pieces(line: str, opening: str, closing: str) -> list[str]:
    """Split a line at its pairs of marks: what is outside, and at odd indexes what is inside."""
    first, *others = line.split(opening)
    pieces = [first]
    for other in others:
        inside, mark, after = other.partition(closing)
        if mark:
            pieces += [inside, after]
        else:
            pieces[-1] += opening + other
    return pieces


def _last_of(pieces: list[str]) -> str | None:
    """Return what the last pair of marks holds, as a list with those that commas, `or` and `and` join to it.

    None where an `or` stands beside them: then they are not all of the answer.
    """
    begin = end = len(pieces) - 2 - (len(pieces) + 1) % 2
    while begin > 1 and lower(pieces[begin - 1]).strip(_BETWEEN) in _JOINTS and pieces[begin - 1].strip(WHITE_SPACE):
        begin -= 2
    before, after = (lower(pieces[at]).strip(_BETWEEN) for at in (begin - 1, end + 1))
    if _ENDS_WITH_OR.search(before) or _BEGINS_WITH_OR.match(after):
        return None
    return " , ".join(pieces[begin : end + 1 : 2])


def _in_one_line(text: str) -> str:
    r"""Return the text with `$$…$$` and `\[…\]` in one line each."""
    pieces = text.split("$$")
    pieces[1 : len(pieces) - 1 : 2] = [piece.replace("\n", " ") for piece in pieces[1 : len(pieces) - 1 : 2]]
    first, *displays = "$$".join(pieces).split(r"\[")
    for display in displays:
        inside, closing, after = display.partition(r"\]")
        first += r"\[" + (inside.replace("\n", " ") if closing else inside) + closing + after
    return first


def _equal(spec: MathGrader, expected: str, given: str) -> bool:  # noqa: PLR0911
    first, second = tokenize(expected), tokenize(given)
    if not first or not second:
        return False
    if _bare(first) == _bare(second):
        return True
    words = (is_words(expected) and is_words(given)) or has_long_words(expected) or has_long_words(given)
    if words:
        return [lower(token) for token in first] == [lower(token) for token in second]
    if max(len(first), len(second)) > MAX_TOKENS:
        return False
    percents = [tokens[-1] == "%" for tokens in (first, second)]
    algebra = Algebra()
    reader = AnswerReader(algebra)
    try:
        left, right = (
            reader.read(tokens[:-1] if percent else tokens)
            for tokens, percent in zip((first, second), percents, strict=True)
        )
        if spec.evaluated and _is_rational(reader.stated(left)) and not _is_evaluated(second):
            return False
        if reader.equal(left, right):
            return True
        # "50%" may be what "0.5" says, but not the other way round: 0.5% is neither 50 nor 0.5.
        percent, other = (left, right) if percents[0] else (right, left)
        if percents[0] == percents[1] or not isinstance(percent, Value) or not isinstance(other, Value):
            return False
        return algebra.equal(algebra.divide(percent, rational(100)), other)
    except OutsideGrammarError:
        return False


def _bare(tokens: list[str]) -> list[str]:
    """Return tokens without the braces around a single one that stands below or above: `x_{1}` is `x_1`."""
    kept: list[str] = []
    for current in tokens:
        kept.append(current)
        if current == "}" and len(kept) > 3 and kept[-3] == "{" and kept[-4] in ("_", "^"):
            kept[-3:] = [kept[-2]]
    return kept


def _is_rational(answer: MathAnswer) -> bool:
    return isinstance(answer, Value) and as_rational(answer) is not None


def _is_evaluated(given: list[str]) -> bool:
    """Return whether nothing is left to work out in `given`: what stands side by side may be a product."""
    begin = len(given) - given[::-1].index("=") if "=" in given else 0
    if begin and not _NAMED.fullmatch(" ".join(given[:begin])):
        return False
    written = given[begin:]
    if (written[:1] + written[-1:]) in _PAIRS:
        written = written[1:-1]
    found = _EVALUATED.fullmatch(" ".join(written))
    if found is None or found["whole"] is None:
        return found is not None
    # A whole number before a fraction is a mixed number only where that is less than 1.
    upper, lower_part = (found[name].strip("{ }") for name in ("upper", "lower"))
    return upper.isdigit() and lower_part.isdigit() and int(upper) < int(lower_part)
