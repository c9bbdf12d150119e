"""Prometheus metrics of a worker, read from its own account of itself."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from node.runtime.metrics import Figure, value_at
from node.worker.events import EventKind, Onlooker, Status
from shardcast import Report

ANSWER_SECONDS: Final = 5.0


def _outcomes(status: Mapping[str, Any]) -> Mapping[str, float]:
    return {outcome: float(status[outcome]) for outcome in ("admitted", "rejected", "indeterminate")}


WORKER: Final = (
    Figure(
        "swarmproof_worker_policy_version",
        "gauge",
        "Policy in the engine; no sample before the first.",
        value_at("version"),
    ),
    Figure(
        "swarmproof_worker_newest_policy_version",
        "gauge",
        "The run's newest policy, as far as it knows; -1 before the first.",
        value_at("head_version"),
    ),
    Figure("swarmproof_worker_slots", "gauge", "Slots under way.", value_at("slots")),
    Figure(
        "swarmproof_worker_undelivered",
        "gauge",
        "Slots that are generated and have no receipt.",
        value_at("undelivered"),
    ),
    Figure("swarmproof_worker_tokens", "counter", "Tokens that were generated.", value_at("tokens")),
    Figure("swarmproof_worker_slots_generated", "counter", "Slots that were generated.", value_at("generated")),
    Figure("swarmproof_worker_verdicts", "counter", "Receipts by outcome.", _outcomes, label="outcome"),
    Figure(
        "swarmproof_worker_admitted_tokens", "counter", "Tokens of its admitted slots.", value_at("admitted_tokens")
    ),
    Figure(
        "swarmproof_worker_slots_lost", "counter", "Slots that were generated and came to nothing.", value_at("lost")
    ),
    Figure("swarmproof_worker_slots_expired", "counter", "Leases that ended before their slot.", value_at("expired")),
    Figure(
        "swarmproof_worker_engine_restarts",
        "counter",
        "Starts of the engine after it failed.",
        value_at("engine_restarts"),
    ),
    Figure(
        "swarmproof_worker_policy_switches",
        "counter",
        "Policies that took over with slots under way.",
        value_at("switches"),
    ),
    Figure(
        "swarmproof_worker_fetched_bytes",
        "counter",
        "Bytes of policies that came.",
        value_at("broadcast_bytes", "fetched"),
    ),
    Figure(
        "swarmproof_worker_coordinator_away", "gauge", "1 while no coordinator answers.", value_at("coordinator_away")
    ),
    Figure("swarmproof_worker_run_over", "gauge", "1 once the run is over.", value_at("run_is_over")),
    Figure("swarmproof_worker_neighbours", "gauge", "Peers that it has a link to.", value_at("network", "neighbours")),
)


class Asking(Onlooker):
    """Stands before another onlooker, and asks the worker that it meets whenever another thread wants to know."""

    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = onlooker
        self._met: tuple[asyncio.AbstractEventLoop, Status] | None = None

    def meet(self, status: Status) -> None:
        """Remember which status to read, and on which event loop."""
        self._met = asyncio.get_running_loop(), status
        self._onlooker.meet(status)

    def notice(self, kind: EventKind, /, **keys: Any) -> None:
        """Pass on to the wrapped onlooker."""
        self._onlooker.notice(kind, **keys)

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Pass on to the wrapped onlooker."""
        return self._onlooker.fetching(version)

    def __call__(self) -> Mapping[str, Any] | None:
        """Return the worker's status; None before it has joined, after its end, and if it does not answer."""
        if self._met is None:
            return None
        loop, status = self._met

        async def ask() -> dict[str, Any]:
            return status()

        asked = ask()
        try:
            return asyncio.run_coroutine_threadsafe(asked, loop).result(ANSWER_SECONDS)
        except (RuntimeError, TimeoutError, concurrent.futures.CancelledError):  # the loop is closed, or ends
            asked.close()
            return None
