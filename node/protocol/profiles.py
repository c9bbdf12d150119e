"""What a node says of itself for a run's pages (docs/protocol.md, 3.8): it proves nothing."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Final

from msgspec import Meta

from node.protocol.reasons import Reason, Refusal
from shardcast.wire import Wire

MAX_NICKNAME: Final = 32
MAX_HARDWARE: Final = 64
MAX_MARKS: Final = 4
"""Combining marks on one letter: Burmese has three medials and a vowel, and UTS #39 (5.4) advises against more."""

BLANK_LETTERS: Final = frozenset("\u115f\u1160\u3164\uffa0\u2800")
"""They have the category of a letter or a symbol, and no shape."""

_SHAPELESS_MARKS: Final = frozenset(
    map(chr, (0x34F, 0x17B4, 0x17B5, *range(0x180B, 0x180E), 0x180F, *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
"""The combining marks among Unicode's default ignorable characters: joiners and variation selectors."""
_LETTERS: Final = frozenset(("Lu", "Ll", "Lt", "Lm", "Lo"))
_MARKS: Final = frozenset(("Mn", "Mc"))
_PUNCTUATION: Final = frozenset(" ._-")
_OTHER_THAN_HARDWARE: Final = re.compile(r"[^A-Za-z0-9 ._()/+,:-]+")

HardwareText = Annotated[str, Meta(min_length=1, max_length=MAX_HARDWARE, pattern=r"^[A-Za-z0-9 ._()/+,:-]+\Z")]


class Hardware(Wire, frozen=True):
    """What a worker says that it computes on: "NVIDIA H200" or "CPU", its engine with the version, the dtype."""

    device: HardwareText
    engine: HardwareText
    dtype: HardwareText

    def __str__(self) -> str:
        return f"{self.device}, {self.engine}, {self.dtype}"


def hardware_of(device: str, engine: str, dtype: str) -> Hardware:
    """Make a Hardware of any texts: what its fields do not take is left out of them."""

    def text(said: str) -> str:
        return _OTHER_THAN_HARDWARE.sub(" ", said)[:MAX_HARDWARE].strip() or "unknown"

    return Hardware(device=text(device), engine=text(engine), dtype=text(dtype))


def check_nickname(name: str) -> str:
    """Return `name`; raises Refusal, with what is wrong as a sentence, if it is no nickname."""
    strange = _strange_character(name)
    if not 1 <= len(name) <= MAX_NICKNAME:
        wrong = f"A nickname has 1 to {MAX_NICKNAME} characters."
    elif strange is not None:
        wrong = f"A nickname has letters (up to {MAX_MARKS} marks each), digits, spaces and . _ - alone, "
        wrong += f"not U+{ord(strange):04X}."
    elif name != unicodedata.normalize("NFC", name):
        wrong = "A nickname is in Unicode's normal form C."
    elif name != " ".join(name.split()):
        wrong = "A nickname has no space at its ends, and no two together."
    else:
        return name
    raise Refusal(Reason.BAD_NICKNAME, wrong)


def fold_nickname(text: str) -> str:
    """Return `text` as a search compares it: without differences of case, or of spaces and `_`."""
    return " ".join(unicodedata.normalize("NFC", text.casefold()).replace("_", " ").split())


def _strange_character(name: str) -> str | None:
    """Return the first character that no nickname has there, None if there is none."""
    marks_left = 0  # of the letter before
    for character in name:
        category = unicodedata.category(character)
        if category in _MARKS:
            marks_left -= 1
            if marks_left < 0 or character in _SHAPELESS_MARKS:
                return character
            continue
        marks_left = MAX_MARKS if category in _LETTERS else 0
        if character in BLANK_LETTERS or not (category in _LETTERS or category == "Nd" or character in _PUNCTUATION):
            return character
    return None
