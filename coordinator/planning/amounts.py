"""Machines and links as a command line names them, and quantities as a person reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from coordinator.errors import BadConfiguration

MAX_CARDS: Final = 4096
_CARDS: Final = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})GB", re.IGNORECASE)
_RATE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([kMGT])bit(?:/s)?", re.IGNORECASE)
_SCALE: Final = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class Cards:
    """`count` GPUs of `memory` bytes each."""

    count: int
    memory: int

    def __str__(self) -> str:
        return f"{self.count} x {self.memory / 1e9:.0f} GB"


def parse_cards(text: str) -> Cards:
    """Parse "4x80GB", decimal gigabytes; raises BadConfiguration."""
    found = _CARDS.fullmatch(text.replace(" ", ""))
    if found is None or int(found[1]) > MAX_CARDS:
        raise BadConfiguration(f"{text[:50]!r} names no GPUs: write their number and the memory of each, as 4x80GB")
    return Cards(int(found[1]), int(found[2]) * 10**9)


def parse_rate(text: str) -> float:
    """Parse "1Gbit" or "200Mbit" into bytes a second; raises BadConfiguration."""
    found = _RATE.fullmatch(text.replace(" ", ""))
    if found is None or float(found[1]) == 0:
        raise BadConfiguration(f"{text[:50]!r} is no rate: write bits a second, as 200Mbit or 1Gbit")
    return float(found[1]) * _SCALE[found[2].lower()] / 8


def show_bytes(count: float) -> str:
    """Format bytes with three digits, decimal."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale * 0.9995:
            return f"{count / scale:.{_digits(count / scale)}f} {unit}"
    return f"{count / 1e3:.1f} kB"


def show_seconds(seconds: float) -> str:
    """Format a duration with two or three digits."""
    for unit, scale in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.{_digits(seconds / scale)}f} {unit}"
    return f"{seconds:.{_digits(seconds)}f} s"


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2
