"""The worker's status: its counters, and status.json for observers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from node.worker.delivery import Delivery
from node.worker.engine import EngineHost
from node.worker.policies import PolicyFeed
from node.worker.slots import ActiveSlots
from node.worker.state import VerdictTally


def figures(
    *, tally: VerdictTally, slots: ActiveSlots, host: EngineHost, feed: PolicyFeed, delivery: Delivery
) -> dict[str, Any]:
    """Return the worker's counters and current work, ready for JSON."""
    return {
        "version": host.version,
        "held_versions": feed.versions(),
        "slots": slots.status(),
        "undelivered": len(delivery),
        "uploading": delivery.unsent,
        "generated": slots.finished,
        "tokens": slots.speed.tokens,
        "tokens_per_s": round(slots.speed.tokens_per_second, 1),
        "segments": host.segments,
        "switches": host.switches,
        "engine_restarts": host.restarts,
        "admitted": tally.admitted,
        "rejected": tally.rejected,
        "indeterminate": tally.indeterminate,
        "lost": delivery.lost,
        "expired": slots.expired,
        "admitted_tokens": tally.tokens,
        "reasons": dict(tally.reasons),
        "broadcast": feed.status(),
        "broadcast_bytes": {"fetched": feed.fetched.bytes_in, "results": feed.fetched.result_bytes},
    }


def save_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace status.json. It is for observers only: a full disk must not end the worker."""
    path = folder / "status.json"
    temporary = path.with_suffix(".json.tmp")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(status))
        temporary.rename(path)
