"""What happens to a worker, for whoever watches: each event once, in order, with the keys that docs/operating.md lists.

Events are for people and their programs. Nothing in the worker depends on them: a watcher must not raise, and must not
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Final

from node.plain_reasons import PLAIN
from node.protocol.admission import Outcome
from node.protocol.messages import Receipt
from shardcast import Report, unwatched


class Kind(StrEnum):
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

KEYS: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.STARTED: ("software", "coordinators"),
    Kind.JOINED: ("name", "coordinator"),
    Kind.AWAY: ("coordinator",),
    Kind.BACK: ("coordinator", "seconds"),
    Kind.FETCHING: ("policy",),
    Kind.FETCHED: ("policy", "bytes", "transferred_bytes", "seconds"),
    Kind.LOADED: ("policy", "seconds", "slots"),
    Kind.LEASED: (*_OF_SLOT, "lease", "expires_at"),
    Kind.GENERATED: (*_OF_SLOT, "tokens", "seconds"),
    Kind.SUBMITTED: (*_OF_SLOT, "submission"),
    Kind.ADMITTED: (*_OF_SLOT, "submission", "tokens", "log_index"),
    Kind.REJECTED: (*_OF_SLOT, "submission", "reason", "detail", "meaning", "todo", "log_index"),
    Kind.UNDECIDED: (*_OF_SLOT, "submission", "reason", "detail", "meaning", "todo", "log_index"),
    Kind.EXPIRED: (*_OF_SLOT, "seconds"),
    Kind.RETURNED: _OF_SLOT,
    Kind.LOST: (*_OF_SLOT, "why"),
    Kind.ENGINE_FAILED: ("why", "slots"),
    Kind.SUMMARY: _SUMS,
    Kind.STOPPING: (),
    Kind.ENDED: ("dismissed", *_SUMS),
}
"""What each event has besides `event`, `time`, `run` and `node`."""

Status = Callable[[], dict[str, Any]]


class Onlooker:
    """Who watches a worker; this one looks away."""

    def meet(self, status: Status) -> None:
        """The worker has joined its run, and `status` says what it is doing, ready for JSON."""

    def notice(self, kind: Kind, /, **keys: Any) -> None:
        """Something happened; `keys` are those of KEYS, but for sums."""

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Gives what is to be called with the progress of a fetch."""
        return unwatched(version)


NOBODY: Final = Onlooker()


def of_receipt(receipt: Receipt, *, detail: str) -> tuple[Kind, dict[str, Any]]:
    """The event that a verdict is; `detail` is the receipt's, made harmless."""
    keys: dict[str, Any] = {"policy": receipt.version, "slot": receipt.slot, "submission": receipt.submission}
    keys["log_index"] = receipt.log_index
    if receipt.outcome is Outcome.ADMITTED:
        return Kind.ADMITTED, keys | {"tokens": receipt.tokens}
    said = None if receipt.reason is None else PLAIN[receipt.reason]
    keys |= {
        "reason": None if receipt.reason is None else receipt.reason.value,
        "detail": detail,
        "meaning": "" if said is None else said.meaning,
        "todo": "" if said is None else said.todo,
    }
    return Kind.REJECTED if receipt.outcome is Outcome.REJECTED else Kind.UNDECIDED, keys
