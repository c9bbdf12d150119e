"""Waiting for what another thread, process or machine does, with one deadline that suits a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

SECONDS = 120.0
"""A test that passes waits only as long as it has to: the deadline is for one that fails."""

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    *,
    seconds: float = SECONDS,
    what: Callable[[], object] = str,
    meanwhile: Callable[[], object] = lambda: None,
) -> T:
    """Call `condition` until it returns something true, and return that.

    `meanwhile` is called before each further try, such as a supervisor's poll. After `seconds` raise AssertionError
    with what `what()` says.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        meanwhile()
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what()}"
        time.sleep(0.02)
    return found


def is_quiet(status: Mapping[str, Any]) -> bool:
    """Return whether a coordinator's /v1/status shows a run in which no verdict can come any more."""
    slots = status.get("slots")
    return slots is not None and not slots["submitted"] and not slots["leased"]


async def eventually(condition: Callable[[], T], *, seconds: float = SECONDS, what: Callable[[], object] = str) -> T:
    """Do what `until` does, on an asyncio loop; `condition` is called on the loop and must not block."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what()}"
        await asyncio.sleep(0.02)
    return found
