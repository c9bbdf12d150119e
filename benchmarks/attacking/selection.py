"""What is trained on while a third of the nodes do the slots that they like and hold the others."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.attacking.swarm import SwarmUnderAttack, started
from benchmarks.report import say
from coordinator.lab.processes.layout import demo_run_toml
from coordinator.lab.processes.ledger import Ledger
from coordinator.lab.redteam.attack import Attack, SelectiveAttack
from coordinator.lab.redteam.attacks.withheld_good import WithheldGood
from coordinator.lab.redteam.attacks.withheld_kind import WithheldKind
from coordinator.lab.redteam.attacks.withheld_signal import WithheldSignal
from coordinator.lab.redteam.raid import RaidSettings, open_raid
from coordinator.lab.redteam.workshop import Work

KINDS: Final[tuple[type[SelectiveAttack], ...]] = (WithheldKind, WithheldSignal, WithheldGood)
ADDRESS: Final = "127.88.0.1"
"""Of the selective node: another network than the honest ones'."""
SETTLE_S: Final = 240.0
MAX_ASYNC: Final = 2
RUN_TOML: Final = {"steps": 100_000, "groups_per_step": 16, "max_async": MAX_ASYNC, "learning_rate": 1e-7}
"""Almost no learning, so that the mean reward does not move by itself."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Mean reward and number of the groups that were trained on, of the versions that were leased under attack; what it
    would be with the gaps, and if everything that was withheld had stayed missing."""

    groups: int
    withheld: int
    gaps: int
    reward: float
    reward_of_all: float
    reward_if_lost: float


def measure_selection(seconds: float, repeats: int) -> dict[str, float | None]:
    """Return the figures of the part `selection`: the worst of the kinds counts."""
    figures, biases, rates = dict[str, float | None](), list[float](), list[float]()
    rules = demo_run_toml(name='"selection"', **RUN_TOML)
    with started(0, rules=rules) as swarm:
        clean = []
        for _ in range(repeats):
            say(f"{seconds:.0f} s without a selective node")
            clean.append(swarm.groups_per_minute(seconds))
        for kind in KINDS:
            say(f"{seconds:.0f} s with {kind.name}")
            delivered, rate = _under(swarm, kind, seconds)
            key = kind.name.replace("-", "_")
            bias = abs(delivered.reward - delivered.reward_of_all)
            biases.append(bias)
            rates.append(rate)
            figures |= {
                f"{key}_slots": delivered.withheld,
                f"{key}_gaps": delivered.gaps,
                f"{key}_groups": delivered.groups,
                f"{key}_bias": bias,
                f"{key}_bias_if_lost": abs(delivered.reward_if_lost - delivered.reward_of_all),
                f"{key}_groups_per_minute": rate,
            }
    return figures | {
        "selective_delivery_bias": max(biases),
        "selective_groups_per_minute_clean": statistics.median(clean),
        "selective_share": min(rates) / statistics.median(clean),
    }


def _under(swarm: SwarmUnderAttack, kind: type[SelectiveAttack], seconds: float) -> tuple[Delivered, float]:
    """Run the attack for so long; return what was trained on of what was leased meanwhile, and the rate of groups."""
    withheld = dict[str, float]()

    class Recorded(kind):  # type: ignore[misc, valid-type]
        """Draws what it withholds, so that its reward is known."""

        async def dislikes(self, work: Work) -> bool:
            if not await super().dislikes(work):
                return False
            rewards = map(work.reward, await work.honest())
            withheld[f"{work.lease.version}/{work.lease.slot}"] = statistics.fmean(rewards)
            return True

    first = swarm.status()["head_version"]
    with _selective(swarm, Recorded()):
        rate = swarm.groups_per_minute(seconds)
        last = swarm.status()["head_version"]
    if not swarm.wait(SETTLE_S, lambda: swarm.status().get("finished_steps", 0) > last + MAX_ASYNC):
        raise SystemExit(f"the run stands still after {kind.name}")
    return _delivered(swarm, withheld, range(first + 1, last + 1)), rate


@contextlib.contextmanager
def _selective(swarm: SwarmUnderAttack, attack: Attack) -> Iterator[None]:
    """Have a selective node work within the block, in this process."""
    settings = RaidSettings(
        coordinator=swarm.swarm.coordinator_url,
        run_id=swarm.swarm.run_id,
        state=swarm.swarm.folder / attack.name,
        attacks=(attack,),
        address=ADDRESS,
    )
    stop = asyncio.Event()

    async def attack_until_stopped() -> None:
        async with open_raid(settings) as raid:
            await raid.run(stop)

    async def end() -> None:
        stop.set()

    running = swarm.loop.start(attack_until_stopped())
    try:
        yield
    finally:
        swarm.loop.run(end())
        running.result()


def _delivered(swarm: SwarmUnderAttack, withheld: Mapping[str, float], versions: Container[int]) -> Delivered:
    """Compare what was trained on with what was leased, of these policies."""
    ledger = Ledger(swarm.swarm.coordinator_url)
    ledger.catch_up(swarm.status()["log_size"])
    used = {
        f"{verdict.version}/{verdict.slot}": statistics.fmean(verdict.rewards)
        for name, verdict in ledger.verdicts.items()
        if name in ledger.used and verdict.version in versions and verdict.rewards
    }
    of_these = {slot: reward for slot, reward in withheld.items() if int(slot.partition("/")[0]) in versions}
    gaps = {slot: reward for slot, reward in of_these.items() if slot not in used}
    return Delivered(
        groups=len(used),
        withheld=len(of_these),
        gaps=len(gaps),
        reward=statistics.fmean(used.values()),
        reward_of_all=statistics.fmean([*used.values(), *gaps.values()]),
        reward_if_lost=statistics.fmean(reward for slot, reward in used.items() if slot not in of_these),
    )
