r"""Answers in LaTeX or plain text as tokens (docs/protocol.md, section 5.4).

Everything that is only shown is taken away: spaces, sizes of brackets, fonts, currency, degrees, units. What is left is
spelled one way, so that the tokens are also the text that is compared where an answer is no mathematics.
"""

from __future__ import annotations

import re
from typing import Final

from node.graders.text import FONT, WHITE_SPACE, lower

MAX_MATH_CHARS: Final = 1000
MAX_TOKENS: Final = 400

_CHARACTERS: Final = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{MULTIPLICATION SIGN}": "*", "\N{MIDDLE DOT}": "*",
    "\N{DOT OPERATOR}": "*", "\N{DIVISION SIGN}": "/", "\N{GREEK SMALL LETTER PI}": r"\pi ", "\N{INFINITY}": r"\infty ",
    "\N{SQUARE ROOT}": r"\sqrt ", "\N{LESS-THAN OR EQUAL TO}": r"\le ", "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
    "\N{NOT EQUAL TO}": r"\ne ", "\N{UNION}": r"\cup ", "\N{EMPTY SET}": r"\emptyset ", "\N{ELEMENT OF}": r"\in ",
    "\N{PLUS-MINUS SIGN}": r"\pm ", "\N{DEGREE SIGN}": " ", "\N{SUPERSCRIPT TWO}": "^{2}",
    "\N{SUPERSCRIPT THREE}": "^{3}", "\N{VULGAR FRACTION ONE HALF}": r"\frac{1}{2}",
    "\N{VULGAR FRACTION ONE QUARTER}": r"\frac{1}{4}", "\N{VULGAR FRACTION THREE QUARTERS}": r"\frac{3}{4}",
    "\N{NO-BREAK SPACE}": " ", "\N{EURO SIGN}": " ", "\N{POUND SIGN}": " ",
    "~": " ", "\N{ALMOST EQUAL TO}": "=",
}  # fmt: skip
_CHARACTERS_TABLE: Final = str.maketrans(_CHARACTERS)

_SHOWN: Final = frozenset(
    {r"\left", r"\right", r"\big", r"\Big", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\displaystyle", r"\textstyle"}
    | {
        r"\limits",
        r"\quad",
        r"\qquad",
        r"\,",
        r"\;",
        r"\:",
        r"\!",
        r"\ ",
        r"\$",
        r"\(",
        r"\)",
        r"\[",
        r"\]",
        r"\degree",
    }
)
"""Commands that change what an answer looks like, and not what it is."""

_SYNONYMS: Final = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\cdot": "*", r"\times": "*", r"\ast": "*",
    r"\div": "/", r"\leq": r"\le", r"\leqslant": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\neq": r"\ne",
    r"\approx": "=",
    r"\lt": "<", r"\gt": ">", r"\%": "%", r"\varnothing": r"\emptyset", r"\lbrace": r"\{", r"\rbrace": r"\}",
    r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
}  # fmt: skip

FUNCTIONS: Final = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "exp"}
)
_NAMES: Final = {"pi": r"\pi", "sqrt": r"\sqrt", "infinity": r"\infty", "oo": r"\infty"}
_NAMES_AND_FUNCTIONS: Final = _NAMES | {name: "\\" + name for name in FUNCTIONS}

_POWER_OF_UNIT: Final = re.compile(r"\s*\^\s*(?:[0-9]|\{\s*-?[0-9]\s*\})", re.ASCII)
_DEGREES: Final = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", re.ASCII)
_UNITS: Final = re.compile(
    r"(?<=[0-9}\)%])[ ]+(?:[A-Za-z]{2,}|[A-Za-z]{2,}(?:\^[0-9]|\^\{[0-9]\}))(?:[ /]+[A-Za-z]+)*\Z"
)
_AT_THE_END: Final = re.compile(r"(?:\\[,;:! ]|[.,; \t\n\r\f\v$])++\Z")
BOLD: Final = re.compile(r"(?<![A-Za-z0-9)}\]])\*\*([^*]+)\*\*(?![A-Za-z0-9({\[\\])")
_BRACKET: Final = re.compile(r"\\[{}]|[()\[\]]")
_NO_UNITS: Final = frozenset(
    {
        "or",
        "and",
        "not",
        "no",
        "never",
        "more",
        "less",
        "fewer",
        "than",
        "least",
        "most",
        "over",
        "under",
        "above",
        "below",
    }
)
"""Words that say something else than in what a number is counted."""

_BEFORE_UNIT: Final = re.compile(r"[0-9})](?:[ ]|\\[,;: ])+\Z")
_SEPARATOR: Final = re.compile(r"(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])")
_THOUSANDS: Final = re.compile(r"(?<![0-9.,}])[0-9]{1,3}(?:(?:,|\{,\}|\\,|\\!|,\\!)[0-9]{3})+(?!,?[0-9])")
_BARE_WORDS: Final = re.compile(r"[A-Za-z]{2,}(?:[ '-]+[A-Za-z]+)*\Z")
_TOKEN: Final = re.compile(
    r"\\[A-Za-z]+|\\.|(?:[0-9]+\.[0-9]+|[0-9]+|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?|[A-Za-z]+|[^ \t\n\r\f\v$]",
    re.DOTALL,
)


def tidy(answer: str, *, listed: bool = False) -> str | None:
    """Return an answer with fonts, units and the like taken away; None if it is too long.

    Args:
        answer: An answer in LaTeX or plain text.
        listed: Whether a comma alone separates items everywhere, and never thousands.
    """
    text = answer.strip(WHITE_SPACE)
    if len(text) > MAX_MATH_CHARS:
        return None
    text = _DEGREES.sub(" ", BOLD.sub(r"\1", text).translate(_CHARACTERS_TABLE)).replace("**", "^")
    text = text.replace(">=", r"\ge ").replace("<=", r"\le ").replace(" !=", r" \ne ")
    text = _AT_THE_END.sub("", _without_fonts(text)).strip(WHITE_SPACE + "$")
    text = _THOUSANDS.sub(lambda found: _ungrouped(found, listed=listed), text)
    without_units = _UNITS.sub("", text)
    words = {lower(word) for word in re.findall(r"[A-Za-z]+", text[len(without_units) :])}
    if not words & (_NO_UNITS | _NAMES_AND_FUNCTIONS.keys()):
        text = without_units
    return text.strip(WHITE_SPACE)


def is_words(text: str) -> bool:
    """Return whether a tidied text is words, and no product of variables: `no` is not `on`."""
    return bool(_BARE_WORDS.match(text)) and text not in _NAMES


def has_long_words(text: str) -> bool:
    """Return whether a tidied text has words that are too long for products of variables."""
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]{4,}", text.partition(r"\begin")[0])
    return any(word not in _NAMES_AND_FUNCTIONS for word in words)


def tokenize(text: str) -> list[str]:
    """Return the tokens of a tidied text: numbers, letters, commands, and single characters."""
    tokens: list[str] = []
    for token in _TOKEN.findall(_SEPARATOR.sub(",", text)):
        known = _SYNONYMS.get(token, token)
        if known in _SHOWN or (known == "," and tokens[-1:] == [","]):
            continue
        if known[0].isascii() and known.isalpha():
            tokens += _letters(known)
        else:
            tokens.append(known)
    return tokens[: MAX_TOKENS + 1]


def _letters(word: str) -> list[str]:
    """Return a plain word as the function or constant that it names, or else as its letters."""
    return [_NAMES_AND_FUNCTIONS[word]] if word in _NAMES_AND_FUNCTIONS else list(word)


def _without_fonts(text: str) -> str:
    """Unwrap text: a separator, a function's name, a letter or a whole answer stays; units go, with their powers."""
    pieces: list[str] = []
    at = 0
    for found in FONT.finditer(text):
        pieces.append(text[at : found.start()])
        at = found.end()
        inside = found[1].strip(WHITE_SPACE)
        alone = not (text[: found.start()] + text[at:]).strip(WHITE_SPACE + ".$")
        spaced = text[: found.start()] + (" " if found[1][:1] == " " else "")
        if lower(inside).strip(" ,") in ("or", "and"):
            pieces.append(",")
        elif (
            len(inside) == 1
            and inside.isascii()
            and inside.isalpha()
            and inside not in "ei"
            and _BEFORE_UNIT.search(spaced)
        ):
            at = _end_of_power(text, at)
        elif alone or len(inside) <= 1 or any("0" <= letter <= "9" for letter in inside):
            pieces.append(inside)
        elif {lower(word) for word in re.findall(r"[A-Za-z]+", inside)} & _NO_UNITS:
            pieces.append(f" {inside} ")
        elif inside in _NAMES_AND_FUNCTIONS:
            pieces.append(_NAMES_AND_FUNCTIONS[inside] + " ")
        else:
            pieces.append(" ")
            at = _end_of_power(text, at)
    return "".join([*pieces, text[at:]])


def _end_of_power(text: str, at: int) -> int:
    """Return where the power of a unit that ends at `at` ends, or `at` if it has none."""
    power = _POWER_OF_UNIT.match(text, at)
    return power.end() if power else at


def _ungrouped(found: re.Match[str], *, listed: bool) -> str:
    """Return the digits of a number; within brackets, or if `listed`, a comma alone separates items."""
    if re.fullmatch("[0-9,]+", found[0]):
        brackets = [bracket[-1] in "([{" for bracket in _BRACKET.findall(found.string[: found.start()])]
        if listed or 2 * sum(brackets) > len(brackets):
            return found[0]
    return re.sub("[^0-9]", "", found[0])
