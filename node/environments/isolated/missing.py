"""An environment of the run that is not installed on this machine, where the others can be worked on."""

from __future__ import annotations

from dataclasses import dataclass

from node.environments.base import EnvironmentFault, Problem


@dataclass(frozen=True, slots=True)
class NotInstalled:
    """Stands in a run's list for an environment that is missing; whatever is asked of it raises `fault`."""

    name: str
    fault: EnvironmentFault

    def problem(self, _index: int, /) -> Problem:
        raise self.fault

    def reward(self, _problem: Problem, _completion: str, /) -> float:
        raise self.fault
