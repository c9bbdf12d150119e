"""The graders `exact/1`, `choice/1` and `number/1` (docs/protocol.md, section 5.4)."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, NamedTuple

from node.graders.errors import BadAnswer
from node.graders.text import FONT, WHITE_SPACE, after_phrase, boxed, has_box, lower
from node.protocol.grading import ChoiceGrader, ExactGrader, NumberGrader

_MARKUP: Final = WHITE_SPACE + "*_`\"'().,:;$[]"
_LEADING: Final = re.compile(r"(?P<letter>[A-Z])(?:[).:]|(?=[ \t]|\Z))(?P<rest>.*)", re.DOTALL)
_ANOTHER: Final = re.compile(r"[^A-Za-z0-9]*(?:[A-Z](?![A-Za-z0-9])|(?:or|and)(?![A-Za-z0-9]))")
_CHOICE: Final = re.compile(r"(?<![A-Za-z0-9])[A-Z](?![A-Za-z0-9])")
_MAX_NUMBER_CHARS: Final = 400
_MAX_EXPONENT: Final = 400
_PLAIN: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER: Final = re.compile(
    rf"(?P<sign>[-+]?)(?P<digits>{_PLAIN})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?"
    r"(?:/(?P<below>[0-9]+))?(?P<percent>\\?%)?"
)
_GROUPED: Final = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9]{3})")
_SHOWN: Final = re.compile(r"(?<!\\)\\[()\[\],;:! ]")
_UNIT_WITH_POWER: Final = re.compile(r"(?<=[0-9]) *[A-Za-z]+\^(?:[0-9]|\{-?[0-9]\})(?![A-Za-z0-9^])")
_BEFORE: Final = "*_`\"'([{<=~:$≈€£"
_AFTER: Final = re.compile(r"[A-Za-z°]*[*_`\"')\]}>.,;:!?$€£]*")


def grade_exact(spec: ExactGrader, answer: str, text: str) -> float:
    """Return 1 if the whole text is the answer."""
    expected = answer.strip(WHITE_SPACE)
    if not expected:
        return 0.0
    return float(lower(text) == lower(expected) if spec.ignore_case else text == expected)


def grade_choice(spec: ChoiceGrader, answer: str, text: str) -> float:
    """Return 1 if the text settles on the answer's letter, and on no other."""
    chosen = _choice(spec, text)
    return float(chosen is not None and chosen == answer.strip(_MARKUP))


def check_choice(spec: ChoiceGrader, answer: str) -> None:
    """Raise BadAnswer unless the answer is one of the letters."""
    letter = answer.strip(_MARKUP)
    if letter not in _letters(spec):
        raise BadAnswer(f"answer {answer[:40]!r} is none of the letters A-{_letters(spec)[-1]}", code="bad_choice")


def _letters(spec: ChoiceGrader) -> list[str]:
    return [chr(ord("A") + at) for at in range(spec.choices)]


def _choice(spec: ChoiceGrader, text: str) -> str | None:
    """Return the letter that the text's final statement names; None where it names none or several."""
    stated = (boxed(text) or "") if has_box(text) else after_phrase(text) or text
    leading = _LEADING.match(FONT.sub(r"\1", stated).lstrip(_MARKUP))
    # "B. Paris" is a choice; so is "B because", but for an article that begins prose without a statement.
    if leading and not _ANOTHER.match(leading["rest"]) and (stated is not text or leading[0][1:2] in (")", ".", ":")):
        return leading["letter"] if leading["letter"] in _letters(spec) else None
    letters = {letter for letter in _CHOICE.findall(stated) if letter in _letters(spec)}
    if stated is text and len(text.strip(_MARKUP)) != 1:
        return None  # prose without a statement: a letter in it may be an article
    return letters.pop() if len(letters) == 1 else None


class Stated(NamedTuple):
    """A number as it is written: its value, and whether that stands before a percent sign."""

    value: Fraction
    percent: bool


def grade_number(spec: NumberGrader, answer: str, text: str) -> float:
    """Return 1 if the last number of the text, or the only one of its last box, is as near as `spec` asks."""
    expected = _number(answer)
    given = _only_number(boxed(text) or "") if has_box(text) else _number(text)
    if expected is None or given is None:
        return 0.0
    candidates = {given.value}
    if given.percent != expected.percent:
        # "50%" and "50" may both mean what the other means, or a hundredth of it.
        candidates = {given.value, given.value / 100 if given.percent else given.value * 100}
    # The decimal that the run's description writes: 0.3, and not the binary fraction just below it.
    absolute, relative = Fraction(repr(spec.absolute)), Fraction(repr(spec.relative))
    most = max(absolute, relative * abs(expected.value))
    return float(any(abs(value - expected.value) <= most for value in candidates))


def check_number(answer: str) -> None:
    """Raise BadAnswer unless the answer is one number."""
    if len(_words(answer)) != 1 or _number(answer) is None:
        raise BadAnswer(f"answer {answer[:40]!r} is not one number", code="bad_number")


def _number(text: str) -> Stated | None:
    """Read the last word that has a digit; None where there is none, or it is more than a number."""
    words = _words_with_digits(text)
    word = words[-1] if words else ""
    if not word or len(word) > _MAX_NUMBER_CHARS:
        return None
    word = word.replace("\N{MINUS SIGN}", "-").replace("\\$", "$").rpartition("=")[2].lstrip(_BEFORE)
    if word.startswith(("-$", "-€", "-£")):
        word = "-" + word[2:]
    found = _NUMBER.match(word)
    if found is None or not _AFTER.fullmatch(word, found.end()):
        return None
    exponent, below = int(found["exponent"] or 0), int(found["below"] or 1)
    if abs(exponent) > _MAX_EXPONENT or not below:
        return None
    size = Fraction(found["digits"].replace(",", "")) * Fraction(10) ** exponent / below
    return Stated(-size if found["sign"] == "-" else size, found["percent"] is not None)


def _only_number(text: str) -> Stated | None:
    """Read the number in a text that has no other."""
    return _number(text) if len(_words_with_digits(text)) == 1 else None


def _words_with_digits(text: str) -> list[str]:
    return [word for word in _words(text) if any("0" <= letter <= "9" for letter in word)]


def _words(text: str) -> list[str]:
    """Split at ASCII white space, less what is only shown and powers of units; `50 %` is one word."""
    text = _SHOWN.sub(" ", _GROUPED.sub(",", FONT.sub(r"\1", text)))
    text = _UNIT_WITH_POWER.sub("", text)
    words: list[str] = []
    for word in text.translate(dict.fromkeys(map(ord, WHITE_SPACE), " ")).split(" "):
        if words and word.startswith(("%", "\\%")):
            words[-1] += word
        elif word:
            words.append(word)
    return words
