"""Worker events for observers: each once, in order, with the keys that docs/operating.md lists.

Nothing in the worker depends on them; an observer must neither raise nor block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Final

from node.protocol.admission import Outcome
from node.protocol.messages import Receipt
from shardcast import Report, no_watch


class EventKind(StrEnum):
    """Names of events; they keep their meaning across releases."""

    STARTED = "started"
    JOINED = "joined"
    AWAY = "coordinator_away"
    BACK = "coordinator_back"
    FETCHING = "policy_fetching"
    FETCHED = "policy_fetched"
    LOADED = "policy_loaded"
    LEASED = "slot_leased"
    GENERATED = "slot_generated"
    SUBMITTED = "slot_submitted"
    ADMITTED = "slot_admitted"
    REJECTED = "slot_rejected"
    UNDECIDED = "slot_undecided"
    EXPIRED = "slot_expired"
    RETURNED = "slot_returned"
    LOST = "slot_lost"
    ENGINE_FAILED = "engine_failed"
    SUMMARY = "summary"
    STOPPING = "stopping"
    ENDED = "ended"


_OF_SLOT: Final = ("policy", "slot")
_SUMS: Final = (
    "doing",
    "policy",
    "newest_policy",
    "seconds",
    "tokens",
    "tokens_per_s",
    "mean_tokens_per_s",
    "under_way",
    "leased",
    "generated",
    "delivered",
    "admitted",
    "rejected",
    "undecided",
    "expired",
    "returned",
    "lost",
    "waiting",
    "reasons",
    "credit_tokens",
    "total",
    "standing",
)

KEYS: Final[Mapping[EventKind, tuple[str, ...]]] = {
    EventKind.STARTED: ("software", "coordinators"),
    EventKind.JOINED: ("name", "coordinator"),
    EventKind.AWAY: ("coordinator",),
    EventKind.BACK: ("coordinator", "seconds"),
    EventKind.FETCHING: ("policy",),
    EventKind.FETCHED: ("policy", "bytes", "transferred_bytes", "seconds"),
    EventKind.LOADED: ("policy", "seconds", "slots"),
    EventKind.LEASED: (*_OF_SLOT, "lease", "expires_at"),
    EventKind.GENERATED: (*_OF_SLOT, "tokens", "seconds"),
    EventKind.SUBMITTED: (*_OF_SLOT, "submission"),
    EventKind.ADMITTED: (*_OF_SLOT, "submission", "tokens", "log_index"),
    EventKind.REJECTED: (*_OF_SLOT, "submission", "reason", "detail", "meaning", "todo", "log_index"),
    EventKind.UNDECIDED: (*_OF_SLOT, "submission", "reason", "detail", "meaning", "todo", "log_index"),
    EventKind.EXPIRED: (*_OF_SLOT, "seconds"),
    EventKind.RETURNED: _OF_SLOT,
    EventKind.LOST: (*_OF_SLOT, "why"),
    EventKind.ENGINE_FAILED: ("why", "slots"),
    EventKind.SUMMARY: _SUMS,
    EventKind.STOPPING: (),
    EventKind.ENDED: ("dismissed", *_SUMS),
}
"""Keys of each event besides `event`, `time`, `run` and `node`."""

Status = Callable[[], dict[str, Any]]


class Observer:
    """Observer of a worker; this base class ignores everything."""

    def attach(self, status: Status) -> None:
        """Handle the join of the run; `status` returns the worker's status, ready for JSON."""

    def notify(self, kind: EventKind, /, **keys: Any) -> None:
        """Handle an event; `keys` are those of KEYS without the sums."""

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Context manager around one fetch; yields its progress callback."""
        return no_watch(version)


NO_OBSERVER: Final = Observer()


def of_receipt(receipt: Receipt, *, detail: str) -> tuple[EventKind, dict[str, Any]]:
    """Return the event of a verdict; `detail` is the receipt's, made printable."""
    keys: dict[str, Any] = {"policy": receipt.version, "slot": receipt.slot, "submission": receipt.submission}
    keys["log_index"] = receipt.log_index
    if receipt.outcome is Outcome.ADMITTED:
        return EventKind.ADMITTED, keys | {"tokens": receipt.tokens}
    reason = receipt.reason
    keys |= {
        "reason": None if reason is None else reason.value,
        "detail": detail,
        "meaning": "" if reason is None else reason.meaning,
        "todo": "" if reason is None else reason.todo,
    }
    return EventKind.REJECTED if receipt.outcome is Outcome.REJECTED else EventKind.UNDECIDED, keys
