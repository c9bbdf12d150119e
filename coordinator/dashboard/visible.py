"""Sanitising untrusted text for display; HTML escaping is the templates'.

Names control, bidirectional (Trojan Source, CVE-2021-42574), zero-width and other format characters, and limits
combining marks and length.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from markupsafe import Markup, escape

from node.protocol.profiles import BLANK_LETTERS, MAX_MARKS

_PLAIN_BLANKS: Final = frozenset(" \n")
_NAMED: Final = {"\n": "↵\n", "\t": "⇥", "\r": "␍", "\x00": "␀", "\x1b": "␛", "\x7f": "␡"}
_HIDDEN: Final = frozenset(("Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"))
_MARKS: Final = frozenset(("Mn", "Me", "Mc"))


def visible(text: str, *, most: int = 200, lines: bool = False) -> str:
    """Return `text` with hidden characters named as ⟨U+202E⟩, truncated to `most` characters.

    With `lines`, line breaks are kept behind their mark.
    """
    shown: list[str] = []
    marks = 0
    for character in text[:most]:
        if unicodedata.category(character) in _MARKS:
            marks += 1
            if marks <= MAX_MARKS:
                shown.append(character if shown else f"\u25cc{character}")
            continue
        _close_pile(shown, marks)
        marks = 0
        shown.append(_shown(character, lines=lines))
    _close_pile(shown, marks)
    if len(text) > most:
        shown.append(f"… ({len(text) - most:,} more)")
    return "".join(shown)


def _close_pile(shown: list[str], marks: int) -> None:
    if marks > MAX_MARKS:
        shown.append(f"⟨+{marks - MAX_MARKS} marks⟩")


def _shown(character: str, *, lines: bool) -> str:
    if character == "\n":
        return _NAMED["\n"] if lines else "↵"
    if character in _NAMED:
        return _NAMED[character]
    blank = character.isspace() and character not in _PLAIN_BLANKS
    if blank or character in BLANK_LETTERS or unicodedata.category(character) in _HIDDEN:
        return f"⟨U+{ord(character):04X}⟩"
    return character


def with_code(text: str) -> Markup:
    """Return `text` as HTML in which what stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  (it is escaped)


def short(digest: str) -> str:
    """Shorten a digest or key to what people compare."""
    return f"{digest[:8]}…{digest[-4:]}" if len(digest) > 16 else visible(digest)
