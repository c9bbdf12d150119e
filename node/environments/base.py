"""Problems, and rewards for completions of them (docs/protocol.md, sections 5 and 7).

An environment is a pure function of its arguments: worker, coordinator and auditor each compute
`problem(index)` and get the same prompt, and anyone can recompute a reward. So nothing here reads a clock, a
network, Python's salted `hash`, or the order of a set of strings; randomness is `draws`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from node.errors import NodeError
from shardcast.wire import derive

INDEX_LIMIT = 2**63
"""Problem indexes are below this; slots draw them uniformly (section 5)."""

END_OF_THOUGHT = "</think>"


class EnvironmentFault(NodeError):
    """An environment cannot be used on this machine, or for this run; `code` says why."""

    code = "environment_fault"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt as text, and whatever the environment needs to judge an answer to it.

    `opening`: how many characters of the prompt stand before what the user says, such as the marks of a chat. What is
    asked for besides goes there.
    """

    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)
    opening: int = 0


class Environment(Protocol):
    """A source of problems with its reward."""

    @property
    def name(self) -> str:
        """What a run's `environments` list calls it."""

    def problem(self, index: int) -> Problem:
        """Problem `index`, 0 <= index < 2**63; the same on every machine and Python version."""

    def reward(self, problem: Problem, completion: str) -> float:
        """The reward in [0, 1]; deterministic, and never raises on account of what the completion says.

        Where this machine cannot tell, it raises NodeError, and the verdict is indeterminate.
        """


@runtime_checkable
class Conversation(Environment, Protocol):
    """An environment of several turns: after each that the model ends, it may say something, and the model goes on.

    What it says is never sent by anybody. Worker, coordinator and auditor each ask `reply` with the same turns
    and get the same text (docs/protocol.md, section 4.7). `reward` is that of a completion of one turn.
    """

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """What the environment says after the last of the model's `turns`; None where the rollout is over.

        Deterministic, bounded in time and size whatever the turns say, and never raises on account of them. Where
        this machine cannot tell, it raises NodeError, and the verdict is indeterminate.
        """

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        """The reward in [0, 1] of all that the model wrote, at least one turn; as `Environment.reward` otherwise."""


def draws(environment: str, index: int) -> Iterator[int]:
    """Uniform 64-bit integers that belong to one problem: BLAKE3 of its name, its index and a block counter.

    `next(numbers) % n` is uniform below n up to a bias of n / 2**64. Python's `random` is not used, because
    its methods may change between releases.
    """
    for block in count():
        drawn = derive(
            "veriswarm/1 environment", environment.encode(), index.to_bytes(8, "big"), block.to_bytes(4, "big")
        )
        yield from (int.from_bytes(drawn[at : at + 8], "big") for at in range(0, len(drawn), 8))


def answer_in(completion: str) -> str | None:
    """What stands after the last `</think>`, stripped; None where no thought was ended."""
    _, mark, answer = completion.rpartition(END_OF_THOUGHT)
    return answer.strip() if mark else None


T = TypeVar("T", bound=msgspec.Struct)


def configure(cls: type[T], arguments: Mapping[str, Any]) -> T:
    """An environment whose settings are `arguments`; raise EnvironmentFault (bad_arguments) on a wrong one."""
    try:
        return msgspec.convert(dict(arguments), cls)
    except msgspec.ValidationError as error:
        raise EnvironmentFault(f"{cls.__name__}: {error}", code="bad_arguments") from error
