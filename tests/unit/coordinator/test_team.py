"""The processes of a world, kept in step by what the first one says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from coordinator.training.distributed_learner import Team
from coordinator.training.grpo import Execution
from node.policy.errors import PolicyError
from node.protocol.run import EnvironmentSpec, RunSpec

SPEC = RunSpec(name="team", environments=(EnvironmentSpec(name="arithmetic"),))


@dataclass
class Overheard:
    """A world of two, of which the other only listens."""

    size: int = 2
    is_first: bool = True
    said: list[str] = field(default_factory=list)

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is not None
        self.said.append(msgspec.msgpack.decode(data)["action"])
        return data


def test_the_others_are_let_go_at_the_end(tmp_path):
    world: Any = Overheard()
    Team(tmp_path, Execution(world=world)).end()
    assert world.said == ["end"]


def test_nothing_is_said_to_processes_that_are_in_the_middle_of_something(tmp_path):
    """They would wait in one collective and this process in another: the run would stall, and no traceback say why."""
    world: Any = Overheard()
    team = Team(tmp_path, Execution(world=world))
    with pytest.raises(PolicyError):
        team.restore(SPEC)  # there is no policy
    team.end()
    assert world.said == ["restore"]
