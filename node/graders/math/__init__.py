"""The grader `math/1`: answers in LaTeX or plain text that are equal as mathematics (docs/protocol.md, section 5.4)."""

from __future__ import annotations

from typing import Final

from node.graders.errors import BadAnswer
from node.graders.math.algebra import Algebra, OutsideGrammarError, Value, as_rational, rational
from node.graders.math.answers import AnswerReader, MathAnswer, Relation
from node.graders.math.tokens import MAX_MATH_CHARS, MAX_TOKENS, as_text, has_long_words, is_words, tidy, tokenize
from node.graders.text import WHITE_SPACE, after_phrase, boxed, has_box, lower
from node.protocol.grading import MathGrader

_MARKUP: Final = WHITE_SPACE + "*_`"


def grade_math(spec: MathGrader, answer: str, text: str) -> float:
    """Return 1 if the answer that the text states equals `answer`."""
    expected, given = tidy(boxed(answer) or answer), tidy(_stated(text))
    return float(bool(expected) and bool(given) and _equal(spec, expected or "", given or ""))


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
    line = (after_phrase(text) or text.rpartition("\n")[2]).strip(_MARKUP)
    pieces = line.replace(r"\$", "").replace("$$", "$").split("$")
    if len(pieces) > 2:
        return pieces[len(pieces) - 2 - (len(pieces) + 1) % 2]
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        _, mark, after = line.rpartition(opening)
        if mark and closing in after:
            return after.partition(closing)[0]
    return line


def _equal(spec: MathGrader, expected: str, given: str) -> bool:  # noqa: PLR0911
    first, second = tokenize(expected), tokenize(given)
    if not first or not second:
        return False
    if as_text(first) == as_text(second):
        return True
    words = (is_words(expected) and is_words(given)) or has_long_words(expected) or has_long_words(given)
    if words:
        return lower(as_text(first)) == lower(as_text(second))
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
        if spec.evaluated and not _is_evaluated(left, second):
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


def _is_evaluated(expected: MathAnswer, given: list[str]) -> bool:
    """Return whether nothing is left to work out in `given`, where a number is expected."""
    if isinstance(expected, Relation):
        expected = expected.right
    if not isinstance(expected, Value) or as_rational(expected) is None:
        return True
    written = "".join(given).rpartition("=")[2].replace(r"\frac", "/").translate(dict.fromkeys(map(ord, "{}()")))
    # What is left of a number, of a fraction or of a mixed one: a sign, and at most one bar.
    return written.count("/") <= 1 and set(written.lstrip("+-")) <= set("0123456789./%")
