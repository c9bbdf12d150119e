"""Prometheus metrics of a worker, read from its status."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from node.runtime.metrics import StatusMetric, counter, gauge
from node.worker.events import EventKind, Observer, Status
from shardcast import Report

ANSWER_SECONDS: Final = 5.0


def _outcomes(status: Mapping[str, Any]) -> Mapping[str, float]:
    return {outcome: float(status[outcome]) for outcome in ("admitted", "rejected", "indeterminate")}


WORKER: Final = (
    gauge("swarmproof_worker_policy_version", "Policy in the engine; no sample before the first.", "version"),
    gauge(
        "swarmproof_worker_newest_policy_version",
        "The run's newest policy, as far as it knows; -1 before the first.",
        "head_version",
    ),
    gauge("swarmproof_worker_slots", "Slots under way.", "slots"),
    gauge("swarmproof_worker_undelivered", "Slots that are generated and have no receipt.", "undelivered"),
    counter("swarmproof_worker_tokens", "Tokens that were generated.", "tokens"),
    counter("swarmproof_worker_slots_generated", "Slots that were generated.", "generated"),
    StatusMetric("swarmproof_worker_verdicts", "counter", "Receipts by outcome.", _outcomes, label="outcome"),
    counter("swarmproof_worker_admitted_tokens", "Tokens of its admitted slots.", "admitted_tokens"),
    counter("swarmproof_worker_slots_lost", "Slots that were generated and came to nothing.", "lost"),
    counter("swarmproof_worker_slots_expired", "Leases that ended before their slot.", "expired"),
    counter("swarmproof_worker_engine_restarts", "Starts of the engine after it failed.", "engine_restarts"),
    counter("swarmproof_worker_policy_switches", "Policies that took over with slots under way.", "switches"),
    counter("swarmproof_worker_fetched_bytes", "Bytes of policies that came.", "broadcast_bytes", "fetched"),
    gauge("swarmproof_worker_coordinator_away", "1 while no coordinator answers.", "coordinator_away"),
    gauge("swarmproof_worker_run_over", "1 once the run is over.", "run_is_over"),
    gauge("swarmproof_worker_neighbours", "Peers that it has a link to.", "network", "neighbours"),
)


class StatusProbe(Observer):
    """Observer wrapper through which another thread reads the worker's status."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._met: tuple[asyncio.AbstractEventLoop, Status] | None = None

    def attach(self, status: Status) -> None:
        """Keep the status function and its event loop."""
        self._met = asyncio.get_running_loop(), status
        self._observer.attach(status)

    def notify(self, kind: EventKind, /, **keys: Any) -> None:
        """Pass on to the wrapped observer."""
        self._observer.notify(kind, **keys)

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Pass on to the wrapped observer."""
        return self._observer.fetching(version)

    def __call__(self) -> Mapping[str, Any] | None:
        """Return the worker's status; None before it has joined, after its end, or on a timeout."""
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
