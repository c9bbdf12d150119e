"""One relay of three is bad: how much longer it takes than with three good ones.

Two workers know all three relays. Relays have uplinks of u and the origin one of 3 u, so that S / u is the lower
bound with three good relays (what each receives) and with two (what they send to two workers): the network asks
nothing for the loss, and what remains is what finding out costs. Workers begin without any measurement.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
from collections.abc import Iterator

from benchmarks.broadcasting import ours
from benchmarks.broadcasting.delivery import Setting, deliver
from benchmarks.broadcasting.processes import NodeSwarm

RELAYS, WORKERS = 3, 2
SLOW_BYTES_PER_S = 1e6
CASES = ("clean", "corrupt", "missing", "slow")


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """Yield a URL at which connections are refused, and which no other process gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def broadcast(case: str, setting: Setting) -> float:
    """Return the seconds to the last worker. Raise WorkerNotServed."""
    with NodeSwarm(setting.within) as swarm, nobody() as missing:
        throttle = ours.Throttle(swarm)
        origin = ours.start_origin(swarm)
        upstream = throttle.link(origin.url, RELAYS * setting.bytes_per_s)
        relays = [ours.start_relay(swarm, [upstream]).url for _ in range(RELAYS - (case == "missing"))]
        rates = [setting.bytes_per_s] * len(relays)
        if case == "corrupt":
            module = "benchmarks.broadcasting.hostile"
            relays[0] = swarm.start("liar", [sys.executable, "-m", module, relays[0]]).url
        elif case == "slow":
            rates[0] = SLOW_BYTES_PER_S
        sources = [throttle.link(url, rate) for url, rate in zip(relays, rates, strict=True)]
        if case == "missing":
            sources.insert(0, missing)
        workers = [ours.start_worker(swarm, sources) for _ in range(WORKERS)]
        return deliver(setting, origin, workers).complete_seconds()


def measure(setting: Setting) -> dict[str, float]:
    """Return medians over rounds in which the cases take turns, and the worst over the clean one.

    Raise WorkerNotServed.
    """
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    for _ in range(setting.repeats):
        for case in CASES:
            taken[case].append(broadcast(case, setting))
    medians = {case: statistics.median(times) for case, times in taken.items()}
    clean = medians.pop("clean")
    return {
        "one_bad_relay_slowdown": max(medians.values()) / clean,
        "three_good_relays_seconds": clean,
        "three_good_relays_bound_seconds": setting.payload.size_bytes / setting.bytes_per_s,
        **{f"one_{case}_relay_seconds": median for case, median in medians.items()},
        **{f"one_{case}_relay_slowdown": median / clean for case, median in medians.items()},
    }
