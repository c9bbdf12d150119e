"""One process of `benchmarks.memory`: `torchrun -m benchmarks.memory_rank FOLDER`.

It takes the trainer's way (load, publish, two steps, publish) with the policy in FOLDER/warm, so that everything is
imported and connected, and then with the one in FOLDER. Of the latter it writes down, in FOLDER/rank-N.json, what was
resident at the start and, for each command, what was resident before and after it and at the peak within, in bytes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.resident import resident, settle
from coordinator.training.distributed_learner import Team
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution
from coordinator.training.world import World, open_world
from node.protocol.run import EnvironmentSpec, RunSpec, TrainingSpec

SPEC = RunSpec(
    name="memory",
    environments=(EnvironmentSpec(name="arithmetic"),),
    training=TrainingSpec(minibatches=1, learning_rate=1e-6),
)
GROUPS, SAMPLES, TOKENS = 2, 4, 16
STEPS = 2
"""In the first one there is no optimizer state yet while gradients are computed."""
DTYPES = (torch.bfloat16, torch.float32)


class MeasuredTeam(Team):
    """A team whose every process measures each command."""

    def __init__(self, state: Path, world: World) -> None:
        super().__init__(state, Execution(world=world))
        self.start = settle()
        self.commands: list[dict[str, Any]] = []

    def _execute(self, command: Any) -> None:
        before = settle()
        super()._execute(command)
        peak = resident("VmHWM")
        name = f"{command.action}-{command.dtype}".rstrip("-")
        self.commands.append({"command": name, "before": before, "peak": peak, "after": settle()})


def make_groups(vocabulary: int) -> list[Group]:
    """Draw short rollouts, half of which earn 1."""
    rng = random.Random(0)

    def sample() -> Sample:
        return Sample((5, 6, 7), tuple(rng.choices(range(5, vocabulary), k=TOKENS)), (-4.5,) * TOKENS)

    rewards = tuple(float(at % 2) for at in range(SAMPLES))
    return [Group(0, rewards, tuple(sample() for _ in range(SAMPLES))) for _ in range(GROUPS)]


def command(team: Team, state: Path) -> None:
    """Load the policy, publish it in each dtype as it is, train two steps, and publish it again."""
    learner = team.restore(SPEC)
    for dtype in DTYPES:
        team.write_policy(state / f"published-{str(dtype)[6:]}", dtype)
    for _ in range(STEPS):
        team.train(make_groups(learner.model.config.vocab_size))
    for dtype in DTYPES:
        team.write_policy(state / "trained", dtype)
    team.end()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with open_world(device="cpu") as world:
        for state in (folder / "warm", folder):
            team = MeasuredTeam(state, world)
            if world.is_first:
                command(team, state)
            else:
                team.follow()
        found = {"start": team.start, "commands": team.commands}
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
