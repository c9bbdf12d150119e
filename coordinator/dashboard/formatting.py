"""Formatting of numbers, times and codes."""

from __future__ import annotations

import math
import time
from typing import Final

from node.protocol.reasons import Reason

NOTHING: Final = "-"
_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None, digits: int = 3) -> str:
    """Format whole numbers below 100,000 with separators, others with `digits` digits and a unit."""
    if value is None:
        return NOTHING
    if not math.isfinite(value) or abs(value) > 1e300:
        return "not finite"
    if value == int(value) and abs(value) < 100_000:
        return f"{int(value):,}"
    short = float(f"{value:.{digits}g}")
    for size, unit in _UNITS:
        if abs(short) >= size:
            return f"{short / size:.{digits}g} {unit}" if abs(short) < 1000 * size else f"{short / size:,.0f} {unit}"
    return f"{short:.{digits}g}"


def size(count: int) -> str:
    """Format a number of bytes with a decimal unit."""
    short = next(((count / size, unit) for size, unit in _UNITS if count >= size), None)
    return f"{count} bytes" if short is None else f"{short[0]:.3g} {short[1]}B"


def seconds(value: float | None) -> str:
    """Format a duration in its two largest units."""
    if value is None:
        return NOTHING
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def ago(at: float, now: float) -> str:
    """Format how long before `now` the moment `at` was."""
    return "now" if now - at < 2 else f"{seconds(now - at)} ago"


def clock(at: float) -> str:
    """Format a moment in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def iso(at: float) -> str:
    """Format a moment for machines (RFC 3339, UTC)."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def minute(at: float, *, days: bool = False) -> str:
    """Format a moment for an axis, in UTC."""
    return time.strftime("%d %b" if days else "%H:%M", time.gmtime(at))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def name_of(reason: Reason | str | None) -> str:
    """Return a reason's code without its underscores."""
    return "" if reason is None else str(getattr(reason, "value", reason)).replace("_", " ")
