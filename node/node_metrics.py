"""What a contributor's processes show Prometheus: a worker and a peer, by their own accounts of themselves.

A relay's figures are those of its server (`shardcast.metrics`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from node.metrics import Figure
from node.worker_events import Kind, Onlooker, Status
from shardcast import Report

ANSWER_SECONDS: Final = 5.0


def _at(*keys: str) -> Callable[[Mapping[str, Any]], float | Mapping[str, float] | None]:
    """The number under these keys, or the length of a list, or numbers by their names; None where there is none."""

    def value(status: Mapping[str, Any]) -> float | Mapping[str, float] | None:
        found: Any = status
        for key in keys:
            found = None if found is None else found[key]
        return found if found is None or isinstance(found, Mapping) else _number(found)

    return value


def _number(found: Any) -> float:
    return float(len(found) if isinstance(found, list | tuple) else found)


def _outcomes(status: Mapping[str, Any]) -> Mapping[str, float]:
    return {outcome: float(status[outcome]) for outcome in ("admitted", "rejected", "indeterminate")}


WORKER: Final = (
    Figure(
        "veriswarm_worker_policy_version", "gauge", "Policy in the engine; no sample before the first.", _at("version")
    ),
    Figure(
        "veriswarm_worker_newest_policy_version",
        "gauge",
        "The run's newest policy, as far as it knows; -1 before the first.",
        _at("head_version"),
    ),
    Figure("veriswarm_worker_slots", "gauge", "Slots under way.", _at("slots")),
    Figure(
        "veriswarm_worker_undelivered", "gauge", "Slots that are generated and have no receipt.", _at("undelivered")
    ),
    Figure("veriswarm_worker_tokens", "counter", "Tokens that were generated.", _at("tokens")),
    Figure("veriswarm_worker_slots_generated", "counter", "Slots that were generated.", _at("generated")),
    Figure("veriswarm_worker_verdicts", "counter", "Receipts by outcome.", _outcomes, label="outcome"),
    Figure("veriswarm_worker_admitted_tokens", "counter", "Tokens of its admitted slots.", _at("admitted_tokens")),
    Figure("veriswarm_worker_slots_lost", "counter", "Slots that were generated and came to nothing.", _at("lost")),
    Figure("veriswarm_worker_slots_expired", "counter", "Leases that ended before their slot.", _at("expired")),
    Figure(
        "veriswarm_worker_engine_restarts", "counter", "Starts of the engine after it failed.", _at("engine_restarts")
    ),
    Figure(
        "veriswarm_worker_policy_switches", "counter", "Policies that took over with slots under way.", _at("switches")
    ),
    Figure(
        "veriswarm_worker_fetched_bytes", "counter", "Bytes of policies that came.", _at("broadcast_bytes", "fetched")
    ),
    Figure("veriswarm_worker_coordinator_away", "gauge", "1 while no coordinator answers.", _at("coordinator_away")),
    Figure("veriswarm_worker_run_over", "gauge", "1 once the run is over.", _at("run_is_over")),
    Figure("veriswarm_worker_neighbours", "gauge", "Peers that it has a link to.", _at("network", "neighbours")),
)

PEER: Final = (
    Figure("veriswarm_peer_up", "gauge", "1 while it takes part in the network.", _at("network", "up")),
    Figure(
        "veriswarm_peer_descriptor_version",
        "gauge",
        "Version of the run's newest descriptor that it knows.",
        _at("descriptor_version"),
    ),
    Figure("veriswarm_peer_neighbours", "gauge", "Peers that it has a link to.", _at("network", "neighbours")),
    Figure("veriswarm_peer_known", "gauge", "Peers that it could tell others of.", _at("network", "known")),
    Figure(
        "veriswarm_peer_network_restarts", "counter", "Starts after its network failed.", _at("network", "restarts")
    ),
    Figure("veriswarm_peer_frames", "counter", "Frames on its links.", _at("network", "frames"), label="fate"),
    Figure(
        "veriswarm_peer_reservations", "gauge", "Nodes that it relays for.", _at("network", "relay", "reservations")
    ),
    Figure("veriswarm_peer_circuits", "gauge", "Conversations that it relays.", _at("network", "relay", "circuits")),
)


class Latest:
    """The newest account of itself that a process has given; safe to read from another thread."""

    def __init__(self) -> None:
        self._status: Mapping[str, Any] | None = None

    def note(self, status: Mapping[str, Any]) -> None:
        """Keep `status`, which nobody may change afterwards."""
        self._status = status

    def __call__(self) -> Mapping[str, Any] | None:
        return self._status


class Asking(Onlooker):
    """Stands before another onlooker, and asks the worker that it meets whenever another thread wants to know."""

    def __init__(self, onlooker: Onlooker) -> None:
        self._onlooker = onlooker
        self._met: tuple[asyncio.AbstractEventLoop, Status] | None = None

    def meet(self, status: Status) -> None:
        """Remember whom to ask, and on which loop."""
        self._met = asyncio.get_running_loop(), status
        self._onlooker.meet(status)

    def notice(self, kind: Kind, /, **keys: Any) -> None:
        """For the other one."""
        self._onlooker.notice(kind, **keys)

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """For the other one."""
        return self._onlooker.fetching(version)

    def __call__(self) -> Mapping[str, Any] | None:
        """The worker's account of itself; None before it has joined, after its end, and if it does not answer."""
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
