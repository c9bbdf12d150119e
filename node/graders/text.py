"""What all graders do to text first. ASCII only: what Unicode calls a letter or digit changes with Python's version."""

from __future__ import annotations

import re
from typing import Final

MAX_TEXT_CHARS: Final = 65_536
"""Characters after the thoughts that are graded; a longer text earns nothing."""

WHITE_SPACE: Final = " \t\n\r\f\v"
_END_OF_THOUGHT: Final = "</think>"
_LOWER: Final = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}
_BOXES: Final = ("\\boxed{", "\\fbox{")
_PHRASE: Final = re.compile(r"answer[*_`]*(?: is|:)")
MARKUP: Final = WHITE_SPACE + "*_`"
FONT: Final = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|boldsymbol|operatorname|mbox)\s*\{([^{}]*)\}",
    re.ASCII,
)


def graded_text(completion: str) -> str | None:
    """Return the text after the last `</think>`, or all if there is none, trimmed; None if it is too long."""
    text = completion.rpartition(_END_OF_THOUGHT)[2]
    return None if len(text) > MAX_TEXT_CHARS else text.strip(WHITE_SPACE)


def lower(text: str) -> str:
    """Return `text` with A-Z in lower case, and everything else as it is."""
    return text.translate(_LOWER)


def boxed(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` or `\fbox{...}` holds; None where there is none, or it does not end."""
    begin = max(at + len(box) if (at := text.rfind(box)) >= 0 else -1 for box in _BOXES)
    if begin < 0:
        return None
    depth, at = 1, begin
    while at < len(text):
        if text[at] == "\\":
            at += 1  # a backslash takes the next character with it: \{ is no brace
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return text[begin:at].strip(WHITE_SPACE)
        at += 1
    return None


def has_box(text: str) -> bool:
    r"""Return whether a `\boxed{` or `\fbox{` begins somewhere."""
    return any(box in text for box in _BOXES)


def after_phrase(text: str) -> str | None:
    """Return the rest of the line after the last `answer is` or `answer:`, or the next line if that is empty.

    In either case of letters, with markup behind `answer` or not; None without the phrase.
    """
    begin = max((found.end() for found in _PHRASE.finditer(lower(text))), default=None)
    if begin is None:
        return None
    lines = (line.strip(WHITE_SPACE).removeprefix(":").strip(WHITE_SPACE) for line in text[begin:].split("\n"))
    return next((line for line in lines if line.strip(MARKUP)), "")
