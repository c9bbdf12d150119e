"""Counters of one worker process from its events, and the sums that reporters show."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from node.worker.events import EventKind, Status
from node.worker.proof_of_work import SOLVING

_COUNTED = {
    EventKind.LEASED: "leased",
    EventKind.GENERATED: "generated",
    EventKind.SUBMITTED: "delivered",
    EventKind.ADMITTED: "admitted",
    EventKind.REJECTED: "rejected",
    EventKind.UNDECIDED: "undecided",
    EventKind.EXPIRED: "expired",
    EventKind.RETURNED: "returned",
    EventKind.LOST: "lost",
}


@dataclass(slots=True, kw_only=True)
class SessionTally:
    """Event counters of this process; `clock` is monotonic, in seconds."""

    clock: Callable[[], float] = time.monotonic
    began: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    credit_tokens: int = 0
    has_started: bool = False
    status: Status | None = None
    """The worker's status function; None before it has joined."""
    _first_lease: float | None = None
    _last_generated: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def count(self, kind: EventKind, keys: dict[str, Any]) -> None:
        """Add one event."""
        self.has_started = True
        if kind in _COUNTED:
            self.counts[_COUNTED[kind]] += 1
        if kind is EventKind.LEASED and self._first_lease is None:
            self._first_lease = self.clock()
        if kind is EventKind.GENERATED:
            self._last_generated = self.clock()
        if kind is EventKind.ADMITTED:
            self.credit_tokens += keys["tokens"]
        if kind is EventKind.REJECTED:
            self.reasons[str(keys["reason"])] += 1

    def sums(self) -> dict[str, Any]:
        """Return the sums of the events `summary` and `ended`; `total` spans every start on this state folder."""
        now = {} if self.status is None else self.status()
        tokens = now.get("tokens", 0)
        return {
            "doing": doing(now) if self.has_started else "starting",
            "policy": now.get("version"),
            "newest_policy": newest(now),
            "seconds": round(self.clock() - self.began, 1),
            "tokens": tokens,
            "tokens_per_s": now.get("tokens_per_s", 0.0),
            "mean_tokens_per_s": self._mean(tokens, is_over=now.get("run_is_over", False)),
            "under_way": len(now.get("slots", ())),
            **{name: self.counts[name] for name in _COUNTED.values()},
            "waiting": max(0, now.get("undelivered", 0) - now.get("uploading", 0)),
            "reasons": dict(self.reasons.most_common()),
            "credit_tokens": self.credit_tokens,
            "total": {
                "admitted": now.get("admitted", 0),
                "rejected": now.get("rejected", 0),
                "credit_tokens": now.get("admitted_tokens", 0),
            },
            "standing": now.get("standing"),
        }

    def _mean(self, tokens: int, *, is_over: bool) -> float:
        """Return tokens per second from the first lease until now, once the run is over until the last slot's end."""
        if self._first_lease is None:
            return 0.0
        until = self._last_generated if is_over else self.clock()
        return round(tokens / max(until - self._first_lease, 1.0), 1)


def newest(status: dict[str, Any]) -> int | None:
    """Return the newest policy version that this worker has heard of; None before the first."""
    fetching = status.get("broadcast") or {}
    heard = [status.get("head_version", -1), fetching.get("version", -1), *status.get("held_versions", ())]
    return max((version for version in heard if version >= 0), default=None)


def doing(status: dict[str, Any]) -> str:
    """Describe what the worker is doing now; `status` is empty until it has joined."""
    if not status:
        return "looking for the run"
    said = str(status["doing"])
    if status["coordinator_away"]:
        at_work = f"; {said}" if status["slots"] else ""
        return f"waiting for the coordinator{at_work}"
    if not status["held_versions"] and status["broadcast"] is not None:
        fetching = f"fetching policy {status['broadcast']['version']}"
        said = f"{said}; {fetching}" if said.startswith(SOLVING) else fetching
    if status["uploading"]:
        slots = "slot" if status["uploading"] == 1 else "slots"
        said += f"; uploading {status['uploading']} {slots}"
    return said
