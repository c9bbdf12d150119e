"""What the kinds of environments have in common: an adapter answers three queries, and refuses by `Unusable`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, Protocol

Json = dict[str, Any]
Turn = Any
"""A text; or, where the environment speaks messages, {content, tool_calls: [{id, name, arguments}]}."""


class Unusable(Exception):
    """The environment cannot answer; `code` is one of the protocol's (FaultCode)."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Adapter(Protocol):
    """One loaded environment. What it raises on account of the turns ends the rollout, for a reward of 0."""

    def loaded(self) -> Json:
        """Return problems, several_turns, speaks, tools, versions and digest, as the protocol has them."""

    def problem(self, index: int) -> Json:
        """Return prompt and messages of a problem."""

    def reply(self, index: int, turns: list[Turn]) -> Json:
        """Return text or messages after the last turn; neither where the rollout is over."""

    def reward(self, index: int, turns: list[Turn]) -> float:
        """Return the reward of all turns, of which there is at least one."""


def within_bounds(reward: Any) -> float:
    """Return a reward cut to 0 .. 1; what is no number earns nothing."""
    number = float(reward)
    return min(max(number, 0.0), 1.0) if math.isfinite(number) else 0.0


def versions(package: str | None, environment: str | None) -> Json:
    """Return the versions of Python and of two distributions, None where one is not installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, "package": _version(package), "environment": _version(environment)}


def _version(distribution: str | None) -> str | None:
    try:
        return None if distribution is None else metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class RecentValues:
    """The values of a function for the indexes asked last: several queries are about the same problem."""

    def __init__(self, make: Callable[[int], Any], *, kept: int = 64) -> None:
        self._make, self._kept = make, kept
        self._values: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._values:
            try:
                value = self._make(index)
            except (Unusable, MemoryError, OSError):
                raise
            except Exception as error:
                raise Unusable("environment_failed", f"it cannot make problem {index}: {error!r}") from error
            while len(self._values) >= self._kept:
                del self._values[next(iter(self._values))]
            self._values[index] = value
        return self._values[index]
