"""A swarm's admitted work while a crowd of hostile relays is announced, over the same swarm's without them."""

from __future__ import annotations

import contextlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.attacking.crowd import ANY, TWO_FACED, Crowd
from benchmarks.attacking.hoarders import Hoarders, newcomer_waits
from benchmarks.attacking.loop import Loop
from benchmarks.report import say
from coordinator.lab.processes.layout import Swarm, lay_out
from coordinator.lab.processes.local_http import get_json
from coordinator.lab.processes.supervisor import Supervisor

RUN_TOML: Final = """
name = "liveness"

[model]
initial = "random-tiny"

[[environments]]
name = "reverse"

[sampling]
group_size = 4
max_new_tokens = 24

[batch]
groups_per_step = 8
rejection_backoff_seconds = 0.1
rejection_backoff_max_seconds = 1.0

[training]
steps = 100_000

[broadcast]
keep_versions = 8
"""
"""Small groups and steps, so that policies follow each other within seconds: a late one costs the most."""

WORKERS: Final = 2
WARM_STEPS: Final = 4
WARM_S: Final = 300.0
JOIN_S: Final = 240.0
NEWCOMERS: Final = 5
NEWCOMER_S: Final = 30.0
TICK_S: Final = 0.1
_HERE: Final = re.compile(r"policy \d+ is here")


@dataclass(slots=True)
class SwarmUnderAttack:
    """A swarm that runs, with workers that can still be added."""

    swarm: Swarm
    supervisor: Supervisor
    loop: Loop
    relays: int

    def wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Look after the processes for so long, or until the condition holds; return whether it does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.supervisor.poll()
            if until():
                return True
            time.sleep(TICK_S)
        return until()

    def status(self) -> dict[str, Any]:
        return get_json(f"{self.swarm.coordinator_url}/v1/status", seconds=5.0) or {}

    def admitted(self) -> int:
        """Count the admitted groups so far."""
        deadline = time.monotonic() + WARM_S
        while not (status := self.status()):
            if time.monotonic() > deadline:
                raise SystemExit("the coordinator does not answer")
            self.wait(TICK_S)
        return sum(row["count"] for row in status["verdicts"] if row["outcome"] == "admitted")

    def groups_per_minute(self, seconds: float) -> float:
        before, started = self.admitted(), time.monotonic()
        self.wait(seconds)
        return 60 * (self.admitted() - before) / (time.monotonic() - started)

    def attacked(self, kinds: Sequence[str] = ANY) -> contextlib.AbstractContextManager[Crowd]:
        """Announce a crowd of these kinds within the block."""
        run = (self.swarm.coordinator_url, self.swarm.run_id, self.swarm.origin_url)
        return self.loop.attacking(Crowd(*run, count=self.relays, kinds=kinds))

    def hoarded(self, count: int) -> contextlib.AbstractContextManager[Hoarders]:
        """Have free keys take leases within the block."""
        return self.loop.attacking(Hoarders(self.swarm.coordinator_url, self.swarm.run_id, count=count))

    def newcomers(self, first: int) -> list[float | None]:
        """Return how long each of some new keys, of networks of their own, waits for its first lease."""
        run = (self.swarm.coordinator_url, self.swarm.run_id)
        numbers = range(first, first + NEWCOMERS)
        return [self.loop.run(newcomer_waits(*run, number=number, patience_s=NEWCOMER_S)) for number in numbers]

    def join(self, name: str) -> float | None:
        """Start one more worker; return the seconds until it has its first policy, None if it has none in time."""
        started = time.monotonic()
        self.supervisor.start([command for command in self.swarm.commands if command.name == name])
        log = self.supervisor.log_path(name)
        came = self.wait(JOIN_S, lambda: _HERE.search(log.read_text(errors="replace")) is not None)
        return time.monotonic() - started if came else None


@contextlib.contextmanager
def started(relays: int, *, rules: str = RUN_TOML) -> Iterator[SwarmUnderAttack]:
    """Start a swarm under a run.toml and wait until it trains."""
    with tempfile.TemporaryDirectory(prefix="liveness-swarm-") as name, contextlib.closing(Loop()) as loop:
        folder = Path(name)
        swarm = lay_out(folder / "run", rules, honest=WORKERS + 2, hostile=(), leaves=2)
        late = {f"honest-{WORKERS + 1}", f"honest-{WORKERS + 2}"}
        with Supervisor(folder / "logs") as supervisor:
            supervisor.start(command for command in swarm.commands if command.name not in late)
            made = SwarmUnderAttack(swarm, supervisor, loop, relays)
            if not made.wait(WARM_S, lambda: made.status().get("finished_steps", 0) >= WARM_STEPS):
                raise SystemExit("the swarm does not train: there is nothing to compare with")
            yield made


def measure_swarm(seconds: float, repeats: int, relays: int) -> dict[str, float | None]:
    """Return the figures of the part `swarm`: rates in turn, and the time that a worker takes to join."""
    clean, attacked, deceived = list[float](), list[float](), list[float]()
    asked = announced = 0
    with started(relays) as swarm:
        for _ in range(repeats):
            say(f"{seconds:.0f} s without hostile relays")
            clean.append(swarm.groups_per_minute(seconds))
            say(f"{seconds:.0f} s with {relays}")
            with swarm.attacked() as crowd:
                attacked.append(swarm.groups_per_minute(seconds))
            asked, announced = asked + crowd.asked, announced + crowd.announced
            say(f"{seconds:.0f} s with {relays} that serve their first chunk alone")
            with swarm.attacked(TWO_FACED):
                deceived.append(swarm.groups_per_minute(seconds))
        say("a worker joins")
        join_s = swarm.join(f"honest-{WORKERS + 1}")
        say(f"another joins among {relays} hostile relays")
        with swarm.attacked():
            swarm.wait(min(seconds, 15.0))
            join_attacked_s = swarm.join(f"honest-{WORKERS + 2}")
    return {
        "hostile_relays": relays,
        "hostile_relays_announced": announced,
        "hostile_relays_asked": asked,
        "relays_hanging_share": statistics.median(attacked) / statistics.median(clean),
        "relays_two_faced_share": statistics.median(deceived) / statistics.median(clean),
        "groups_per_minute": statistics.median(clean),
        "groups_per_minute_attacked": statistics.median(attacked),
        "join_s": join_s,
        "join_s_attacked": join_attacked_s,
    }


def measure_hoarding(seconds: float, repeats: int, hoarders: int) -> dict[str, float | None]:
    """Return the figures of the part `hoarding`: rates in turn, and how long newcomers wait for a lease."""
    clean, hoarded = list[float](), list[float]()
    waits, waits_hoarded = list[float | None](), list[float | None]()
    leased = returned = 0
    with started(0) as swarm:
        for number in range(repeats):
            say(f"{seconds:.0f} s without hoarders")
            clean.append(swarm.groups_per_minute(seconds))
            waits += swarm.newcomers(2 * number * NEWCOMERS)
            say(f"{seconds:.0f} s with {hoarders}")
            with swarm.hoarded(hoarders) as crowd:
                hoarded.append(swarm.groups_per_minute(seconds))
                waits_hoarded += swarm.newcomers((2 * number + 1) * NEWCOMERS)
            leased, returned = leased + crowd.leased, returned + crowd.returned
    return {
        "hoarders": hoarders,
        "hoarded_leases": leased,
        "hoarded_leases_returned": returned,
        "hoarding_share": statistics.median(hoarded) / statistics.median(clean),
        "hoarding_groups_per_minute_clean": statistics.median(clean),
        "newcomer_wait_s": _longest(waits),
        "newcomer_wait_s_hoarded": _longest(waits_hoarded),
        "newcomers_without_lease_hoarded": sum(wait is None for wait in waits_hoarded),
    }


def _longest(waits: Sequence[float | None]) -> float | None:
    return max((wait for wait in waits if wait is not None), default=None)
